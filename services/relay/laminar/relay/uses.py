"""A slot's state, and the two rights to it: to fill it, and to hold it while it is read or forwarded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from laminar.relay.slots import SlotMemory
from laminar.wire.manifest import Manifest

if TYPE_CHECKING:
    from laminar.relay.store import VersionStore


class Use(Enum):
    EMPTY = "empty"
    FILLING = "filling"
    COMPLETE = "complete"


class VersionLost(Exception):
    """The version left its slot, or will never be complete."""


@dataclass(slots=True, eq=False)
class Slot:
    """State of one slot; guarded by the store's lock."""

    memory: SlotMemory
    use: Use = Use.EMPTY
    manifest: Manifest | None = None
    num_have: int = 0
    has_writer: bool = False
    """A thread may still touch the bytes."""
    readers: set[Pin] = field(default_factory=lambda: set[Pin]())
    forwarders: int = 0
    began_s: float = 0.0
    left_s: float = 0.0
    """When the last writer of a half version left."""

    @property
    def version(self) -> int:
        assert self.manifest is not None
        return self.manifest.version

    def is_held(self, now_s: float) -> bool:
        """A reader is at it that is not overdue."""
        return any(pin.until_s > now_s for pin in self.readers)


class Incoming:
    """The right to fill one slot; of one receiving thread. `landed` in order, then `complete`; `leave` in any case."""

    def __init__(self, store: VersionStore, slot: Slot, manifest: Manifest, interrupt: Callable[[], None]) -> None:
        self.manifest = manifest
        self.slot = slot
        self.interrupt = interrupt
        self.have = slot.num_have
        """Chunks that an earlier writer has brought: go on after them."""
        self._store = store

    def chunk(self, index: int) -> memoryview:
        """Where chunk `index` belongs."""
        start, end = self.manifest.chunk_range(index)
        return self.slot.memory.data[start:end]

    def landed(self, index: int) -> None:
        """Chunk `index` is there and verified. Raises VersionLost if this writer was replaced."""
        self._store.landed(self, index)

    def complete(self) -> None:
        """Makes the version readable. Raises VersionLost if this writer was replaced."""
        self._store.complete(self)

    def leave(self) -> None:
        """The thread touches the slot no more; what it brought stays."""
        self._store.leave(self)


class Pin:
    """A use of one slot by a reader or a forwarder, until `release`. The slot may still be taken away."""

    def __init__(
        self, store: VersionStore, slot: Slot, *, forwards: bool, until_s: float = 0.0,
        interrupt: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        assert slot.manifest is not None
        self.manifest = slot.manifest
        self.slot = slot
        self.generation = slot.memory.generation
        self.forwards = forwards
        self.until_s = until_s
        """Readers: until then the slot is taken for a new version only if there is no other."""
        self.interrupt = interrupt
        """Readers: called when the slot is taken away."""
        self._store = store

    def chunk(self, index: int) -> memoryview:
        start, end = self.manifest.chunk_range(index)
        return self.slot.memory.data[start:end]

    def wait_chunk(self, index: int, timeout_s: float) -> bool:
        """True: chunk `index` is there; False: not within `timeout_s`. Raises VersionLost."""
        return self._store.wait_chunk(self, index, timeout_s)

    def stands(self) -> bool:
        """Nothing was overwritten since the pin was made."""
        return self._store.stands(self)

    def release(self) -> None:
        self._store.release(self)
