"""The relay's versions: a fixed number of slots, one of them taking the incoming version, the others readable.

Invariants: a version is readable only when all its chunks are here and verified; the newest complete version and, as
far as retainSlots goes, those that somebody still needs are never overwritten; at most one version comes in at a
time, from one writer; no reader and no forwarder can keep a new version out.

A writer may leave a version half done; the chunks that are here stay, and the next writer of the same version goes on
after them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.relay.counters import Counters
from laminar.relay.slots import SlotMemory, page_rounded
from laminar.relay.uses import Incoming, Pin, Slot, Use, VersionLost
from laminar.shell.memory import available_memory_bytes
from laminar.shell.transport import Waker
from laminar.wire.links import Held
from laminar.wire.manifest import Manifest

WRITER_LEAVES_S = 2.0
"""A replaced writer has its connection shut down; it then only finishes the hash of the chunk at hand."""
LOOK_S = 0.02
HALF_KEPT_S = 30.0
"""A version that nobody goes on with for this long is given up: until then forwarders keep their links busy for it."""
READ_DEADLINE_S = 30.0


class TooLarge(Exception):
    """The version does not fit into this relay's memory. `limit_bytes`: what would."""

    def __init__(self, detail: str, limit_bytes: int) -> None:
        super().__init__(detail)
        self.limit_bytes = limit_bytes


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """What a store may hold, and for how long a reader may hold it up."""

    keep_versions: int
    """Newest complete versions."""
    retain_slots: int = 0
    """Slots more, for older versions that `retain` names."""
    read_deadline_s: float = READ_DEADLINE_S
    """After that a reader does not keep its slot from being taken."""

    @property
    def num_slots(self) -> int:
        """One takes what comes in."""
        return self.keep_versions + 1 + self.retain_slots


