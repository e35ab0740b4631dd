"""The output of a run whose reader has gone."""

import os
from pathlib import Path

import pytest

from laminar.cli.output import lasting


def test_lines_for_a_reader_that_is_gone_are_dropped() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        out = lasting(pipe)
        print("first", file=out, flush=True)
        assert os.read(reading, 100) == b"first\n"
        os.close(reading)
        print("second", file=out, flush=True)


def test_lines_that_find_no_room_are_dropped() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this host has no /dev/full")
    with Path("/dev/full").open("w") as full:
        print("line", file=lasting(full), flush=True)


def test_a_terminal_stays_one() -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        out = lasting(terminal)
        assert out.isatty()
        os.close(master)
        print("line", file=out, flush=True)
