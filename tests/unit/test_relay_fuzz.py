"""Every message of every data connection, spoilt: the connection is closed and counted, and nothing else happens.

On the chain's TCP listener, on the hand-off's unix socket, and as what a neighbour further down the chain answers.
"""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell import handoff
from laminar.shell.handoff import SlotReused, VersionGone
from laminar.shell.handover import PURPOSE, hand_over
from laminar.shell.pulling import pull_version
from laminar.shell.transport import (
    BadPeer,
    PeerLost,
    Refusal,
    SocketConn,
    Waker,
    connect,
    connect_unix,
    listen_tcp,
    listen_unix,
    prove_as_client,
    prove_as_listener,
    recv_message,
    send_message,
)
from laminar.wire.codec import encode, frame
from laminar.wire.links import (
    CHUNK_HEADER,
    FRAME_PING,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Beat,
    Held,
    Hello,
    LinkKind,
    LinkVerdict,
    OfferVerdict,
    Opened,
    OpenVersion,
    Replaced,
    Stored,
    Welcome,
)
from laminar.wire.manifest import Manifest, digest_of, layout, make_manifest
from laminar.wire.messages import ChainEpoch, ChainMember

TOKEN, UID = "a token", "uid-1"
SIZE = 20_000
MAX_GROWTH_BYTES = 24 << 20
"""One manifest message alone may have 64 MiB: whatever is kept of a thousand connections shows."""


def weights(version: int) -> tuple[Manifest, bytes]:
    buffer = random.Random(version).randbytes(SIZE)
    tensors = layout([("w", "U8", (SIZE,))])
    made = make_manifest(
        job_uid=UID, version=version, step=version, attempt=1, tensors=tensors, buffer=buffer, chunk_bytes=4096
    )  # fmt: skip
    return made, buffer


MANIFEST = weights(2)[0]
MESSAGES: dict[str, msgspec.Struct] = {
    "hello": Hello(kind=LinkKind.CHAIN, slot="relay-up", epoch=1),
    "welcome": Welcome(verdict=LinkVerdict.ACCEPTED, current=1, held=[Held(version=1, digest="d")]),
    "announce": Announce(manifest=MANIFEST),
    "answer": Answer(verdict=OfferVerdict.SEND, have=1),
    "beat": Beat(have=1),
    "stored": Stored(version=2, digest=MANIFEST.digest),
    "replaced": Replaced(),
    "open": OpenVersion(version=1),
    "opened": Opened(manifest=MANIFEST, generation=2, newest=2),
}


def spoilt(kind: str, chance: random.Random) -> Iterator[bytes]:
    """What a connection may carry in place of a message of `kind`; a few of these are messages all the same."""
    good = encode(MESSAGES[kind])
    yield struct.pack("<I", 0)
    for size in (MANIFEST_MESSAGE_BYTES + 1, 0x7FFFFFFF, 0xFFFFFFFF):
        yield struct.pack("<I", size) + good
    for name, message in MESSAGES.items():
        if name != kind:
            yield frame(message)
    for _ in range(6):
        yield frame(MESSAGES[kind])[: chance.randrange(1, len(good) + 4)]
        yield struct.pack("<I", len(good) + chance.randrange(1, 40)) + good
    for _ in range(20):
        flipped = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
        yield struct.pack("<I", len(flipped)) + flipped
    for _ in range(10):
        noise = chance.randbytes(chance.randrange(1, 300))
        yield struct.pack("<I", len(noise)) + noise
        yield noise
    deep = b"\x91" * 5000 + b"\x01"
    yield struct.pack("<I", len(deep)) + deep


