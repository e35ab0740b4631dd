"""`laminar logs`: the processes' logs, merged by time, and followed as they grow."""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from laminar.cli.errors import BadInput
from laminar.cli.run_data import open_run

TAIL_ENTRIES = 40
"""What `-f` shows of the past."""
FOLLOW_EVERY_S = 0.25
"""Files are looked at, not waited on: a log is written by a process that outlives any connection to it."""
MAX_READ_BYTES = 2**20
_STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z ")
_STAMP_BYTES = 24


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One event of a log: its line and the lines without a time (tracebacks) that follow it."""

    stamp: str
    slot: str
    text: str = field(compare=False)


def slots(path: Path) -> dict[str, Path]:
    """Log file of each slot. Raises BadInput if the folder holds no run."""
    folder, _, _ = open_run(path)
    return {file.stem: file for file in sorted((folder.path / "logs").glob("*.log"))}


def chosen(path: Path, slot: str | None) -> dict[str, Path]:
    """All logs, or one. Raises BadInput for a slot without a log."""
    files = slots(path)
    if slot is None:
        return files
    if slot not in files:
        raise BadInput(f"{path} has no log of '{slot}'. There are: {', '.join(files) or 'none yet'}.")
    return {slot: files[slot]}


def merged(files: dict[str, Path]) -> Iterator[Entry]:
    """Everything so far, by time."""
    return heapq.merge(*(_entries(slot, file) for slot, file in files.items()))


def tail(files: dict[str, Path], most: int) -> list[Entry]:
    """The newest `most` entries, by time."""
    return list(deque(merged(files), maxlen=most))


def _entries(slot: str, file: Path) -> Iterator[Entry]:
    with file.open("rb") as stream:
        yield from _joined(slot, stream)


def _joined(slot: str, lines: Iterable[bytes]) -> Iterator[Entry]:
    stamp, held = "", list[str]()
    for line in lines:
        if _STAMP.match(line):
            if held:
                yield Entry(stamp, slot, "\n".join(held))
            stamp, held = line[:_STAMP_BYTES].decode(), []
        held.append(line.rstrip(b"\r\n").decode(errors="replace"))
    if held:
        yield Entry(stamp, slot, "\n".join(held))


class Follower:
    """What was added to the logs since the last call. A new file, and one that was cut, are read from their start."""

    def __init__(self, path: Path, slot: str | None) -> None:
        self._path = path
        self._slot = slot
        self._offsets = {name: file.stat().st_size for name, file in chosen(path, slot).items()}

    def news(self) -> list[Entry]:
        """Whole lines only, by time; at most MAX_READ_BYTES of each file."""
        found: list[Entry] = []
        for name, file in chosen(self._path, self._slot).items():
            offset = self._offsets.get(name, 0)
            with file.open("rb") as stream:
                end = stream.seek(0, 2)
                stream.seek(offset if offset <= end else 0)
                data = _whole_lines(stream)
                self._offsets[name] = stream.tell()
            found += _joined(name, data.splitlines(keepends=True))
        return sorted(found)

    def wait(self) -> None:
        """Until it is worth looking again."""
        time.sleep(FOLLOW_EVERY_S)  # noqa: TID251 - see FOLLOW_EVERY_S


def _whole_lines(stream: BinaryIO) -> bytes:
    """Up to the last line end; the stream stands right behind it. A line longer than a whole read is given as it is."""
    data = stream.read(MAX_READ_BYTES)
    end = data.rfind(b"\n") + 1
    if end == 0 and len(data) == MAX_READ_BYTES:
        end = len(data)
    stream.seek(end - len(data), 1)
    return data[:end]


def as_text(entry: Entry, width: int) -> str:
    """With the slot in front of each line; `width` of the slot's column, 0 for none."""
    if not width:
        return entry.text
    return "\n".join(f"{entry.slot:<{width}} | {line}" for line in entry.text.split("\n"))
