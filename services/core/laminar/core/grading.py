"""When is a reward broken, rather than a response hard to grade?

Each response that its grader gives up on is left out and counted (`ungraded`, never 0). A reward that fails for every
response would so empty the prompt stream without end; `GradingWatch`, in the pool, notices it. Responses that need no
grader (cut at the limit, worth 0 by definition) say nothing about it.

A try that hangs costs its whole time limit. `TryBudget`, beside the graders of one replica, stops paying it three times
for each response once nothing but hangs is seen.
"""

from __future__ import annotations

MAX_UNGRADED_IN_A_ROW = 32
"""Of a reward that fails for 8 of 10 responses one job in 1,000 has such a row; with so few graded responses hardly a
group can be used, so the job could not go on anyway. With the default time limit and one replica's two graders it is
3 minutes of hanging (TryBudget)."""


WARN_UNGRADED_IN_A_ROW = 8
"""Early enough to look at the reward before the job fails, late enough for a judge that was away for a moment."""
NUM_TRIES = 3
"""The first and two retries: a worker may die, or a judge be away, through no fault of the response."""
HANGS_IN_A_ROW = 6
"""Two responses with all their tries: from then on it is the reward that hangs, and trying again only costs time."""


class TryBudget:
    """How many tries a response gets; counts over all workers of one replica, in the order in which tries end."""

    def __init__(self) -> None:
        self._hangs_in_a_row = 0

    def observe(self, *, hung: bool) -> None:
        """A try has ended: it exceeded its time limit, or it gave a value or a failure in time."""
        self._hangs_in_a_row = self._hangs_in_a_row + 1 if hung else 0

    @property
    def num_tries(self) -> int:
        return 1 if self._hangs_in_a_row >= HANGS_IN_A_ROW else NUM_TRIES


class GradingWatch:
    """Counts over all replicas, in the order in which the verdicts arrive."""

    def __init__(self) -> None:
        self.num_ungraded = 0
        self.last_detail = ""
        """Why the latest ungraded response was given up."""
        self._in_a_row = 0
        self._warned = False

    def observe(self, *, graded: bool, detail: str) -> None:
        """The final verdict of a grader on one response."""
        if graded:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.num_ungraded += 1
        self.last_detail = detail or "no reason was given"

    def take_warning(self) -> str:
        """Once a row: that the reward looks broken, for people; empty: nothing to say, or said already."""
        if self._in_a_row < WARN_UNGRADED_IN_A_ROW:
            self._warned = False
            return ""
        if self._warned:
            return ""
        self._warned = True
        return (
            f"{self._in_a_row} responses in a row could not be graded ({self.num_ungraded} in all), the latest "
            f"because: {self.last_detail}. At {MAX_UNGRADED_IN_A_ROW} in a row the job fails."
        )

    @property
    def broken(self) -> str:
        """Why the job cannot go on, for people; empty while it can."""
        if self._in_a_row < MAX_UNGRADED_IN_A_ROW:
            return ""
        return (
            f"The last {self._in_a_row} responses in a row could not be graded, the latest because: "
            f"{self.last_detail}. Mend the reward and run the job again: it goes on from its last checkpoint."
        )

    @property
    def condition(self) -> str:
        """One sentence for people; empty when every response was graded."""
        if not self.num_ungraded:
            return ""
        return f"{self.num_ungraded} responses were left out, the latest because: {self.last_detail}"
