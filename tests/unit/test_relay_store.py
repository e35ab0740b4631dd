"""Slots and the version store: what is readable when, and which slot takes the next version."""

import fcntl
import mmap
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.relay.counters import Counters
from laminar.relay.slots import SEALS, SlotMemory
from laminar.relay.store import StoreSizes, TooLarge, VersionStore
from laminar.relay.uses import Incoming, VersionLost
from laminar.shell.transport import Waker
from laminar.wire.manifest import Manifest, layout, make_manifest

SIZE = 20_000
CHUNK = 4096


def weights(version: int, size: int = SIZE) -> tuple[Manifest, bytes]:
    buffer = random.Random(version).randbytes(size)
    entries = layout([("w", "U8", (size,))])
    made = make_manifest(
        job_uid="uid", version=version, step=version, attempt=1, tensors=entries, buffer=buffer, chunk_bytes=CHUNK
    )  # fmt: skip
    return made, buffer


def nothing() -> None:
    return None


def put(incoming: Incoming, buffer: bytes, indices: range) -> None:
    for index in indices:
        start, end = incoming.manifest.chunk_range(index)
        incoming.chunk(index)[:] = buffer[start:end]
        incoming.landed(index)


def fill(store: VersionStore, version: int) -> None:
    manifest, buffer = weights(version)
    incoming = store.begin(manifest, nothing)
    put(incoming, buffer, range(manifest.num_chunks))
    incoming.complete()
    incoming.leave()


def versions(store: VersionStore) -> list[int]:
    return [held.version for held in store.held()]


TWO = StoreSizes(2)


def new_store(sizes: StoreSizes = TWO) -> tuple[VersionStore, Counters]:
    counters = Counters()
    return VersionStore(sizes, counters, nothing), counters


def test_a_slot_is_sealed_and_only_its_owner_can_write() -> None:
    slot = SlotMemory("test", 4096)
    assert fcntl.fcntl(slot.fileno(), 1034) == SEALS
    with pytest.raises(PermissionError):
        mmap.mmap(slot.fileno(), 4096)
    reader = mmap.mmap(slot.fileno(), 8192, access=mmap.ACCESS_READ)
    slot.data[:5] = b"hello"
    assert reader[4096:4101] == b"hello"
    reader.close()
    slot.close()


def test_generations_only_grow_and_are_odd_while_contents_change() -> None:
    slot = SlotMemory("test", 10)
    seen = [slot.generation]
    for change in (slot.begin_change, slot.begin_change, slot.end_change, slot.begin_change):
        change()
        seen.append(slot.generation)
    assert seen == [0, 1, 3, 4, 5]
    slot.close()


def test_a_version_is_readable_only_when_it_is_complete() -> None:
    store, _ = new_store()
    manifest, buffer = weights(1)
    incoming = store.begin(manifest, nothing)
    put(incoming, buffer, range(manifest.num_chunks))
    assert store.pin_for_reader(None, 0) is None
    incoming.complete()
    pin = store.pin_for_reader(1, 0)
    assert pin is not None
    assert bytes(pin.slot.memory.data[:SIZE]) == buffer


def test_the_oldest_version_makes_room_and_the_newest_stays() -> None:
    store, _ = new_store()
    for version in range(1, 6):
        fill(store, version)
    assert versions(store) == [3, 4, 5]
    store.begin(weights(6)[0], nothing)
    assert versions(store) == [4, 5]


def test_a_slot_with_a_reader_is_not_reused_while_another_is_free() -> None:
    store, counters = new_store()
    for version in (1, 2, 3):
        fill(store, version)
    pin = store.pin_for_reader(1, 0)
    fill(store, 4)
    assert versions(store) == [1, 3, 4]
    assert pin is not None
    pin.release()
    fill(store, 5)
    assert versions(store) == [3, 4, 5]
    assert counters.view().slots_reused_under_reader == 0


def test_readers_of_every_slot_do_not_keep_a_new_version_out() -> None:
    store, counters = new_store()
    for version in (1, 2, 3):
        fill(store, version)
    pins = [store.pin_for_reader(version, 0) for version in (1, 2, 3)]
    fill(store, 4)
    assert versions(store) == [2, 3, 4]
    assert counters.view().slots_reused_under_reader == 1
    assert pins[0] is not None
    assert pins[0].slot.memory.generation != pins[0].generation


def test_a_version_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    store, _ = new_store()
    fill(store, 1)
    with pytest.raises(TooLarge, match="sized by the first"):
        store.begin(weights(2, size=40_000)[0], nothing)
    fill(store, 3)
    assert versions(store) == [1, 3]


def test_a_replaced_writer_is_interrupted_and_can_complete_nothing() -> None:
    store, counters = new_store()
    manifest, buffer = weights(1)
    interrupted = threading.Event()
    old = store.begin(manifest, interrupted.set)
    put(old, buffer, range(2))
    writer = threading.Thread(target=lambda: interrupted.wait(5) and old.leave())
    writer.start()
    new = store.begin(weights(2)[0], nothing)
    writer.join()
    with pytest.raises(VersionLost):
        old.landed(2)
    put(new, weights(2)[1], range(new.manifest.num_chunks))
    new.complete()
    assert versions(store) == [2]
    assert counters.view().aborted_versions == 1


def test_a_forwarder_follows_a_version_that_comes_in_and_notices_its_loss() -> None:
    store, _ = new_store()
    manifest, buffer = weights(1)
    incoming = store.begin(manifest, nothing)
    pin = store.pin_for_downstream(-1)
    assert pin is not None
    assert not pin.wait_chunk(0, 0)
    put(incoming, buffer, range(1))
    assert pin.wait_chunk(0, 0)
    incoming.leave()
    assert pin.wait_chunk(0, 0)
    store.begin(weights(2)[0], nothing)
    with pytest.raises(VersionLost):
        pin.wait_chunk(0, 0)