class VersionStore:
    """Thread-safe. The slots are made at the first manifest, each of the size that it needs."""

    def __init__(self, sizes: StoreSizes, counters: Counters, on_complete: Callable[[], None]) -> None:
        assert sizes.keep_versions >= 2, sizes
        self._sizes = sizes
        self._counters = counters
        self._on_complete = on_complete
        self._changed = threading.Condition()
        self._slots: list[Slot] = []
        self._half: Slot | None = None
        self._writer: Incoming | None = None
        self._turn = 0
        self._wakers: set[Waker] = set()
        self._downstream_cursor = -1
        self._wanted: tuple[int, ...] = ()
        self._closed = False

    # --- the incoming version ---

    def begin(
        self, manifest: Manifest, interrupt: Callable[[], None], look: Callable[[], None] | None = None
    ) -> Incoming:
        """Starts to take `manifest`'s version, or goes on with it. The writer before, if there is one, is stopped by
        its `interrupt`; what it brought of another version is given up. `look` is called while this waits for it.

        Raises TooLarge; VersionLost if the replaced writer does not leave in time, or this one was replaced already.
        """
        with self._changed:
            self._make_slots(manifest)
            self._turn += 1
            turn = self._turn
            self._stop_writer()
            self._wait_until_written(look)
            if self._turn != turn or self._closed:
                raise VersionLost(f"version {manifest.version} has another source by now")
            half = self._half
            if half is None or not _same(half.manifest, manifest):
                if half is not None:
                    self._give_up(half)
                half = self._empty_slot_for(manifest)
            elif half.num_have:
                self._counters.resumed()
            half.has_writer = True
            self._half, self._writer = half, Incoming(self, half, manifest, interrupt)
            self._notify()
            return self._writer

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
        with self._changed:
            self._must_be_current(incoming)
            assert slot.num_have == incoming.manifest.num_chunks, slot.num_have
            slot.use = Use.COMPLETE
            slot.memory.end_change()
            self._half = self._writer = None
            self._counters.completed(time.monotonic() - slot.began_s)
            self._notify()
        self._on_complete()

    def leave(self, incoming: Incoming) -> None:
        """See Incoming."""
        with self._changed:
            if self._writer is incoming:
                self._writer = None
            incoming.slot.has_writer = False
            incoming.slot.left_s = time.monotonic()
            self._changed.notify_all()

    def stop_writer(self) -> None:
        """The source of what comes in lost the right to send: nothing of it lands any more. What is here stays."""
        with self._changed:
            self._turn += 1
            self._stop_writer()

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

    def retain(self, versions: Sequence[int]) -> None:
        """Versions that somebody still needs, the most needed first; as many as fit are kept."""
        with self._changed:
            self._wanted = tuple(versions)

    def pin_for_reader(
        self, version: int | None, wait_s: float, interrupt: Callable[[], None] | None = None
    ) -> Pin | None:
        """Holds `version` (None: the newest) for a reader. Waits up to `wait_s` for one that has not come yet; None:
        it did not come, or is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_passed(version), wait_s)
            for slot in reversed(self._complete()):
                if version is None or slot.version == version:
                    until_s = time.monotonic() + self._sizes.read_deadline_s
                    pin = Pin(self, slot, forwards=False, until_s=until_s, interrupt=interrupt)
                    slot.readers.add(pin)
                    return pin
            return None

    def pin_for_downstream(self, cursor: int, *, counts: bool = True) -> Pin | None:
        """What a neighbour that holds `cursor` gets next: the newest complete version, else the one coming in.

        `counts`: the chain goes on behind it; a version that it has not got by the time it is dropped is superseded."""
        with self._changed:
            if counts:
                self._downstream_cursor = cursor
            complete = self._complete()
            slot = complete[-1] if complete else None
            if slot is None or slot.version <= cursor:
                slot = self._half
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
            half = self._half
            if half is not None and not half.has_writer and time.monotonic() - half.left_s > HALF_KEPT_S:
                self._give_up(half)
            if self._closed or not self._is_intact(pin):
                raise VersionLost(f"version {pin.manifest.version} left its slot")
            return settled

    def stands(self, pin: Pin) -> bool:
        """See Pin."""
        with self._changed:
            return self._is_intact(pin)

    def release(self, pin: Pin) -> None:
        """See Pin."""
        with self._changed:
            if pin.forwards:
                pin.slot.forwarders -= 1
            else:
                pin.slot.readers.discard(pin)

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
            self._stop_writer()
            if self._half is not None:
                self._give_up(self._half)
            self._notify()

    def free(self) -> None:
        """Gives the memory back; only after every thread that uses it has ended."""
        for slot in self._slots:
            slot.memory.close()
        self._slots = []

    # --- with the lock held ---

    def _make_slots(self, manifest: Manifest) -> None:
        needed_bytes, num_slots = page_rounded(manifest.total_bytes), self._sizes.num_slots
        if not self._slots:
            limit_bytes = available_memory_bytes() // num_slots
            if needed_bytes > limit_bytes:
                raise TooLarge(
                    f"version {manifest.version} has {manifest.total_bytes} bytes; {num_slots} slots of that "
                    f"size do not fit into the memory available here ({limit_bytes * num_slots} bytes)",
                    limit_bytes,
                )
            self._slots = [Slot(SlotMemory(f"laminar-slot-{index}", needed_bytes)) for index in range(num_slots)]
        capacity_bytes = self._slots[0].memory.capacity_bytes
        if manifest.total_bytes > capacity_bytes:
            raise TooLarge(
                f"version {manifest.version} has {manifest.total_bytes} bytes; the slots were sized by the first "
                f"version and take {capacity_bytes}",
                capacity_bytes,
            )

    def _empty_slot_for(self, manifest: Manifest) -> Slot:
        slot = self._spare()
        self._evict(slot)
        slot.use, slot.manifest, slot.num_have, slot.began_s = Use.FILLING, manifest, 0, time.monotonic()
        slot.memory.begin_change()
        return slot

    def _spare(self) -> Slot:
        """An empty slot, else the oldest complete one that nobody uses, that is forwarded, that a reader is at."""
        now_s = time.monotonic()
        protected = self._protected()
        candidates = [slot for slot in self._slots if slot not in protected and not slot.has_writer]
        return min(candidates, key=lambda slot: _reluctance(slot, now_s))

    def _protected(self) -> list[Slot]:
        """The newest complete version, and wanted ones as far as there are slots for them beside the newest."""
        complete = self._complete()
        num_newest = self._sizes.keep_versions
        newest, older = complete[-num_newest:], complete[:-num_newest]
        wanted = [slot for version in self._wanted for slot in older if slot.version == version]
        return [*newest[-1:], *wanted[: self._sizes.retain_slots]]

    def _evict(self, slot: Slot) -> None:
        if slot.use is not Use.COMPLETE:
            return
        if slot.readers:
            self._counters.reused_under_reader()
        for pin in slot.readers:
            if pin.interrupt is not None:
                pin.interrupt()
        if self._wakers and slot.version > self._downstream_cursor:
            self._counters.superseded()

    def _stop_writer(self) -> None:
        if self._writer is not None:
            self._writer.interrupt()
            self._writer = None

    def _wait_until_written(self, look: Callable[[], None] | None) -> None:
        ends_s = time.monotonic() + WRITER_LEAVES_S
        while any(slot.has_writer for slot in self._slots):
            if time.monotonic() > ends_s:
                raise VersionLost("the writer before does not leave its slot")
            self._changed.wait(LOOK_S)
            if look is not None:
                look()

    def _give_up(self, half: Slot) -> None:
        self._half = None
        half.use, half.num_have = Use.EMPTY, 0
        # The next odd number: whoever forwards this version sees that it is lost.
        half.memory.begin_change()
        self._counters.aborted()
        self._notify()

    def _must_be_current(self, incoming: Incoming) -> None:
        if self._writer is not incoming:
            raise VersionLost(f"version {incoming.manifest.version} has another source by now")

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


def _same(half: Manifest | None, manifest: Manifest) -> bool:
    assert half is not None
    return (half.version, half.digest, half.chunk_bytes) == (manifest.version, manifest.digest, manifest.chunk_bytes)


def _reluctance(slot: Slot, now_s: float) -> tuple[bool, bool, bool, int]:
    complete = slot.use is Use.COMPLETE
    return complete, slot.forwarders > 0, slot.is_held(now_s), slot.version if complete else -1
