"""What ends a command with one clear paragraph."""

from __future__ import annotations


class BadInput(Exception):
    """The user's mistake, or something only the user can provide: exit code 2. The text is the whole message."""


EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