def manifests(chance: random.Random) -> Iterator[Manifest]:
    """Well-formed messages that contradict themselves, or announce nonsense."""

    def changed(**fields: object) -> Manifest:
        return msgspec.structs.replace(MANIFEST, **fields)

    for size in (0, -1, 1 << 44, 1 << 63):
        yield changed(total_bytes=size)
        yield changed(chunk_bytes=size)
    yield changed(chunk_hashes=[])
    yield changed(chunk_hashes=[b"short"] * 5)
    yield changed(digest="")
    yield changed(version=-1)
    yield changed(version=(1 << 64) - 1)
    for shape in ((-1,), (1 << 62, 1 << 62), (2,) * 2000, (SIZE + 1,)):
        tensors = [msgspec.structs.replace(MANIFEST.tensors[0], shape=shape)]
        yield changed(tensors=tensors, digest=digest_of(MANIFEST.chunk_hashes, tensors))
    for offset in (-64, 1, 1 << 62):
        tensors = [msgspec.structs.replace(MANIFEST.tensors[0], offset=offset)]
        yield changed(tensors=tensors, digest=digest_of(MANIFEST.chunk_hashes, tensors))


class Scene:
    """relay-up -> relay-0 -> relay-down; only relay-0 is real, and holds version 1."""

    def __init__(self, folder: Path) -> None:
        self.handoff = str(folder / "h.sock")
        listener = listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.below = listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.address = listener.address
        self.plane = DataPlane(
            "relay-0", Credentials(TOKEN, UID), StoreSizes(2), listener, listen_unix(self.handoff), lambda: None
        )  # fmt: skip
        self.plane.start()
        self.give_list(1, "relay-0")
        hand_over(self.address, TOKEN, UID, 1, *weights(1))

    def give_list(self, epoch: int, *slots: str) -> None:
        addresses = {"relay-0": self.address, "relay-down": self.below.address}
        members = [ChainMember(slot=slot, address=addresses.get(slot, "127.0.0.1:1")) for slot in slots]
        self.plane.apply_epoch(ChainEpoch(epoch=epoch, members=members))

    @property
    def refused(self) -> dict[str, int]:
        return self.plane.view().counters.refused

    def upstream(self) -> SocketConn:
        conn = connect(self.address, 2)
        prove_as_client(conn, TOKEN, UID, PURPOSE)
        return conn

    def reader(self) -> SocketConn:
        conn = connect_unix(self.handoff, 2)
        prove_as_client(conn, TOKEN, UID, handoff.PURPOSE)
        return conn

    def spoil(self, conn: SocketConn, data: bytes) -> None:
        """Sends it, half-closes, and waits until the relay has let the connection go."""
        with closing(conn):
            try:
                conn.send(data, 2)
                conn.socket.shutdown(socket.SHUT_WR)
                conn.socket.settimeout(10)
                while conn.socket.recv(65536):
                    pass
            except (PeerLost, ConnectionResetError, BrokenPipeError, OSError):
                return  # closed with our bytes unread

    def check_whole(self) -> None:
        assert self.plane.failure is None
        assert [held.version for held in self.plane.view().held] == [1]
        until(lambda: not any(server._conns for server in self.plane._servers))


@pytest.fixture
def scene(tmp_path: Path) -> Generator[Scene]:
    made = Scene(tmp_path)
    yield made
    assert made.plane.failure is None
    made.plane.close()
    made.below.close()


def until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not come true in time"
        time.sleep(0.002)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def greeted(conn: SocketConn, kind: LinkKind) -> SocketConn:
    slot = "relay-up" if kind is LinkKind.CHAIN else "x"
    send_message(conn, Hello(kind=kind, slot=slot, epoch=5, attempt=1))
    assert recv_message(conn, Welcome, SMALL_MESSAGE_BYTES).verdict is LinkVerdict.ACCEPTED
    return conn


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_whoever_does_not_prove_the_token_is_closed_and_counted(scene: Scene, family: str) -> None:
    chance = random.Random(1)
    openings = [b"", b"GET / HTTP/1.1\r\n\r\n", b"LAMINAR1", b"LAMINAR1" + bytes(31), b"LAMINAR2" + bytes(32)]
    openings += [b"LAMINAR1" + chance.randbytes(32 + extra) for extra in (0, 1, 31, 32, 500)]
    openings += [chance.randbytes(chance.randrange(1, 200)) for _ in range(40)]
    for opening in openings:
        before = sum(scene.refused.values())
        conn = connect(scene.address, 2) if family == "tcp" else connect_unix(scene.handoff, 2)
        scene.spoil(conn, opening)
        until(lambda before=before: sum(scene.refused.values()) == before + 1)
    for token, uid in (("other", UID), (TOKEN, "other"), ("", UID)):
        before = scene.refused.get(Refusal.UNAUTHORIZED, 0)
        conn = connect(scene.address, 2) if family == "tcp" else connect_unix(scene.handoff, 2)
        with closing(conn), pytest.raises(BadPeer):
            prove_as_client(conn, token, uid, PURPOSE if family == "tcp" else handoff.PURPOSE)
        until(lambda before=before: scene.refused.get(Refusal.UNAUTHORIZED, 0) == before + 1)
    scene.check_whole()


