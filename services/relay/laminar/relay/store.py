"""The relay's versions: a fixed number of slots, one of them taking the incoming version, the others readable.

Invariants: a version is readable only when all its chunks are here and verified; the newest complete version is never
overwritten; at most one version comes in at a time; no reader and no forwarder can keep a new version out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from laminar.relay.counters import Counters
from laminar.relay.slots import SlotMemory, page_rounded
from laminar.shell.memory import available_memory_bytes
from laminar.shell.transport import Waker
from laminar.wire.links import Held
from laminar.wire.manifest import Manifest, digest_of

WRITER_LEAVES_S = 2.0
"""A replaced writer has its connection shut down; it then only finishes the hash of the chunk at hand."""


class Use(Enum):
    EMPTY = "empty"
    FILLING = "filling"
    COMPLETE = "complete"


class VersionLost(Exception):
    """The version left its slot, or will never be complete."""


class TooLarge(Exception):
    """The version does not fit into this relay's memory. `limit_bytes`: what would."""

    def __init__(self, detail: str, limit_bytes: int) -> None:
        super().__init__(detail)
        self.limit_bytes = limit_bytes


@dataclass(slots=True, eq=False)
class Slot:
    """State of one slot; guarded by the store's lock."""

    memory: SlotMemory
    use: Use = Use.EMPTY
    manifest: Manifest | None = None
    num_have: int = 0
    has_writer: bool = False
    readers: int = 0
    forwarders: int = 0
    began_s: float = 0.0

    @property
    def version(self) -> int:
        assert self.manifest is not None
        return self.manifest.version


class Incoming:
    """The right to fill one slot; of one receiving thread. `landed` in order, then `complete`; `leave` in any case."""

    def __init__(self, store: VersionStore, slot: Slot, manifest: Manifest, interrupt: Callable[[], None]) -> None:
        self.manifest = manifest
        self.slot = slot
        self.interrupt = interrupt
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
        """The thread touches the slot no more; an incomplete version is given up."""
        self._store.leave(self)


class Pin:
    """A use of one slot by a reader or a forwarder, until `release`.

    The slot may still be taken away: `wait_chunk` then raises VersionLost, and a reader sees another generation.
    """

    def __init__(self, store: VersionStore, slot: Slot, *, forwards: bool) -> None:
        assert slot.manifest is not None
        self.manifest = slot.manifest
        self.slot = slot
        self.generation = slot.memory.generation
        self.forwards = forwards
        self._store = store

    def chunk(self, index: int) -> memoryview:
        start, end = self.manifest.chunk_range(index)
        return self.slot.memory.data[start:end]

    def wait_chunk(self, index: int, timeout_s: float) -> bool:
        """True: chunk `index` is there; False: not within `timeout_s`. Raises VersionLost."""
        return self._store.wait_chunk(self, index, timeout_s)

    def release(self) -> None:
        self._store.release(self)


