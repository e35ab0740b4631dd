"""What both clients share: headers, the typed refusals, and when to call again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from laminar.wire import headers
from laminar.wire.messages import Problem

GENERATION = "generation"
"""The word of a refusal because of the pool's generation; its `current` is the service's own."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
"""A service restarts within a second or two: calling less often than this only adds to the outage."""


class Unreachable(ConnectionError):
    """No answer before the deadline, or a stream that broke off. Calling again is safe."""


class Refused(Exception):
    """The service answered and said no; calling again would get the same answer."""

    def __init__(self, status: int, error: str, detail: str, current: int | None = None) -> None:
        super().__init__(f"{status} {error}: {detail}")
        self.status = status
        self.error = error
        """The stable word of `Problem.error`."""
        self.detail = detail
        self.current = current
        """The incarnation, attempt, generation or epoch in force, where the service said it."""


class Unauthorized(Refused):
    """401: a wrong token."""


class Unknown(Refused):
    """404: the service knows no such thing."""


class Conflict(Refused):
    """409: a lower attempt, epoch or generation, or another job; see `error` and `current`."""


class Superseded(Refused):
    """410: a newer incarnation is in force; stop what this one does."""


class OldGeneration(Superseded):
    """409: a newer generation of the pool is in force; this life is over, and the next one joins that."""


class Malformed(Refused):
    """422: the message does not fit what the service expects."""


_BY_STATUS: dict[int, type[Refused]] = {
    401: Unauthorized, 404: Unknown, 409: Conflict, 410: Superseded, 422: Malformed,
}  # fmt: skip


def is_retried(refused: Refused, generation: int | None) -> bool:
    """429 and every 5xx: the service is busy, starting, or died while it answered. Also one of an older generation
    than the caller's `generation`: it will be replaced, or hear of the newer one."""
    if refused.error == GENERATION and generation is not None:
        return refused.current is not None and refused.current < generation
    return refused.status == 429 or refused.status >= 500


def refusal_of(status: int, body: bytes) -> Refused:
    """The typed error of an answer that is no success."""
    try:
        problem = Problem.model_validate_json(body)
    except ValueError:
        problem = Problem(error="unknown", detail=body[:200].decode(errors="replace"))
    if problem.error == GENERATION:
        return OldGeneration(status, problem.error, problem.detail, problem.current)
    return _BY_STATUS.get(status, Refused)(status, problem.error, problem.detail, problem.current)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls whom: the headers of every call."""

    token: str
    job_uid: str
    generation: int | None
    name: str
    """Slot of the caller; the user agent, for logs."""

    def headers(self) -> dict[str, str]:
        values = {
            headers.AUTHORIZATION: f"Bearer {self.token}",
            headers.JOB: self.job_uid,
            "user-agent": f"laminar/{self.name}",
        }
        if self.generation is not None:
            values[headers.GENERATION] = str(self.generation)
        return values


class Retry:
    """The pauses of one call: 0.05 s doubling to 1 s, each times 0.5-1 by chance, until `deadline_s` has passed.

    `deadline_s` None: for ever.
    """

    def __init__(self, rng: random.Random, deadline_s: float | None, now_s: float | None = None) -> None:
        self._rng = rng
        self._ends_s = None if deadline_s is None else (time.monotonic() if now_s is None else now_s) + deadline_s
        self._pause_s = FIRST_PAUSE_S

    def attempt_timeout_s(self, timeout_s: float) -> float:
        """`timeout_s`, cut to what is left (at least 10 ms, so that a call with a spent deadline still tries once)."""
        if self._ends_s is None:
            return timeout_s
        return max(0.01, min(timeout_s, self._ends_s - time.monotonic()))

    def pause_s(self, reason: str) -> float:
        """How long to wait before the next attempt. Raises Unreachable when the deadline would pass."""
        pause_s = self._pause_s * (0.5 + 0.5 * self._rng.random())
        self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        if self._ends_s is not None and time.monotonic() + pause_s >= self._ends_s:
            raise Unreachable(reason)
        return pause_s
