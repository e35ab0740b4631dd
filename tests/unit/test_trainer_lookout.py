"""The lookout: a call to a master ends when the pool names another one, and only then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from laminar.shell.calls import Conflict
from laminar.shell.transport import PeerLost
from laminar.trainer.books import Books
from laminar.trainer.lookout import Line, Lookout, Route
from laminar.wire.messages import PublicationView

WAIT_S = 10.0


class PaperRegister(Books):
    """Answers a question about a version as the pool does: at once if it knows another epoch."""

    def __init__(self) -> None:
        self.epoch, self.master, self.visible = 1, "m", False
        self.refusal: Conflict | None = None
        self.asked = threading.Semaphore(0)
        self._turned = threading.Condition()

    def __enter__(self) -> PaperRegister:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def turn(self, master: str, refusal: Conflict | None = None) -> None:
        with self._turned:
            self.epoch, self.master, self.refusal = self.epoch + 1, master, refusal
            self._turned.notify_all()

    def publication(self, version: int, epoch: int, wait_s: float) -> PublicationView:
        self.asked.release()
        with self._turned:
            self._turned.wait_for(lambda: self.visible or self.epoch != epoch, wait_s)
            if self.refusal is not None:
                raise self.refusal
            return PublicationView(
                version=version, visible=self.visible, complete_on=[], needed=1, epoch=self.epoch, master=self.master
            )


@pytest.fixture
def register() -> PaperRegister:
    return PaperRegister()


@pytest.fixture
def lookout(register: PaperRegister) -> Iterator[Lookout]:
    made = Lookout(lambda: register)
    yield made
    made.close()


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def listen(line: Line, address: str, then: Callable[[], None]) -> float:
    """Seconds until a read from a master that says nothing ended; `then` comes once the connection is there."""
    started_s = time.monotonic()
    conn = line.dial(address, WAIT_S)
    then()
    with pytest.raises(PeerLost):
        conn.recv_into(memoryview(bytearray(1)), WAIT_S)
    conn.close()
    return time.monotonic() - started_s


@pytest.mark.parametrize("visible", [False, True])
def test_a_call_ends_when_another_master_is_named(
    lookout: Lookout, register: PaperRegister, deaf: str, visible: bool
) -> None:
    register.visible = visible
    with lookout.watch(1, Route(1, "m")) as line:
        assert listen(line, deaf, lambda: register.turn("n")) < WAIT_S / 2
        with pytest.raises(PeerLost, match="master no longer"):
            line.dial(deaf, WAIT_S)


def test_a_new_epoch_with_the_same_master_disturbs_nothing(
    lookout: Lookout, register: PaperRegister, deaf: str
) -> None:
    with lookout.watch(1, Route(1, "m")) as line:
        assert register.asked.acquire(timeout=WAIT_S)
        register.turn("m")
        for _ in range(2):
            assert register.asked.acquire(timeout=WAIT_S)
        line.dial(deaf, WAIT_S).close()


def test_a_refusal_of_the_pool_ends_the_call_too(lookout: Lookout, register: PaperRegister, deaf: str) -> None:
    with lookout.watch(1, Route(1, "m")) as line:
        refusal = Conflict(409, "attempt", "attempt 3 trains", 3)
        assert listen(line, deaf, lambda: register.turn("m", refusal)) < WAIT_S / 2


def test_a_call_that_is_over_is_not_cut_and_the_next_one_is_watched(
    lookout: Lookout, register: PaperRegister, deaf: str
) -> None:
    with lookout.watch(1, Route(1, "m")) as line:
        conn = line.dial(deaf, WAIT_S)
        assert register.asked.acquire(timeout=WAIT_S)
    register.turn("n")
    with lookout.watch(2, Route(2, "n")) as line:
        assert listen(line, deaf, lambda: register.turn("o")) < WAIT_S / 2
    assert conn.is_open(), "its owner closes it, nobody else"
    conn.close()


def test_a_short_call_asks_the_pool_nothing(lookout: Lookout, register: PaperRegister) -> None:
    for version in range(50):
        with lookout.watch(version, Route(1, "m")):
            pass
    assert not register.asked.acquire(blocking=False)
