"""Connections: deadlines, the proof, and what happens to those who do not speak the protocol."""

import os
import socket
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.relay.plane import MAX_DATA_CONNS, DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.transport import (
    BadPeer,
    PeerLost,
    Refusal,
    SocketConn,
    connect,
    listen_tcp,
    listen_unix,
    prove_as_client,
    prove_as_listener,
    recv_message,
    send_message,
)
from laminar.wire.links import SMALL_MESSAGE_BYTES, Hello, LinkKind, Welcome
from laminar.wire.messages import ChainEpoch, ChainMember

TOKEN, UID = "a token", "uid-1"


@contextmanager
def open_pair() -> Generator[tuple[SocketConn, SocketConn]]:
    left, right = socket.socketpair()
    with left, right:
        yield SocketConn(left, "left"), SocketConn(right, "right")


@pytest.fixture
def pair() -> Generator[tuple[SocketConn, SocketConn]]:
    with open_pair() as made:
        yield made


def in_thread(call: object) -> threading.Thread:
    thread = threading.Thread(target=call)  # type: ignore[arg-type]
    thread.start()
    return thread


@pytest.fixture
def plane(tmp_path: Path) -> Generator[DataPlane]:
    listener = listen_tcp(socket.create_server(("127.0.0.1", 0)))
    made = DataPlane(
        "relay-0", Credentials(TOKEN, UID), StoreSizes(2), listener, listen_unix(str(tmp_path / "h.sock")), lambda: None
    )  # fmt: skip
    made.start()
    made.apply_epoch(ChainEpoch(epoch=1, members=[ChainMember(slot="relay-0", address=listener.address)]))
    yield made
    assert made.failure is None
    made.close()


def address(plane: DataPlane) -> str:
    return plane._membership.members[0].address


def wait_refused(plane: DataPlane, reason: Refusal, at_least: int = 1) -> None:
    deadline = time.monotonic() + 10
    while plane.view().counters.refused.get(reason, 0) < at_least:
        assert time.monotonic() < deadline, plane.view().counters.refused
        time.sleep(0.005)


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            continue
    except ConnectionResetError:
        pass
    return True


def test_what_is_sent_arrives_whole_in_both_directions(pair: tuple[SocketConn, SocketConn]) -> None:
    left, right = pair
    data = os.urandom(3 << 20)
    sender = in_thread(lambda: left.send(data, 5))
    got = bytearray(len(data))
    right.recv_into(memoryview(got), 5)
    sender.join()
    assert bytes(got) == data


def test_silence_past_the_deadline_is_loss(pair: tuple[SocketConn, SocketConn]) -> None:
    left, _right = pair
    with pytest.raises(PeerLost, match="no byte"):
        left.recv_into(memoryview(bytearray(1)), 0.02)


def test_a_peer_that_takes_nothing_is_lost(pair: tuple[SocketConn, SocketConn]) -> None:
    left, _right = pair
    with pytest.raises(PeerLost, match="took no byte"):
        left.send(bytes(64 << 20), 0.05)


def test_eof_is_loss(pair: tuple[SocketConn, SocketConn]) -> None:
    left, right = pair
    right.close()
    with pytest.raises(PeerLost, match="closed"):
        left.recv_into(memoryview(bytearray(1)), 1)


def test_an_interrupted_wait_ends_with_loss(pair: tuple[SocketConn, SocketConn]) -> None:
    left, _right = pair
    waiter = in_thread(lambda: pytest.raises(PeerLost, left.recv_into, memoryview(bytearray(1)), None))
    left.interrupt()
    waiter.join(5)
    assert not waiter.is_alive()


def test_tcp_connections_are_tuned() -> None:
    server = listen_tcp(socket.create_server(("127.0.0.1", 0)))
    conn = connect(server.address, 1)
    assert conn.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert conn.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert conn.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
    conn.close()
    server.close()


def test_nobody_there_is_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(PeerLost):
        connect(f"127.0.0.1:{port}", 1)