def positions(scene: Scene) -> dict[str, tuple[str, Callable[[], SocketConn]]]:
    """Where in a conversation a message is due: its kind, and how to get there."""
    return {
        "tcp, first word": ("hello", scene.upstream),
        "tcp, version of a chain": ("announce", lambda: greeted(scene.upstream(), LinkKind.CHAIN)),
        "tcp, version of a trainer": ("announce", lambda: greeted(scene.upstream(), LinkKind.HANDOVER)),
        "tcp, wish of an engine": ("open", lambda: greeted(scene.upstream(), LinkKind.PULL)),
        "unix, wish of an engine": ("open", scene.reader),
    }


POSITIONS = [
    "tcp, first word", "tcp, version of a chain", "tcp, version of a trainer", "tcp, wish of an engine",
    "unix, wish of an engine",
]  # fmt: skip


@pytest.mark.parametrize("position", POSITIONS)
def test_a_spoilt_message_closes_its_connection_is_counted_and_leaves_nothing(scene: Scene, position: str) -> None:
    chance = random.Random(position)
    kind, get_there = positions(scene)[position]
    for data in list(spoilt(kind, chance)):
        scene.spoil(get_there(), data)
    scene.check_whole()
    first = resident_bytes()
    counted = {reason: scene.refused.get(reason, 0) for reason in (Refusal.TOO_LARGE, Refusal.MALFORMED)}
    for _ in range(3):
        for data in spoilt(kind, chance):
            scene.spoil(get_there(), data)
    scene.check_whole()
    assert resident_bytes() - first < MAX_GROWTH_BYTES
    assert scene.refused[Refusal.TOO_LARGE] >= counted[Refusal.TOO_LARGE] + 9
    assert scene.refused[Refusal.MALFORMED] > counted[Refusal.MALFORMED]
    assert scene.refused[Refusal.TRUNCATED] > 0


def test_a_manifest_that_contradicts_itself_is_counted_and_takes_no_memory(scene: Scene) -> None:
    for kind in (LinkKind.CHAIN, LinkKind.HANDOVER):
        for manifest in manifests(random.Random(2)):
            before = scene.refused.get(Refusal.MALFORMED, 0)
            scene.spoil(greeted(scene.upstream(), kind), frame(Announce(manifest=manifest)))
            until(lambda before=before: scene.refused.get(Refusal.MALFORMED, 0) == before + 1)
    scene.check_whole()


def test_wishes_out_of_range_are_counted(scene: Scene) -> None:
    for wait_s in (-1.0, 31.0, float("nan"), float("inf")):
        for conn in (scene.reader(), greeted(scene.upstream(), LinkKind.PULL)):
            before = scene.refused.get(Refusal.MALFORMED, 0)
            scene.spoil(conn, frame(OpenVersion(wait_s=wait_s)))
            until(lambda before=before: scene.refused.get(Refusal.MALFORMED, 0) == before + 1)
    scene.check_whole()


def test_spoilt_chunks_are_counted_and_never_readable(scene: Scene) -> None:
    chance, good = random.Random(3), weights(2)[1][:4096]
    bad = [
        CHUNK_HEADER.pack(1, 4096), CHUNK_HEADER.pack(0, 4095), CHUNK_HEADER.pack(0, 0xFFFFFFFF),
        CHUNK_HEADER.pack(FRAME_PING, 1), CHUNK_HEADER.pack(77, 0), CHUNK_HEADER.pack(0, 4096) + bytes(4096),
        CHUNK_HEADER.pack(0, 4096) + good + CHUNK_HEADER.pack(0, 4096),
    ]  # fmt: skip
    bad += [chance.randbytes(8) + bytes(64) for _ in range(20)]
    for data in bad:
        before = sum(scene.refused.values())
        conn = greeted(scene.upstream(), LinkKind.CHAIN)
        send_message(conn, Announce(manifest=MANIFEST))
        scene.spoil(conn, data)
        until(lambda before=before: sum(scene.refused.values()) == before + 1)
    scene.check_whole()


