"""The signs that ranks give their agent: a few words of shared memory, one row a rank.

The agent makes the memory (a memfd: no name, no disk, gone with its last holder); a rank finds it by the path in its
environment, because torchrun closes every inherited descriptor. Each word has one writer and is stored whole, so a
reader needs no lock. A rank that hangs or is stopped simply ceases to write.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

from laminar.core.progress import Phase, RankSign

BOARD = "LAMINAR_PULSE_BOARD"
"""Path of the board, for the ranks."""
BEAT_S = 1.0
_WORD_BYTES = 8
_WORK, _BEATS, _STEPS, _LONGEST_US = range(4)
"""The words of a row. _WORK: marks and phase together, so that no reader sees one without the other."""
_WORDS_A_ROW = 4
_PHASE_BITS = 8


class Board:
    """The agent's end. Owner: the agent; `close` when the group has ended."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._fd = os.memfd_create("laminar-pulse", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_ranks * _WORDS_A_ROW * _WORD_BYTES)
        self._memory = mmap.mmap(self._fd, 0)
        self._words = memoryview(self._memory).cast("Q")

    @property
    def path(self) -> str:
        """What a process of the same user below this one opens."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> list[RankSign]:
        return [self._sign(rank) for rank in range(self._num_ranks)]

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self._fd)

    def _sign(self, rank: int) -> RankSign:
        row = self._words[rank * _WORDS_A_ROW : (rank + 1) * _WORDS_A_ROW]
        return RankSign(
            rank=rank,
            phase=Phase(row[_WORK] & ((1 << _PHASE_BITS) - 1)),
            marks=row[_WORK] >> _PHASE_BITS,
            beats=row[_BEATS],
            num_steps=row[_STEPS],
            longest_step_s=row[_LONGEST_US] / 1e6,
        )


class Pulse:
    """A rank's end. `mark` belongs to the training thread; the beats come from a thread that lives until `close`.

    `path` empty: nobody watches (a rank without an agent), and every call does nothing.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._marks = 0
        self._step_began_s: float | None = None
        self._row: memoryview | None = None
        self._closing = threading.Event()
        if not path:
            return
        fd = os.open(path, os.O_RDWR)
        try:
            words = memoryview(mmap.mmap(fd, 0)).cast("Q")
            self._row = words[rank * _WORDS_A_ROW : (rank + 1) * _WORDS_A_ROW]
        finally:
            os.close(fd)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    @classmethod
    def from_env(cls) -> Pulse:
        """Of the rank that torchrun started; its row is its number on this machine."""
        return cls(os.environ.get(BOARD, ""), int(os.environ.get("LOCAL_RANK", "0")))

    def mark(self, phase: Phase) -> None:
        """The training thread has got as far as this phase, or to its next turn in it."""
        row = self._row
        if row is None:
            return
        if self._step_began_s is not None:
            row[_LONGEST_US] = max(row[_LONGEST_US], int((time.monotonic() - self._step_began_s) * 1e6))
            row[_STEPS] += 1
        self._step_began_s = time.monotonic() if phase is Phase.STEP else None
        self._marks += 1
        row[_WORK] = self._marks << _PHASE_BITS | phase

    def close(self) -> None:
        """The rank has nothing left to do."""
        self.mark(Phase.END)
        self._closing.set()

    def _beat(self) -> None:
        row = self._row
        assert row is not None
        while True:
            row[_BEATS] += 1
            if self._closing.wait(BEAT_S):
                return
