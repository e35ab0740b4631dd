"""Data planes of one process on loopback: hand-over, chain, hand-off, membership."""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laminar.relay.plane import DataPlane, LowerEpoch
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.feeding import Feed
from laminar.shell.fetching import Sources, fetch_version
from laminar.shell.handoff import SlotReused, VersionGone, WeightsMap, open_version
from laminar.shell.handover import PURPOSE, HandedOver, HandOverRefused, best_chunk_bytes, hand_over
from laminar.shell.pulling import PulledWeights, pull_version
from laminar.shell.transport import (
    PeerLost,
    SocketConn,
    connect,
    listen_tcp,
    listen_unix,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.links import SMALL_MESSAGE_BYTES, HandOff, Hello, LinkKind, OfferVerdict, Welcome
from laminar.wire.manifest import Manifest, layout, make_manifest
from laminar.wire.messages import ChainEpoch, ChainMember

TOKEN, UID = "a token", "uid-1"
SIZE = 1 << 20
CHUNK = 128 << 10
TWO_VERSIONS = StoreSizes(2)


def weights(version: int, attempt: int = 1, size: int = SIZE, salt: int = 0) -> tuple[Manifest, bytes]:
    buffer = random.Random(version + 1000 * salt).randbytes(size)
    entries = layout([("w", "U8", (size,))])
    made = make_manifest(
        job_uid=UID, version=version, step=version, attempt=attempt, tensors=entries, buffer=buffer, chunk_bytes=CHUNK
    )  # fmt: skip
    return made, buffer


def until(condition: Callable[[], bool], wait_s: float = 10.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


class Relay:
    def __init__(self, index: int, folder: Path, sizes: StoreSizes) -> None:
        self.slot = f"relay-{index}"
        self.handoff = str(folder / f"{index}.sock")
        listener = listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.address = listener.address
        self.plane = DataPlane(
            self.slot, Credentials(TOKEN, UID), sizes, listener, listen_unix(self.handoff), lambda: None
        )  # fmt: skip
        self.plane.start()

    def held(self) -> list[int]:
        return [held.version for held in self.plane.view().held]

    def open(self, version: int | None = None, deadline_s: float = 10.0) -> WeightsMap:
        return open_version(self.handoff, TOKEN, UID, version, deadline_s)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.relays: list[Relay] = []
        self.epoch = 0

    def add(self, sizes: StoreSizes = TWO_VERSIONS) -> Relay:
        relay = Relay(len(self.relays), self.folder, sizes)
        self.relays.append(relay)
        return relay

    def chain(self, *relays: Relay, skip: tuple[Relay, ...] = ()) -> ChainEpoch:
        self.epoch += 1
        epoch = ChainEpoch(
            epoch=self.epoch, members=[ChainMember(slot=relay.slot, address=relay.address) for relay in relays]
        )
        for relay in relays:
            if relay not in skip:
                relay.plane.apply_epoch(epoch)
        return epoch

    def publish(self, relay: Relay, version: int, attempt: int = 1, **kind: int) -> HandedOver:
        manifest, buffer = weights(version, attempt, **kind)
        return hand_over(relay.address, TOKEN, UID, attempt, manifest, buffer, 5.0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for relay in made.relays:
        assert relay.plane.failure is None
        relay.plane.close()


def half_handed_over(relay: Relay, version: int) -> tuple[SocketConn, Feed]:
    """A trainer that stops after two chunks, its connection still open."""
    manifest, _ = weights(version)
    conn = connect(relay.address, 5)
    prove_as_client(conn, TOKEN, UID, PURPOSE)
    send_message(conn, Hello(kind=LinkKind.HANDOVER, slot="trainer", attempt=1))
    recv_message(conn, Welcome, SMALL_MESSAGE_BYTES)
    feed = Feed(conn)
    assert feed.announce(manifest).verdict is OfferVerdict.SEND
    send_chunks(feed, version, range(2))
    return conn, feed


def send_chunks(feed: Feed, version: int, indices: range) -> None:
    manifest, buffer = weights(version)
    for index in indices:
        start, end = manifest.chunk_range(index)
        feed.send_chunk(index, memoryview(buffer)[start:end])


def test_a_published_version_is_byte_equal_on_every_relay(scene: Scene) -> None:
    relays = [scene.add() for _ in range(4)]
    scene.chain(*relays)
    assert scene.publish(relays[0], 1) is HandedOver.SENT
    for relay in relays:
        with relay.open(1) as weights_map:
            assert bytes(weights_map.tensor("w")) == weights(1)[1]
            weights_map.verify()


def test_the_hand_over_does_not_wait_for_the_chain(scene: Scene) -> None:
    master = scene.add()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        members = [("relay-0", master.address), ("relay-9", f"127.0.0.1:{deaf.getsockname()[1]}")]
        master.plane.apply_epoch(
            ChainEpoch(epoch=1, members=[ChainMember(slot=slot, address=address) for slot, address in members])
        )
        assert scene.publish(master, 1) is HandedOver.SENT
        assert scene.publish(master, 2) is HandedOver.SENT


def test_a_repeated_hand_over_sends_nothing_again(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    assert scene.publish(master, 1) is HandedOver.HELD
    assert master.plane.view().counters.received_bytes == SIZE


def test_an_older_version_than_the_newest_is_not_needed(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 5)
    assert scene.publish(master, 4) is HandedOver.SUPERSEDED


@pytest.mark.parametrize("master_first", [True, False])
def test_a_hand_over_to_one_that_is_not_master_is_refused(scene: Scene, master_first: bool) -> None:
    first, second = scene.add(), scene.add()
    if master_first:
        scene.chain(first, second)
    with pytest.raises(HandOverRefused) as caught:
        scene.publish(second, 1)
    assert caught.value.verdict is OfferVerdict.NOT_MASTER
    assert not caught.value.is_final


def test_a_lower_attempt_is_refused_also_by_a_relay_that_knows_it_from_the_chain_only(scene: Scene) -> None:
    first, second = scene.add(), scene.add()
    scene.chain(first, second)
    scene.publish(first, 1, attempt=3)
    until(lambda: second.held() == [1])
    scene.chain(second)
    for relay in (first, second):
        with pytest.raises(HandOverRefused) as caught:
            scene.publish(relay, 2, attempt=2)
        assert (caught.value.verdict, caught.value.current) == (OfferVerdict.LOWER_ATTEMPT, 3)
        assert caught.value.is_final


def test_another_content_under_a_known_version_is_refused(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    with pytest.raises(HandOverRefused) as caught:
        scene.publish(master, 1, salt=1)
    assert caught.value.verdict is OfferVerdict.CONFLICT


def test_a_version_that_outgrows_the_slots_is_refused_loudly(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    with pytest.raises(HandOverRefused, match="slots were sized") as caught:
        scene.publish(master, 2, size=2 * SIZE)
    assert caught.value.verdict is OfferVerdict.TOO_LARGE
    assert master.plane.view().counters.declined == {"tooLarge": 1}


def test_damaged_bytes_never_become_readable(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    manifest, buffer = weights(1)
    damaged = bytearray(buffer)
    damaged[SIZE // 2] ^= 1
    with pytest.raises(PeerLost):
        hand_over(master.address, TOKEN, UID, 1, manifest, damaged, 5.0)
    assert master.held() == []
    until(lambda: master.plane.view().counters.refused == {"damaged": 1})


def test_a_lower_epoch_is_refused_and_the_same_one_may_be_repeated(scene: Scene) -> None:
    relay = scene.add()
    old = scene.chain(relay)
    new = scene.chain(relay)
    relay.plane.apply_epoch(new)
    with pytest.raises(LowerEpoch) as caught:
        relay.plane.apply_epoch(old)
    assert caught.value.current == 2
    with pytest.raises(LowerEpoch, match="another list"):
        relay.plane.apply_epoch(ChainEpoch(epoch=2, members=[]))


def test_an_empty_relay_that_joins_gets_the_newest_version(scene: Scene) -> None:
    first, second = scene.add(), scene.add()
    scene.chain(first, second)
    for version in (1, 2, 3):
        scene.publish(first, version)
    until(lambda: 3 in second.held())
    late = scene.add()
    scene.chain(first, second, late)
    until(lambda: late.held() == [3])


def test_a_relay_that_missed_versions_gets_the_newest_when_it_comes_back(scene: Scene) -> None:
    first, second = scene.add(), scene.add()
    scene.chain(first, second)
    scene.publish(first, 1)
    until(lambda: second.held() == [1])
    scene.chain(first)
    second.plane.apply_epoch(ChainEpoch(epoch=scene.epoch, members=[]))
    for version in (2, 3):
        scene.publish(first, version)
    scene.chain(first, second)
    until(lambda: second.held() == [1, 3])


def test_an_upstream_of_a_later_epoch_feeds_a_relay_that_has_not_heard_of_it(scene: Scene) -> None:
    first, second = scene.add(), scene.add()
    scene.chain(first, second, skip=(second,))
    scene.publish(first, 1)
    until(lambda: second.held() == [1])
    with pytest.raises(LowerEpoch):
        second.plane.apply_epoch(ChainEpoch(epoch=0, members=[]))


def test_a_broadcast_under_way_survives_a_join_at_the_tail(scene: Scene) -> None:
    first, second, third = scene.add(), scene.add(), scene.add()
    scene.chain(first, second)
    conn, feed = half_handed_over(first, 1)
    until(lambda: second.plane.view().counters.received_bytes == 2 * CHUNK)
    scene.chain(first, second, third)
    send_chunks(feed, 1, range(2, SIZE // CHUNK))
    until(lambda: all(relay.held() == [1] for relay in scene.relays))
    conn.close()
    assert second.plane.view().counters.received_bytes == SIZE


def test_chunks_are_forwarded_before_the_version_is_whole(scene: Scene) -> None:
    relays = [scene.add() for _ in range(3)]
    scene.chain(*relays)
    conn, _ = half_handed_over(relays[0], 1)
    until(lambda: relays[2].plane.view().counters.received_bytes == 2 * CHUNK)
    assert relays[0].held() == []
    conn.close()


def test_a_trainer_that_dies_half_way_leaves_nothing_readable_and_the_next_attempt_publishes(scene: Scene) -> None:
    relays = [scene.add() for _ in range(3)]
    scene.chain(*relays)
    conn, _ = half_handed_over(relays[0], 1)
    until(lambda: relays[2].plane.view().counters.received_bytes == 2 * CHUNK)
    conn.close()
    scene.publish(relays[0], 2, attempt=2)
    until(lambda: all(relay.held() == [2] for relay in relays))
    assert all(relay.plane.view().counters.aborted_versions == 1 for relay in relays)


def test_a_trainer_whose_connection_broke_goes_on_after_the_chunks_that_are_there(scene: Scene) -> None:
    relays = [scene.add() for _ in range(3)]
    scene.chain(*relays)
    conn, _ = half_handed_over(relays[0], 1)
    until(lambda: relays[2].plane.view().counters.received_bytes == 2 * CHUNK)
    conn.close()
    assert scene.publish(relays[0], 1) is HandedOver.SENT
    until(lambda: all(relay.held() == [1] for relay in relays))
    counters = [relay.plane.view().counters for relay in relays]
    assert [counter.received_bytes for counter in counters] == [SIZE] * 3
    assert counters[0].resumed_versions == 1


def test_a_half_version_goes_on_from_another_upstream_after_a_new_list(scene: Scene) -> None:
    first, second, third = (scene.add() for _ in range(3))
    scene.chain(first, second, third)
    conn, feed = half_handed_over(first, 1)
    until(lambda: third.plane.view().counters.received_bytes == 2 * CHUNK)
    scene.chain(first, third)
    send_chunks(feed, 1, range(2, SIZE // CHUNK))
    until(lambda: third.held() == [1])
    assert third.plane.view().counters.received_bytes == SIZE
    conn.close()


def test_a_stuck_trainer_is_replaced_by_the_next_attempt(scene: Scene) -> None:
    first, second = scene.add(), scene.add()
    scene.chain(first, second)
    conn, _ = half_handed_over(first, 1)
    scene.publish(first, 2, attempt=2)
    until(lambda: second.held() == [2])
    with pytest.raises(PeerLost):
        conn.recv_into(memoryview(bytearray(1)), 5)
    conn.close()


def test_a_master_that_is_deposed_drops_what_a_trainer_still_sends(scene: Scene) -> None:
    first, second = scene.add(), scene.add()
    scene.chain(first, second)
    conn, _ = half_handed_over(first, 1)
    scene.chain(second, first)
    with pytest.raises(PeerLost):
        conn.recv_into(memoryview(bytearray(1 << 16)), 5)
    assert scene.publish(second, 1) is HandedOver.SENT
    until(lambda: first.held() == [1])
    conn.close()


def test_a_dead_neighbour_is_reported_until_the_next_epoch(scene: Scene) -> None:
    first, second, third = scene.add(), scene.add(), scene.add()
    scene.chain(first, second, third)
    scene.publish(first, 1)
    until(lambda: third.held() == [1])
    second.plane.close()
    scene.relays.remove(second)
    until(lambda: first.plane.view().lost_neighbours == ("relay-1",))
    until(lambda: third.plane.view().lost_neighbours == ("relay-1",))
    scene.chain(first, third)
    assert first.plane.view().lost_neighbours == ()
    scene.publish(first, 2)
    until(lambda: third.held() == [1, 2])
    assert third.plane.view().lost_neighbours == ()


def test_a_neighbour_whose_last_word_was_lost_is_passed_by_and_fed_all_the_same(scene: Scene) -> None:
    first, second, third = scene.add(), scene.add(), scene.add()
    scene.chain(first, second, third)
    scene.publish(first, 1)
    until(lambda: third.held() == [1])
    held = second.plane._membership._upstream
    assert held is not None
    held[1].interrupt()
    until(lambda: first.plane.view().downstream == "relay-2")
    scene.publish(first, 2)
    until(lambda: all(relay.held() == [1, 2] for relay in scene.relays))
    assert first.plane.view().lost_neighbours == ("relay-1",)
    scene.chain(first, third, second)
    scene.publish(first, 3)
    until(lambda: all(relay.held() == [1, 2, 3] for relay in scene.relays))
    assert third.plane.view().counters.forwarded_bytes == SIZE


def test_publications_back_to_back_end_with_the_newest_everywhere(scene: Scene) -> None:
    relays = [scene.add() for _ in range(3)]
    scene.chain(*relays)
    for version in range(1, 21):
        scene.publish(relays[0], version)
    until(lambda: all(relay.held()[-1:] == [20] for relay in relays))


def test_a_reader_sees_its_version_or_learns_that_it_is_gone(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    with master.open() as held:
        for version in range(2, 5):
            scene.publish(master, version)
        held.check()
        assert bytes(held.tensor("w")) == weights(1)[1]
        other, third = master.open(4), master.open(3)
        scene.publish(master, 5)
        with pytest.raises(SlotReused):
            held.verify()
        other.close()
        third.close()
    assert master.plane.view().counters.slots_reused_under_reader == 1


def test_readers_beside_a_publisher_read_whole_versions_only(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    stop = threading.Event()
    reads: list[int] = []

    def read() -> None:
        while not stop.is_set():
            with master.open() as held:
                copied = bytes(held.tensor("w"))
                try:
                    held.check()
                except SlotReused:
                    continue
                assert copied == weights(held.manifest.version)[1]
                reads.append(held.manifest.version)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(2, 30):
        scene.publish(master, version)
    until(lambda: len(reads) > 3)
    stop.set()
    reader.join()
    assert reads == sorted(reads)


def test_a_version_that_is_gone_or_has_not_come_says_what_is_newest(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    with pytest.raises(VersionGone) as caught:
        master.open(None, 0.05)
    assert caught.value.newest is None
    for version in range(1, 6):
        scene.publish(master, version)
    for wished in (1, 9):
        with pytest.raises(VersionGone) as caught:
            master.open(wished, 0.05)
        assert caught.value.newest == 5


def test_a_reader_waits_for_a_version_that_is_on_its_way(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    opened: list[int] = []

    def read() -> None:
        with master.open(1) as held:
            opened.append(held.manifest.version)

    reader = threading.Thread(target=read)
    reader.start()
    scene.publish(master, 1)
    reader.join(10)
    assert opened == [1]


def test_a_reader_notices_the_end_of_its_relay(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    held = master.open()
    master.plane.close()
    scene.relays.remove(master)
    with pytest.raises(SlotReused, match="gone"):
        held.check()
    held.close()
    with pytest.raises(PeerLost):
        master.open()


def test_a_reader_without_the_token_gets_nothing(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    with pytest.raises(PeerLost, match="unauthorized"):
        open_version(master.handoff, "other", UID, None)


def pull(relay: Relay, version: int | None, deadline_s: float = 5.0) -> PulledWeights:
    return pull_version(relay.address, TOKEN, UID, version, deadline_s)


def test_a_version_can_be_copied_over_tcp_and_outlives_its_relay(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    with pull(master, 1) as pulled:
        master.plane.close()
        scene.relays.remove(master)
        pulled.check()
        pulled.verify()
        assert bytes(pulled.tensor("w")) == weights(1)[1]


def test_a_copy_of_a_version_that_is_not_there_says_what_is_newest(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    with pytest.raises(VersionGone) as caught:
        pull(master, 7, 0.05)
    assert caught.value.newest == 1


def test_a_copy_needs_the_token(scene: Scene) -> None:
    master = scene.add()
    scene.chain(master)
    with pytest.raises(PeerLost, match="unauthorized"):
        pull_version(master.address, "other", UID, None)


@pytest.mark.parametrize("handoff", list(HandOff))
def test_an_engine_maps_or_copies_as_the_job_says(scene: Scene, handoff: HandOff) -> None:
    master = scene.add()
    scene.chain(master)
    scene.publish(master, 1)
    sources = Sources(handoff, master.handoff, (master.address,))
    with fetch_version(sources, TOKEN, UID, 1) as fetched:
        assert isinstance(fetched, PulledWeights) == (handoff is HandOff.TCP)
        assert bytes(fetched.tensor("w")) == weights(1)[1]


def test_an_engine_whose_relay_is_dead_copies_from_a_neighbour_unless_it_must_map(scene: Scene) -> None:
    own, neighbour = scene.add(), scene.add()
    scene.chain(own, neighbour)
    scene.publish(own, 1)
    until(lambda: neighbour.held() == [1])
    own.plane.close()
    scene.relays.remove(own)
    addresses = (own.address, neighbour.address)
    for handoff in (HandOff.AUTO, HandOff.TCP):
        with fetch_version(Sources(handoff, own.handoff, addresses), TOKEN, UID, 1) as fetched:
            assert isinstance(fetched, PulledWeights)
            assert bytes(fetched.tensor("w")) == weights(1)[1]
    with pytest.raises(PeerLost):
        fetch_version(Sources(HandOff.MEMFD, own.handoff, addresses), TOKEN, UID, 1)


def test_a_reader_that_never_ends_holds_its_slot_only_so_long(scene: Scene) -> None:
    master = scene.add(StoreSizes(2, read_deadline_s=0.05))
    scene.chain(master)
    for version in (1, 2, 3):
        scene.publish(master, version)
    slow = master.open(1)
    until(lambda: master.plane.view().counters.reader_deadlines == 1)
    slow.verify()
    scene.publish(master, 4)
    assert master.held() == [2, 3, 4]
    with pytest.raises(SlotReused):
        slow.check()
    slow.close()


def test_versions_that_are_still_needed_stay_readable(scene: Scene) -> None:
    master = scene.add(StoreSizes(2, retain_slots=1))
    scene.chain(master)
    scene.publish(master, 1)
    master.plane.retain([1])
    for version in range(2, 7):
        scene.publish(master, version)
    with master.open(1) as held:
        held.verify()


def test_the_master_knows_its_links_after_a_broadcast_and_advises_a_cut(scene: Scene) -> None:
    relays = [scene.add() for _ in range(3)]
    scene.chain(*relays)
    assert best_chunk_bytes(relays[0].address, TOKEN, UID, 1, 64 << 20) == 0
    scene.publish(relays[0], 1)
    until(lambda: best_chunk_bytes(relays[0].address, TOKEN, UID, 1, 64 << 20) > 0)
    assert 1 << 20 <= best_chunk_bytes(relays[0].address, TOKEN, UID, 1, 64 << 20) <= 64 << 20


def test_a_relay_knows_the_attempt_from_the_list_alone(scene: Scene) -> None:
    master = scene.add()
    members = [ChainMember(slot=master.slot, address=master.address)]
    master.plane.apply_epoch(ChainEpoch(epoch=1, members=members, attempt=3))
    with pytest.raises(HandOverRefused) as caught:
        scene.publish(master, 1, attempt=2)
    assert (caught.value.verdict, caught.value.current) == (OfferVerdict.LOWER_ATTEMPT, 3)
    master.plane.apply_epoch(ChainEpoch(epoch=1, members=members, attempt=4))
    with pytest.raises(HandOverRefused):
        scene.publish(master, 1, attempt=3)


def test_a_closed_plane_leaves_no_thread_no_descriptor_and_no_memory(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(2):
        scene = Scene(tmp_path)
        relays = [scene.add() for _ in range(3)]
        scene.chain(*relays)
        scene.publish(relays[0], 1)
        until(lambda relays=relays: relays[2].held() == [1])
        reader = relays[1].open()
        scene.chain(*relays[:2])
        for relay in relays:
            relay.plane.close()
        reader.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert "laminar-slot" not in Path("/proc/self/maps").read_text()