class Below:
    """The neighbour further down, which knows the token and answers with `words` in place of the expected message."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._stop = Waker()

    def answer_once(self, honest: list[msgspec.Struct], data: bytes) -> None:
        conn = self._scene.below.accept(self._stop)
        assert conn is not None
        with closing(conn):
            prove_as_listener(conn, TOKEN, UID, PURPOSE)
            recv_message(conn, Hello, SMALL_MESSAGE_BYTES)
            for message in honest:
                send_message(conn, message)
            try:
                conn.send(data, 2)
                conn.socket.shutdown(socket.SHUT_WR)
                conn.socket.settimeout(10)
                while conn.socket.recv(65536):
                    pass
            except (PeerLost, OSError):
                return

    def close(self) -> None:
        self._stop.close()


@pytest.mark.parametrize("kind", ["welcome", "answer", "beat", "stored"])
def test_spoilt_answers_from_further_down_end_that_link_and_are_counted(scene: Scene, kind: str) -> None:
    welcome = MESSAGES["welcome"]
    assert isinstance(welcome, Welcome)
    empty = msgspec.structs.replace(welcome, held=[])
    sending = Answer(verdict=OfferVerdict.SEND)
    honest: dict[str, list[msgspec.Struct]] = {
        "welcome": [], "answer": [empty], "beat": [empty], "stored": [empty, sending]
    }  # fmt: skip
    below, chance = Below(scene), random.Random(kind)
    cases = [data for data in spoilt(kind, chance) if len(data) > 4][::2]
    for epoch, data in enumerate(cases, start=2):
        player = threading.Thread(target=below.answer_once, args=(honest[kind], data))
        player.start()
        # A new list each time, so that the next try comes at once.
        scene.give_list(epoch, "relay-0", "relay-down")
        player.join(20)
        assert not player.is_alive()
        scene.give_list(epoch, "relay-0", "relay-down")
    assert scene.refused[Refusal.TOO_LARGE] >= 1
    assert scene.refused[Refusal.MALFORMED] >= 5
    assert [held.version for held in scene.plane.view().held] == [1]
    below.close()


@pytest.mark.parametrize("family", ["tcp", "unix"])
@pytest.mark.parametrize("kind", ["welcome", "opened"])
def test_an_engine_that_gets_spoilt_answers_says_so_and_keeps_nothing(tmp_path: Path, family: str, kind: str) -> None:
    path = str(tmp_path / "rogue.sock")
    listener = listen_unix(path) if family == "unix" else listen_tcp(socket.create_server(("127.0.0.1", 0)))
    stop = Waker()

    def answer(data: bytes) -> None:
        conn = listener.accept(stop)
        assert conn is not None
        with closing(conn):
            prove_as_listener(conn, TOKEN, UID, PURPOSE if family == "tcp" else handoff.PURPOSE)
            if family == "tcp":
                recv_message(conn, Hello, SMALL_MESSAGE_BYTES)
                if kind == "opened":
                    send_message(conn, Welcome(verdict=LinkVerdict.ACCEPTED, current=1, held=[]))
            try:
                conn.send(data, 2)
            except PeerLost:
                return

    spoilt_manifests = [frame(Opened(manifest=manifest)) for manifest in manifests(random.Random(4))]
    first = resident_bytes()
    for data in [*spoilt(kind, random.Random(5)), *(spoilt_manifests if kind == "opened" else [])]:
        player = threading.Thread(target=answer, args=(data,))
        player.start()
        with pytest.raises((PeerLost, VersionGone, SlotReused)):
            if family == "tcp":
                pull_version(listener.address, TOKEN, UID, 1, 0.2)
            else:
                handoff.open_version(path, TOKEN, UID, 1, 0.2)
        player.join()
    assert resident_bytes() - first < MAX_GROWTH_BYTES
    listener.close()
    stop.close()
