"""Headers that every call between services carries, and the words of error answers.

401 unauthorized; 409 conflict (a lower generation, attempt or epoch, or another job); 410 superseded incarnation;
404 unknown; 422 malformed; 429 too much in flight; 503 not ready: call again.
"""

from __future__ import annotations

AUTHORIZATION = "authorization"
"""`Bearer <job token>`."""
JOB = "laminar-job"
"""The job's uid; another job's message is refused."""
GENERATION = "laminar-generation"
"""The pool generation that the caller believes in; absent before registration."""
MSGPACK = "application/msgpack"