def test_the_next_writer_of_a_half_version_goes_on_after_what_is_there() -> None:
    store, counters = new_store()
    manifest, buffer = weights(1)
    first = store.begin(manifest, nothing)
    put(first, buffer, range(2))
    first.leave()
    second = store.begin(manifest, nothing)
    assert second.have == 2
    put(second, buffer, range(2, manifest.num_chunks))
    second.complete()
    assert versions(store) == [1]
    assert_all_whole(store)
    assert (counters.view().resumed_versions, counters.view().aborted_versions) == (1, 0)


def test_half_of_another_content_is_not_gone_on_with() -> None:
    store, _ = new_store()
    first = store.begin(weights(1)[0], nothing)
    put(first, weights(1)[1], range(2))
    first.leave()
    other = random.Random(99).randbytes(SIZE)
    entries = layout([("w", "U8", (SIZE,))])
    manifest = make_manifest(
        job_uid="uid", version=1, step=1, attempt=1, tensors=entries, buffer=other, chunk_bytes=CHUNK
    )  # fmt: skip
    assert store.begin(manifest, nothing).have == 0


def test_a_writer_that_lost_its_right_lands_nothing_and_leaves_what_it_brought() -> None:
    store, _ = new_store()
    manifest, buffer = weights(1)
    interrupted = threading.Event()
    old = store.begin(manifest, interrupted.set)
    put(old, buffer, range(2))
    store.stop_writer()
    assert interrupted.is_set()
    with pytest.raises(VersionLost):
        old.landed(2)
    old.leave()
    assert store.begin(manifest, nothing).have == 2


def test_a_wanted_version_stays_beyond_the_newest_ones_as_far_as_there_are_slots() -> None:
    store, _ = new_store(StoreSizes(2, retain_slots=1))
    for version in (1, 2):
        fill(store, version)
    store.retain([1, 2])
    for version in range(3, 9):
        fill(store, version)
        assert 1 in versions(store)
        assert_all_whole(store)
    assert versions(store) == [1, 6, 7, 8]
    store.retain([])
    fill(store, 9)
    assert versions(store) == [6, 7, 8, 9]


def test_a_reader_past_its_deadline_does_not_keep_its_slot() -> None:
    store, counters = new_store(StoreSizes(2, read_deadline_s=1e-9))
    for version in (1, 2, 3):
        fill(store, version)
    told = threading.Event()
    pin = store.pin_for_reader(1, 0, told.set)
    assert pin is not None
    assert pin.stands()
    fill(store, 4)
    assert versions(store) == [2, 3, 4]
    assert told.is_set()
    assert not pin.stands()
    assert counters.view().slots_reused_under_reader == 1


def test_a_forwarder_keeps_its_pin_over_completion() -> None:
    store, _ = new_store()
    manifest, buffer = weights(1)
    incoming = store.begin(manifest, nothing)
    pin = store.pin_for_downstream(-1)
    put(incoming, buffer, range(manifest.num_chunks))
    incoming.complete()
    assert pin is not None
    assert pin.wait_chunk(manifest.num_chunks - 1, 0)


def test_a_neighbour_gets_the_newest_complete_version_first_then_what_comes_in() -> None:
    store, _ = new_store()
    for version in (1, 2):
        fill(store, version)
    store.begin(weights(3)[0], nothing)
    order = []
    cursor = -1
    while (pin := store.pin_for_downstream(cursor)) is not None:
        cursor = pin.manifest.version
        order.append(cursor)
        pin.release()
    assert order == [2, 3]


def test_a_version_that_never_went_down_the_chain_is_counted_as_superseded() -> None:
    store, counters = new_store()
    waker = Waker()
    store.subscribe(waker)
    for version in range(1, 6):
        fill(store, version)
    assert counters.view().superseded_versions == 2
    waker.close()


def test_a_waiting_reader_gets_the_version_when_it_completes() -> None:
    store, _ = new_store()
    got: list[int] = []

    def read() -> None:
        pin = store.pin_for_reader(2, 10.0)
        assert pin is not None
        got.append(pin.manifest.version)

    fill(store, 1)
    reader = threading.Thread(target=read)
    reader.start()
    fill(store, 2)
    reader.join(10)
    assert got == [2]


def assert_all_whole(store: VersionStore) -> None:
    for held in versions(store):
        pin = store.pin_for_reader(held, 0)
        assert pin is not None
        assert pin.manifest.version == held
        assert bytes(pin.slot.memory.data[:SIZE]) == weights(held)[1]
        pin.release()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["complete", "abort", "read", "release", "forward", "unforward"]), max_size=40))
def test_whatever_happens_complete_versions_are_whole_and_the_newest_stays(steps: list[str]) -> None:
    store, _ = new_store()
    version = 0
    readers, forwarders = [], []
    for step in steps:
        newest = store.newest()
        match step:
            case "complete":
                version += 1
                fill(store, version)
                newest = version
            case "abort":
                version += 1
                manifest, buffer = weights(version)
                incoming = store.begin(manifest, nothing)
                put(incoming, buffer, range(2))
                incoming.leave()
            case "read":
                readers.append(store.pin_for_reader(None, 0))
            case "forward":
                forwarders.append(store.pin_for_downstream(-1))
            case _:
                pins = readers if step == "release" else forwarders
                if pins and (pin := pins.pop(0)) is not None:
                    pin.release()
        assert store.newest() == newest
        assert_all_whole(store)
    for pin in [*readers, *forwarders]:
        if pin is not None and pin.generation % 2 == 0 and pin.stands():
            assert bytes(pin.slot.memory.data[:SIZE]) == weights(pin.manifest.version)[1]
    store.close()
    store.free()
