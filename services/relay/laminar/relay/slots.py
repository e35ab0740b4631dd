"""A slot: a fixed piece of anonymous shared memory that takes one version after another.

Layout: one header page with the slot's generation, then the bytes of the version. The generation is odd while the
contents change and even while they stand, and only grows; a reader that saw the same even number before and after
has read one version.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from laminar.shell.handoff import SLOT_HEADER_BYTES
from laminar.shell.memory import prefer_huge_pages

F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h; not in Python 3.11's fcntl. Nobody else can map the slot writable; our own mapping, which is older
than the seal, stays writable (F_SEAL_WRITE would fail with EBUSY)."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE


class SlotMemory:
    """One sealed memfd, mapped writable by this process only."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.generation = 0
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, SLOT_HEADER_BYTES + capacity_bytes)
        self._memory = mmap.mmap(self._fd, SLOT_HEADER_BYTES + capacity_bytes)
        prefer_huge_pages(self._memory)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        whole = memoryview(self._memory)
        # A cast to the native type makes each store one 8-byte write: readers never see half a number.
        self._header = whole[:8].cast("Q")
        self.data = whole[SLOT_HEADER_BYTES:]
        whole.release()

    def fileno(self) -> int:
        """The descriptor that readers get."""
        return self._fd

    def begin_change(self) -> None:
        """The contents are void from here on: the generation becomes the next odd number."""
        self._set(self.generation + 1 + self.generation % 2)

    def end_change(self) -> None:
        """The contents stand: the generation becomes the next even number."""
        assert self.generation % 2 == 1, self.generation
        self._set(self.generation + 1)

    def close(self) -> None:
        """Readers' mappings live on; ours and the descriptor go."""
        self._header.release()
        self.data.release()
        self._memory.close()
        os.close(self._fd)

    def _set(self, generation: int) -> None:
        self.generation = generation
        self._header[0] = generation


def page_rounded(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
