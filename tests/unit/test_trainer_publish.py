"""The publisher: one hand-over a version, the same bytes again for a new master, never in training's way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from laminar.shell.calls import Conflict
from laminar.shell.handover import PURPOSE, HandedOver, HandOverRefused
from laminar.shell.transport import (
    Dial,
    PeerLost,
    SocketConn,
    Waker,
    listen_tcp,
    prove_as_listener,
    recv_message,
    send_message,
)
from laminar.trainer.books import Books
from laminar.trainer.failures import AttemptSuperseded, InputFailure, TrainerFailure
from laminar.trainer.publish import Publisher, Sender
from laminar.wire.links import (
    CHUNK_HEADER,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Hello,
    LinkVerdict,
    OfferVerdict,
    Stored,
    Welcome,
)
from laminar.wire.manifest import Manifest, layout
from laminar.wire.messages import PublicationView, ReservedVersion

ENTRIES = layout([("weight", "F32", (64,))])
NUM_BYTES = 256
SENDER = Sender(job_uid="uid", token="token", attempt=2)
WAIT_S = 10.0


def no_advice(
    address: str, token: str, job_uid: str, attempt: int, weights_bytes: int, deadline_s: float, *, dial: Dial
) -> int:
    """A master that has not measured its links."""
    return 0


class PaperBooks(Books):
    """A version register that a test turns by hand; a poll waits for a turn like the real long poll."""

    def __init__(self, master: str = "relay-0") -> None:
        self.route = (1, master)
        self.visible: set[int] = set()
        self.reserved: list[tuple[int, int | None]] = []
        self.refusal: Conflict | None = None
        self._turned = threading.Condition()

    def __enter__(self) -> PaperBooks:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def turn(self, *, master: str | None = None, visible: int | None = None, refusal: Conflict | None = None) -> None:
        with self._turned:
            if master is not None:
                self.route = (self.route[0] + 1, master)
            if visible is not None:
                self.visible.add(visible)
            self.refusal = refusal
            self._turned.notify_all()

    def reserve(self, step: int, parent: int | None) -> ReservedVersion:
        with self._turned:
            self.reserved.append((step, parent))
            return ReservedVersion(version=len(self.reserved) - 1, epoch=self.route[0], master=self.route[1])

    def publication(self, version: int, epoch: int, wait_s: float) -> PublicationView:
        with self._turned:
            self._turned.wait_for(
                lambda: version in self.visible or self.route[0] != epoch or self.refusal is not None, wait_s
            )
            if self.refusal is not None:
                raise self.refusal
            return PublicationView(
                version=version, visible=version in self.visible, complete_on=[], needed=1, epoch=self.route[0],
                master=self.route[1],
            )  # fmt: skip


class PaperRelays:
    """What masters received. `lost` masters break the connection; `held_back` blocks hand-overs until it is set."""

    def __init__(self) -> None:
        self.received: list[tuple[str, int, str, bytes]] = []
        self.cuts: list[int] = []
        self.lost: set[str] = set()
        self.refusal: HandOverRefused | None = None
        self.let_go = threading.Event()
        self.let_go.set()
        self._changed = threading.Condition()

    def __call__(
        self, address: str, token: str, job_uid: str, attempt: int, manifest: Manifest, chunks: bytearray,
        deadline_s: float, *, dial: Dial,
    ) -> HandedOver:  # fmt: skip
        assert (token, job_uid, attempt) == ("token", "uid", 2)
        assert self.let_go.wait(WAIT_S)
        if self.refusal is not None:
            raise self.refusal
        self.cuts.append(manifest.chunk_bytes)
        if address in self.lost:
            raise PeerLost(f"{address} is gone")
        with self._changed:
            self.received.append((address, manifest.version, manifest.digest, bytes(chunks)))
            self._changed.notify_all()
        return HandedOver.SENT

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= count, WAIT_S), self.received


@contextmanager
def publishing(books: PaperBooks, relays: PaperRelays) -> Iterator[Publisher]:
    publisher = Publisher(lambda: books, SENDER, ENTRIES, None, relays, no_advice)
    yield publisher
    relays.let_go.set()
    publisher.close(WAIT_S)


def publish(publisher: Publisher, step: int) -> None:
    buffer = publisher.buffer()
    buffer[:] = bytes([step]) * NUM_BYTES
    publisher.submit(step, buffer)


def test_a_version_is_reserved_after_its_parent_and_handed_over_once() -> None:
    books, relays = PaperBooks(), PaperRelays()
    with publishing(books, relays) as publisher:
        for step in (0, 1):
            publish(publisher, step)
            relays.wait_for(step + 1)
            books.turn(visible=step)
            publisher.wait_visible(WAIT_S)
    assert books.reserved == [(0, None), (1, 0)]
    assert [(version, data[0]) for _, version, _, data in relays.received] == [(0, 0), (1, 1)]


def test_a_new_master_gets_exactly_the_same_bytes() -> None:
    books, relays = PaperBooks("relay-0"), PaperRelays()
    with publishing(books, relays) as publisher:
        publish(publisher, 7)
        relays.wait_for(1)
        other = publisher.buffer()
        other[:] = b"\xff" * NUM_BYTES  # training already fills the next buffer
        books.turn(master="relay-1")
        relays.wait_for(2)
        books.turn(visible=0)
        publisher.wait_visible(WAIT_S)
    first, second = relays.received
    assert (first[0], second[0]) == ("relay-0", "relay-1")
    assert first[1:] == second[1:]


def test_a_visible_version_is_offered_to_every_later_master() -> None:
    """All relays that held the newest version may die together; then only the trainer still has it."""
    books, relays = PaperBooks(), PaperRelays()
    with publishing(books, relays) as publisher:
        publish(publisher, 0)
        relays.wait_for(1)
        books.turn(visible=0)
        publisher.wait_visible(WAIT_S)
        books.turn(master="relay-7")
        relays.wait_for(2)
    assert [(address, version) for address, version, _, _ in relays.received] == [("relay-0", 0), ("relay-7", 0)]
    assert relays.received[0][3] == relays.received[1][3]


def test_a_lost_master_is_tried_again_until_the_next_epoch_names_another() -> None:
    books, relays = PaperBooks("relay-0"), PaperRelays()
    relays.lost.add("relay-0")
    with publishing(books, relays) as publisher:
        publish(publisher, 1)
        books.turn(master="relay-1")
        relays.wait_for(1)
        books.turn(visible=0)
        publisher.wait_visible(WAIT_S)
    assert [received[0] for received in relays.received] == ["relay-1"]


def test_without_a_master_the_bytes_wait_for_one() -> None:
    books, relays = PaperBooks(""), PaperRelays()
    with publishing(books, relays) as publisher:
        publish(publisher, 1)
        books.turn(master="relay-0")
        relays.wait_for(1)
        books.turn(visible=0)
        publisher.wait_visible(WAIT_S)


def test_the_next_buffer_waits_while_a_version_is_being_handed_over() -> None:
    books, relays = PaperBooks(), PaperRelays()
    relays.let_go.clear()
    with publishing(books, relays) as publisher:
        publish(publisher, 0)
        got = threading.Event()

        def train() -> None:
            publisher.buffer()
            got.set()

        trainer = threading.Thread(target=train)
        trainer.start()
        assert not got.wait(0.2)
        relays.let_go.set()
        assert got.wait(WAIT_S)
        trainer.join()


def test_a_version_that_is_handed_over_but_not_visible_gives_way_to_the_next() -> None:
    books, relays = PaperBooks(), PaperRelays()
    with publishing(books, relays) as publisher:
        publish(publisher, 0)
        relays.wait_for(1)
        publish(publisher, 1)
        relays.wait_for(2)
        books.turn(visible=1)
        publisher.wait_visible(WAIT_S)
    assert [received[1] for received in relays.received] == [0, 1]


def test_a_superseded_attempt_stops_at_its_next_call() -> None:
    books, relays = PaperBooks(), PaperRelays()
    publisher = Publisher(lambda: books, SENDER, ENTRIES, None, relays, no_advice)
    publish(publisher, 0)
    books.turn(refusal=Conflict(409, "attempt", "attempt 3 trains", 3))
    with pytest.raises(Conflict):
        publisher.wait_visible(WAIT_S)


@pytest.mark.parametrize(
    ("verdict", "failure"),
    [
        (OfferVerdict.LOWER_ATTEMPT, AttemptSuperseded),
        (OfferVerdict.TOO_LARGE, InputFailure),
        (OfferVerdict.CONFLICT, TrainerFailure),
    ],
)
def test_a_final_refusal_of_the_master_ends_the_attempt(verdict: OfferVerdict, failure: type[Exception]) -> None:
    books, relays = PaperBooks(), PaperRelays()
    relays.refusal = HandOverRefused(verdict, 9, "no")
    publisher = Publisher(lambda: books, SENDER, ENTRIES, None, relays, no_advice)
    publish(publisher, 0)
    with pytest.raises(failure):
        publisher.wait_visible(WAIT_S)


def test_a_version_that_never_becomes_visible_is_an_error_after_the_deadline() -> None:
    books, relays = PaperBooks(), PaperRelays()
    with publishing(books, relays) as publisher:
        publish(publisher, 4)
        with pytest.raises(TrainerFailure, match="step 4 did not become visible"):
            publisher.wait_visible(0.05)


class Master:
    """A master relay on the real transport that keeps what it is handed, or hangs up after the announcement."""

    def __init__(self, *, hangs_up: bool = False) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        self._listener = listen_tcp(sock)
        self.address = self._listener.address
        self._stop = Waker()
        self._hangs_up = hangs_up
        self.stored: list[tuple[int, bytes]] = []
        self.offered = threading.Event()
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()
        self._stop.close()

    def _serve(self) -> None:
        while (conn := self._listener.accept(self._stop)) is not None:
            try:
                self._receive(conn)
            finally:
                conn.close()

    def _receive(self, conn: SocketConn) -> None:
        prove_as_listener(conn, "token", "uid", PURPOSE)
        assert recv_message(conn, Hello, SMALL_MESSAGE_BYTES).attempt == 2
        send_message(conn, Welcome(verdict=LinkVerdict.ACCEPTED, current=1, held=[]))
        manifest = recv_message(conn, Announce, MANIFEST_MESSAGE_BYTES).manifest
        assert manifest is not None
        self.offered.set()
        if self._hangs_up:
            return
        send_message(conn, Answer(verdict=OfferVerdict.SEND))
        data = bytearray(manifest.total_bytes)
        for index in range(manifest.num_chunks):
            conn.recv_into(memoryview(bytearray(CHUNK_HEADER.size)), WAIT_S)
            start, end = manifest.chunk_range(index)
            conn.recv_into(memoryview(data)[start:end], WAIT_S)
        self.stored.append((manifest.version, bytes(data)))
        send_message(conn, Stored(version=manifest.version, digest=manifest.digest))
        self.done.set()


def test_over_tcp_the_next_master_gets_the_bytes_that_a_dying_one_did_not_take() -> None:
    dying, heir = Master(hangs_up=True), Master()
    books = PaperBooks(dying.address)
    publisher = Publisher(lambda: books, SENDER, ENTRIES, None, ask_chunk_bytes=no_advice)
    try:
        publish(publisher, 5)
        assert dying.offered.wait(WAIT_S)
        books.turn(master=heir.address)
        assert heir.done.wait(WAIT_S)
        books.turn(visible=0)
        publisher.wait_visible(WAIT_S)
        assert heir.stored == [(0, bytes([5]) * NUM_BYTES)] and not dying.stored
    finally:
        publisher.close(WAIT_S)
        dying.close()
        heir.close()


def test_a_version_is_cut_as_the_master_advises_and_small_changes_of_mind_do_not_count() -> None:
    asked: list[int] = []
    answers = [128, 100, 0, 32]

    def advise(
        address: str, token: str, job_uid: str, attempt: int, weights_bytes: int, deadline_s: float, *, dial: Dial
    ) -> int:
        asked.append(weights_bytes)
        return answers[len(asked) - 1]

    books, relays = PaperBooks(), PaperRelays()
    publisher = Publisher(lambda: books, SENDER, ENTRIES, None, relays, advise)
    for step in range(4):
        buffer = publisher.buffer()
        buffer[:] = bytes([step]) * NUM_BYTES
        publisher.submit(step, buffer)
        books.turn(visible=step)
        publisher.wait_visible(WAIT_S)
    publisher.close()
    assert asked == [NUM_BYTES] * 4
    assert relays.cuts == [128, 128, 128, 32]