class VersionStore:
    """Thread-safe. `num_slots` slots are made at the first manifest, each of the size that it needs."""

    def __init__(self, num_slots: int, counters: Counters, on_complete: Callable[[], None]) -> None:
        assert num_slots >= 3, "keepVersions (>= 2) and the one that comes in"
        self._num_slots = num_slots
        self._counters = counters
        self._on_complete = on_complete
        self._changed = threading.Condition()
        self._slots: list[Slot] = []
        self._incoming: Incoming | None = None
        self._wakers: set[Waker] = set()
        self._downstream_cursor = -1
        self._closed = False

    # --- the incoming version ---

    def begin(self, manifest: Manifest, interrupt: Callable[[], None]) -> Incoming:
        """Starts to take `manifest`'s version; an unfinished one is given up, its writer stopped by its `interrupt`.

        Raises TooLarge; VersionLost if the replaced writer does not leave in time.
        """
        with self._changed:
            self._make_slots(manifest)
            previous = self._incoming
            if previous is not None:
                self._give_up(previous)
                if not self._changed.wait_for(lambda: not previous.slot.has_writer, WRITER_LEAVES_S):
                    raise VersionLost("the writer of the version before does not leave its slot")
            slot = self._spare()
            self._evict(slot)
            slot.use, slot.manifest, slot.num_have = Use.FILLING, manifest, 0
            slot.has_writer, slot.began_s = True, time.monotonic()
            slot.memory.begin_change()
            self._incoming = Incoming(self, slot, manifest, interrupt)
            self._notify()
            return self._incoming

    def landed(self, incoming: Incoming, index: int) -> None:
        """See Incoming."""
        start, end = incoming.manifest.chunk_range(index)
        with self._changed:
            self._must_be_current(incoming)
            assert incoming.slot.num_have == index, (incoming.slot.num_have, index)
            incoming.slot.num_have = index + 1
            self._changed.notify_all()
        self._counters.received(end - start)

    def complete(self, incoming: Incoming) -> None:
        """See Incoming."""
        slot = incoming.slot
        assert digest_of(incoming.manifest.chunk_hashes) == incoming.manifest.digest
        with self._changed:
            self._must_be_current(incoming)
            assert slot.num_have == incoming.manifest.num_chunks, slot.num_have
            slot.use = Use.COMPLETE
            slot.memory.end_change()
            self._incoming = None
            self._counters.completed(time.monotonic() - slot.began_s)
            self._notify()
        self._on_complete()

    def leave(self, incoming: Incoming) -> None:
        """See Incoming."""
        with self._changed:
            if self._incoming is incoming:
                self._give_up(incoming)
            incoming.slot.has_writer = False
            self._changed.notify_all()

    def abort_incoming(self) -> None:
        """Gives up the version that comes in, if any: its source lost the right to send."""
        with self._changed:
            if self._incoming is not None:
                self._give_up(self._incoming)

    # --- readers and forwarders ---

    def held(self) -> list[Held]:
        """Complete versions, newest last."""
        with self._changed:
            return [Held(version=slot.version, digest=_digest(slot)) for slot in self._complete()]

    def newest(self) -> int:
        """Newest complete version; -1: none."""
        with self._changed:
            complete = self._complete()
            return complete[-1].version if complete else -1

    def pin_for_reader(self, version: int | None, wait_s: float) -> Pin | None:
        """Holds `version` (None: the newest) for a reader. Waits up to `wait_s` for one that has not come yet; None:
        it did not come, or is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_passed(version), wait_s)
            for slot in reversed(self._complete()):
                if version is None or slot.version == version:
                    slot.readers += 1
                    return Pin(self, slot, forwards=False)
            return None

    def pin_for_downstream(self, cursor: int) -> Pin | None:
        """What a neighbour that holds `cursor` gets next: the newest complete version, else the one coming in."""
        with self._changed:
            self._downstream_cursor = cursor
            complete = self._complete()
            slot = complete[-1] if complete else None
            if slot is None or slot.version <= cursor:
                slot = self._incoming.slot if self._incoming is not None else None
            if slot is None or slot.version <= cursor or self._closed:
                return None
            slot.forwarders += 1
            return Pin(self, slot, forwards=True)

    def wait_chunk(self, pin: Pin, index: int, timeout_s: float) -> bool:
        """See Pin."""

        def is_settled() -> bool:
            return self._closed or not self._is_intact(pin) or pin.slot.num_have > index

        with self._changed:
            settled = self._changed.wait_for(is_settled, timeout_s)
            if self._closed or not self._is_intact(pin):
                raise VersionLost(f"version {pin.manifest.version} left its slot")
            return settled

    def release(self, pin: Pin) -> None:
        """See Pin."""
        with self._changed:
            if pin.forwards:
                pin.slot.forwarders -= 1
            else:
                pin.slot.readers -= 1

    def subscribe(self, waker: Waker) -> None:
        """`waker` is set whenever a version begins, completes or is given up."""
        with self._changed:
            self._wakers.add(waker)

    def unsubscribe(self, waker: Waker) -> None:
        with self._changed:
            self._wakers.discard(waker)

    def close(self) -> None:
        """Ends all waiting. The memory goes with `free`, after the threads."""
        with self._changed:
            self._closed = True
            if self._incoming is not None:
                self._give_up(self._incoming)
            self._notify()

    def free(self) -> None:
        """Gives the memory back; only after every thread that uses it has ended."""
        for slot in self._slots:
            slot.memory.close()
        self._slots = []

    # --- with the lock held ---

    def _make_slots(self, manifest: Manifest) -> None:
        needed_bytes = page_rounded(manifest.total_bytes)
        if not self._slots:
            limit_bytes = available_memory_bytes() // self._num_slots
            if needed_bytes > limit_bytes:
                raise TooLarge(
                    f"version {manifest.version} has {manifest.total_bytes} bytes; {self._num_slots} slots of that "
                    f"size do not fit into the memory available here ({limit_bytes * self._num_slots} bytes)",
                    limit_bytes,
                )
            self._slots = [Slot(SlotMemory(f"laminar-slot-{index}", needed_bytes)) for index in range(self._num_slots)]
        capacity_bytes = self._slots[0].memory.capacity_bytes
        if manifest.total_bytes > capacity_bytes:
            raise TooLarge(
                f"version {manifest.version} has {manifest.total_bytes} bytes; the slots were sized by the first "
                f"version and take {capacity_bytes}",
                capacity_bytes,
            )

    def _spare(self) -> Slot:
        """An empty slot, else the oldest complete one that nobody uses, that only readers use, that is forwarded."""
        newest = self._complete()[-1:]
        candidates = [slot for slot in self._slots if slot not in newest and not slot.has_writer]
        return min(candidates, key=_reluctance)

    def _evict(self, slot: Slot) -> None:
        if slot.use is not Use.COMPLETE:
            return
        if slot.readers:
            self._counters.reused_under_reader()
        if self._wakers and slot.version > self._downstream_cursor:
            self._counters.superseded()

    def _give_up(self, incoming: Incoming) -> None:
        self._incoming = None
        incoming.slot.use, incoming.slot.num_have = Use.EMPTY, 0
        # The next odd number: whoever forwards this version sees that it is lost.
        incoming.slot.memory.begin_change()
        incoming.interrupt()
        self._counters.aborted()
        self._notify()

    def _must_be_current(self, incoming: Incoming) -> None:
        if self._incoming is not incoming:
            raise VersionLost(f"version {incoming.manifest.version} was given up: its source was replaced")

    def _is_intact(self, pin: Pin) -> bool:
        generation = pin.slot.memory.generation
        # Pinned while it came in (odd) and complete since (the next even number): the same contents.
        return generation == pin.generation or (pin.generation % 2 == 1 and generation == pin.generation + 1)

    def _has_passed(self, version: int | None) -> bool:
        complete = self._complete()
        return bool(complete) and (version is None or complete[-1].version >= version)

    def _complete(self) -> list[Slot]:
        return sorted((slot for slot in self._slots if slot.use is Use.COMPLETE), key=lambda slot: slot.version)

    def _notify(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker.set()


def _digest(slot: Slot) -> str:
    assert slot.manifest is not None
    return slot.manifest.digest


def _reluctance(slot: Slot) -> tuple[bool, bool, bool, int]:
    complete = slot.use is Use.COMPLETE
    return complete, slot.forwarders > 0, slot.readers > 0, slot.version if complete else -1
