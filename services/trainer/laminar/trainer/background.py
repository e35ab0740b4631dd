"""A thread whose owner learns how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

from laminar.shell.calls import Refused, Unreachable
from laminar.trainer.failures import TrainerFailure


class Background:
    """Runs `work` in a daemon thread: a process that must end never waits for a peer that does not answer.

    The owner calls `check` now and then, and `join` at the end.
    """

    def __init__(self, name: str, work: Callable[[], None], on_end: Callable[[], None] = lambda: None) -> None:
        self._work = work
        self._on_end = on_end
        self._failure: Exception | None = None
        self._completed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raises what ended the thread before its work was done."""
        if self._failure is not None:
            raise self._failure
        if self.ended and not self._completed:
            raise TrainerFailure(f"The thread {self._thread.name} ended unexpectedly; its traceback is in the log.")

    def check_if_ended(self) -> None:
        """`check`, for work that ends by itself: silent while it runs and after it was done."""
        if self.ended:
            self.check()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the work, then `check`s. Raises TrainerFailure after `timeout_s`."""
        self._thread.join(timeout_s)
        if not self.ended:
            raise TrainerFailure(f"The thread {self._thread.name} did not end within {timeout_s:.0f} s.")
        self.check()

    def _run(self) -> None:
        try:
            self._work()
            self._completed = True
        except (Refused, Unreachable, TrainerFailure) as error:
            self._failure = error
        finally:
            self._on_end()
