"""When is a reward broken, rather than a response hard to grade?

Each response that its grader gives up on is left out and counted (`ungraded`, never 0). A reward that fails for every
response would so empty the prompt stream without end; this notices it. Responses that need no grader (cut at the
limit, worth 0 by definition) say nothing about it.
"""

from __future__ import annotations

MAX_UNGRADED_IN_A_ROW = 32
"""Of a reward that fails for 8 of 10 responses one job in 1,000 has such a row; with so few graded responses hardly a
group can be used, so the job could not go on anyway. With the default time limit and two graders it is 8 minutes of
hanging at most."""


class GradingWatch:
    """Counts over all replicas, in the order in which the verdicts arrive."""

    def __init__(self) -> None:
        self.num_ungraded = 0
        self.last_detail = ""
        """Why the latest ungraded response was given up."""
        self._in_a_row = 0

    def observe(self, *, graded: bool, detail: str) -> None:
        """The final verdict of a grader on one response."""
        if graded:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.num_ungraded += 1
        self.last_detail = detail or "no reason was given"

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