def test_a_unix_socket_may_lie_deep_in_the_file_system(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    listener = listen_unix(str(deep / "handoff.sock"))
    again = listen_unix(str(deep / "handoff.sock"))
    assert os.listdir(deep) == ["handoff.sock"]
    listener.close()
    again.close()


@pytest.mark.parametrize(
    ("token", "uid", "purpose"), [("other", UID, "data"), (TOKEN, "uid-2", "data"), (TOKEN, UID, "handoff")]
)
def test_a_wrong_token_job_or_purpose_proves_nothing(
    pair: tuple[SocketConn, SocketConn], token: str, uid: str, purpose: str
) -> None:
    left, right = pair
    errors: list[BadPeer] = []

    def listen() -> None:
        with pytest.raises(BadPeer) as caught:
            prove_as_listener(right, TOKEN, UID, "data")
        errors.append(caught.value)

    listener = in_thread(listen)
    with pytest.raises(BadPeer, match="does not know"):
        prove_as_client(left, token, uid, purpose)
    left.close()
    listener.join()
    assert errors[0].refusal is Refusal.UNAUTHORIZED


def test_a_listeners_proof_cannot_be_played_back(pair: tuple[SocketConn, SocketConn]) -> None:
    left, right = pair
    listener = in_thread(lambda: pytest.raises(BadPeer, prove_as_listener, right, TOKEN, UID, "data"))
    left.send(b"LAMINAR1" + bytes(32), 1)
    answer = bytearray(64)
    left.recv_into(memoryview(answer), 1)
    left.send(bytes(answer[32:]), 1)
    listener.join(5)
    assert not listener.is_alive()


def test_a_huge_announced_message_is_refused_before_it_is_allocated(pair: tuple[SocketConn, SocketConn]) -> None:
    left, right = pair
    left.send(struct.pack("<I", 0xFFFFFFFF), 1)
    with pytest.raises(BadPeer) as caught:
        recv_message(right, Hello, SMALL_MESSAGE_BYTES)
    assert caught.value.refusal is Refusal.TOO_LARGE


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_messages_are_bad_peers_and_nothing_else(body: bytes) -> None:
    with open_pair() as (left, right):
        left.send(struct.pack("<I", len(body)) + body, 1)
        left.close()
        try:
            recv_message(right, Welcome, SMALL_MESSAGE_BYTES)
        except BadPeer as error:
            assert error.refusal is Refusal.MALFORMED


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_a_relay_closes_and_counts_strangers(plane: DataPlane, garbage: bytes) -> None:
    before = sum(plane.view().counters.refused.values())
    host, port = address(plane).split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    deadline = time.monotonic() + 10
    while sum(plane.view().counters.refused.values()) == before:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert plane.failure is None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=120), max_size=4), st.booleans())
def test_a_relay_survives_garbage_from_one_that_knows_the_token(
    plane: DataPlane, messages: list[bytes], framed: bool
) -> None:
    conn = connect(address(plane), 1)
    prove_as_client(conn, TOKEN, UID, "data")
    try:
        for body in messages:
            conn.send((struct.pack("<I", len(body)) if framed else b"") + body, 1)
        conn.socket.shutdown(socket.SHUT_WR)
        assert is_closed(conn.socket)
    except (PeerLost, OSError):
        pass  # it closed before we were done
    conn.close()
    assert plane.failure is None
    assert plane.view().held == ()


def test_a_huge_size_from_one_that_knows_the_token_is_counted(plane: DataPlane) -> None:
    conn = connect(address(plane), 1)
    prove_as_client(conn, TOKEN, UID, "data")
    conn.send(struct.pack("<I", 0x7FFFFFFF), 1)
    assert is_closed(conn.socket)
    conn.close()
    wait_refused(plane, Refusal.TOO_LARGE)


def test_a_wrong_token_at_a_relay_is_counted(plane: DataPlane) -> None:
    conn = connect(address(plane), 1)
    with pytest.raises(BadPeer):
        prove_as_client(conn, "other", UID, "data")
    conn.close()
    wait_refused(plane, Refusal.UNAUTHORIZED)


def test_more_connections_than_the_limit_are_closed_and_counted(plane: DataPlane) -> None:
    host, port = address(plane).split(":")
    socks = [socket.create_connection((host, int(port))) for _ in range(MAX_DATA_CONNS + 1)]
    wait_refused(plane, Refusal.TOO_MANY)
    for sock in socks:
        sock.close()


def test_an_orderly_upstream_that_is_not_in_the_list_is_declined(plane: DataPlane) -> None:
    conn = connect(address(plane), 1)
    prove_as_client(conn, TOKEN, UID, "data")
    send_message(conn, Hello(kind=LinkKind.CHAIN, slot="relay-9", epoch=1))
    assert recv_message(conn, Welcome, SMALL_MESSAGE_BYTES).verdict == "notUpstream"
    conn.close()
