"""Every metric of a relay: it exists, docs/metrics.md names it, and what it counts has been seen to count."""

import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laminar.relay.metrics import PlaneCollector
from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.feeding import Feed
from laminar.shell.handoff import open_version
from laminar.shell.handover import PURPOSE, HandedOver, hand_over
from laminar.shell.pulling import pull_version
from laminar.shell.transport import connect, listen_tcp, listen_unix, prove_as_client, recv_message, send_message
from laminar.wire.links import SMALL_MESSAGE_BYTES, Hello, LinkKind, Welcome
from laminar.wire.manifest import Manifest, layout, make_manifest
from laminar.wire.messages import ChainEpoch, ChainMember

TOKEN, UID = "a token", "uid-1"
SIZE, CHUNK = 1 << 20, 128 << 10
DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def weights(version: int) -> tuple[Manifest, bytes]:
    buffer = random.Random(version).randbytes(SIZE)
    made = make_manifest(
        job_uid=UID, version=version, step=version, attempt=1, tensors=layout([("w", "U8", (SIZE,))]), buffer=buffer,
        chunk_bytes=CHUNK,
    )  # fmt: skip
    return made, buffer


def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not come true in time"
        time.sleep(0.002)


class Relay:
    def __init__(self, index: int, folder: Path) -> None:
        self.slot, self.handoff = f"relay-{index}", str(folder / f"{index}.sock")
        listener = listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.address = listener.address
        self.plane = DataPlane(
            self.slot, Credentials(TOKEN, UID), StoreSizes(2, read_deadline_s=0.05), listener,
            listen_unix(self.handoff), lambda: None,
        )  # fmt: skip
        self.plane.start()
        self._collector = PlaneCollector(self.plane.view)

    def metrics(self) -> dict[str, float]:
        """By name without the prefix; those with a label as name{label value}."""
        found: dict[str, float] = {}
        for metric in self._collector.collect():
            for sample in metric.samples:
                label = "".join(f"{{{value}}}" for value in sample.labels.values())
                name = sample.name.removesuffix("_total").removeprefix("laminar_relay_")
                found[name + label] = sample.value
        return found

    def publish(self, version: int, attempt: int = 1) -> HandedOver:
        return hand_over(self.address, TOKEN, UID, attempt, *weights(version))

    def begin(self, version: int) -> tuple[Feed, Callable[[], None]]:
        """A trainer that has sent two chunks, and what sends the rest."""
        manifest, buffer = weights(version)
        conn = connect(self.address, 5)
        prove_as_client(conn, TOKEN, UID, PURPOSE)
        send_message(conn, Hello(kind=LinkKind.HANDOVER, slot="trainer", attempt=1))
        recv_message(conn, Welcome, SMALL_MESSAGE_BYTES)
        feed = Feed(conn)
        feed.announce(manifest)

        def send(indices: range) -> None:
            for index in indices:
                start, end = manifest.chunk_range(index)
                feed.send_chunk(index, memoryview(buffer)[start:end])

        send(range(2))
        return feed, lambda: send(range(2, manifest.num_chunks))


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[list[Relay]]:
    made = [Relay(index, tmp_path) for index in range(3)]
    chain(1, *made)
    yield made
    for relay in made:
        relay.plane.close()


def chain(epoch: int, *relays: Relay) -> None:
    members = [ChainMember(slot=relay.slot, address=relay.address) for relay in relays]
    for relay in relays:
        relay.plane.apply_epoch(ChainEpoch(epoch=epoch, members=members))


def test_the_docs_name_every_metric_of_a_relay_and_no_other(relays: list[Relay]) -> None:
    table = DOCS.read_text().split("| relay | |")[1].split("\n\n")[0]
    documented = set(re.findall(r"`laminar_relay_(\w+)`", table))
    families = {metric.name.removeprefix("laminar_relay_") for metric in relays[0]._collector.collect()}
    assert documented == families


def test_a_broadcast_shows_its_lag_bytes_throughput_and_the_chain(relays: list[Relay]) -> None:
    before = [relay.metrics() for relay in relays]
    assert [each["newest_version"] for each in before] == [-1, -1, -1]
    relays[0].publish(7)
    until(lambda: all(relay.metrics()["newest_version"] == 7 for relay in relays))
    until(lambda: all(relay.metrics()["forward_bytes_per_second"] > 0 for relay in relays[:2]))
    seen = [relay.metrics() for relay in relays]
    assert [each["position"] for each in seen] == [0, 1, 2]
    assert all((each["epoch"], each["chain_depth"], each["versions_held"]) == (1, 3, 1) for each in seen)
    assert [each["received_bytes"] for each in seen] == [SIZE] * 3
    assert [each["forwarded_bytes"] for each in seen] == [SIZE, SIZE, 0]
    assert all(each["versions_completed"] == 1 for each in seen)
    assert all(0 < each["publication_lag_seconds"] < 10 for each in seen)
    assert all(each["link_byte_seconds"] > 0 and each["link_message_seconds"] > 0 for each in seen[:2])
    assert seen[2]["forward_bytes_per_second"] == 0


def test_the_lag_is_that_of_each_relay(relays: list[Relay]) -> None:
    feed, send_rest = relays[0].begin(1)
    until(lambda: relays[2].metrics()["received_bytes"] > 0)
    time.sleep(0.1)
    feed.linger()
    send_rest()
    until(lambda: all(relay.metrics()["newest_version"] == 1 for relay in relays))
    assert all(0.1 <= relay.metrics()["publication_lag_seconds"] < 10 for relay in relays)
    feed.conn.close()


def test_a_lost_neighbour_shows_as_a_bypass_and_a_resumed_version(relays: list[Relay]) -> None:
    master, middle, tail = relays
    feed, send_rest = master.begin(1)
    until(lambda: tail.metrics()["received_bytes"] == 2 * CHUNK)
    middle.plane.close()
    relays.remove(middle)
    send_rest()
    until(lambda: tail.metrics()["newest_version"] == 1)
    assert (master.metrics()["bypasses"], tail.metrics()["versions_resumed"]) == (1, 1)
    feed.conn.close()


def test_what_never_went_on_is_counted_as_superseded_declined_or_aborted(relays: list[Relay]) -> None:
    master, gone = relays[0], relays[1]
    gone.plane.close()
    relays.remove(gone)
    members = [ChainMember(slot=each.slot, address=each.address) for each in (master, gone)]
    master.plane.apply_epoch(ChainEpoch(epoch=2, members=members))
    for version in range(1, 6):
        master.publish(version)
    assert master.metrics()["versions_superseded"] == 2
    assert master.publish(5) is HandedOver.HELD
    assert master.publish(2) is HandedOver.SUPERSEDED
    seen = master.metrics()
    assert (seen["versions_declined{held}"], seen["versions_declined{superseded}"]) == (1, 1)
    feed, _ = master.begin(6)
    master.publish(7)
    assert master.metrics()["versions_aborted"] == 1
    feed.conn.close()


def test_slow_readers_copies_and_strangers_are_counted(relays: list[Relay]) -> None:
    master = relays[0]
    for version in (1, 2, 3):
        master.publish(version)
    with open_version(master.handoff, TOKEN, UID, 1):
        until(lambda: master.metrics()["readers_overdue"] == 1)
        master.publish(4)
        assert master.metrics()["slots_reused_under_reader"] == 1
    pull_version(master.address, TOKEN, UID, 4).close()
    assert master.metrics()["pulled_bytes"] == SIZE
    host, port = master.address.split(":")
    socket.create_connection((host, int(port))).close()
    until(lambda: master.metrics().get("connections_refused{unauthorized}") == 1)
