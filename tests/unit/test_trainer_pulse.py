"""What the agent sees of a rank in another process: its marks, its beats, and that both stop with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from laminar.core.progress import GroupWatch, Hang, Phase, ProgressLimits, RankSign
from laminar.shell.process import stopped_descendants
from laminar.trainer.pulse import BOARD, Board, Pulse

RANK = """
import sys, threading
from laminar.core.progress import Phase
from laminar.trainer.pulse import Pulse
pulse = Pulse.from_env()
for line in sys.stdin:
    phase = line.strip()
    if phase == "HANG":
        threading.Event().wait()
    pulse.close() if phase == "END" else pulse.mark(Phase[phase])
"""
WAIT_S = 30.0
POLL = threading.Event()


def until(what: str, condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, f"not within {WAIT_S} s: {what}"
        POLL.wait(0.02)


class Rank:
    """Row 1 of a board of two, in a process of its own that does as it is told."""

    def __init__(self) -> None:
        self.board = Board(2)
        environment = os.environ | {BOARD: self.board.path, "LOCAL_RANK": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK], env=environment, stdin=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{word}\n" for word in words))

    @property
    def sign(self) -> RankSign:
        return self.board.read()[1]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.board.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_marks_of_another_process_are_seen_in_their_own_row(rank: Rank) -> None:
    rank.tell("WAIT", "STEP", "WAIT", "SAVE")
    until("four marks", lambda: rank.sign.marks == 4)
    assert rank.sign.phase is Phase.SAVE
    until("a beat", lambda: rank.sign.beats > 0)
    assert rank.board.read()[0] == RankSign(0, Phase.START, 0, 0)
    rank.tell("END")
    until("its end", lambda: rank.sign.phase is Phase.END)


def test_a_training_thread_that_hangs_goes_on_beating_and_is_found_by_its_marks(rank: Rank) -> None:
    watch, found = GroupWatch(ProgressLimits(step_least_s=3.0, step_factor=0.0)), list[Hang]()

    def look() -> bool:
        hang = watch.look(time.monotonic(), [rank.sign], stopped_descendants(os.getpid()))
        found.extend([hang] if hang is not None else [])
        return hang is not None

    rank.tell("STEP", "WAIT", "STEP", "WAIT", "STEP", "WAIT", "STEP", "HANG")
    until("three steps and a half", lambda: rank.sign.marks == 7)
    assert rank.sign.num_steps == 3 and 0 < rank.sign.longest_step_s < WAIT_S
    assert not look()
    beats = rank.sign.beats
    until("the hang", look)
    assert "rank 1 has made no progress in a training step" in found[0].reason
    assert rank.sign.beats > beats


def test_a_stopped_rank_is_found_and_one_that_goes_on_in_time_is_not(rank: Rank) -> None:
    rank.tell("WAIT")
    until("a beat", lambda: rank.sign.beats > 0)
    os.kill(rank.process.pid, signal.SIGSTOP)
    until("it is stopped", lambda: stopped_descendants(os.getpid()) == [rank.process.pid])
    os.kill(rank.process.pid, signal.SIGCONT)
    until("it runs", lambda: not stopped_descendants(os.getpid()))


def test_a_rank_without_an_agent_needs_no_board() -> None:
    pulse = Pulse("", 0)
    pulse.mark(Phase.STEP)
    pulse.close()
