"""Where `laminar run` prints. A run outlives its reader: a pipe whose end is gone, a closed terminal, a full disk."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lasting(io.FileIO):
    """Takes everything; what cannot be written is dropped."""

    def write(self, b: ReadableBuffer, /) -> int | None:
        try:
            return super().write(b)
        except OSError:
            return memoryview(b).nbytes


def lasting(out: TextIO) -> TextIO:
    """The descriptor of `out` as a stream that never raises when it is written to."""
    raw = _Lasting(out.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), out.encoding, out.errors)
