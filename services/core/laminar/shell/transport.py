"""Blocking byte transport of the weights: connections, deadlines, the HMAC proof, framed messages.

The interface is small so that RDMA fits behind it later: `Listener.accept`, `connect`, `Conn.send`,
`Conn.recv_into`, `Conn.close`, one exception. TCP and unix sockets are the two kinds here.

Whoever connects must prove that it knows the job's token, and the listener proves it first. Until then nothing is
read but a fixed number of bytes, so a stranger can make this process neither allocate nor wait for long.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from laminar.shell.sockets import BACKLOG, bound_address, format_address, parse_address
from laminar.wire.codec import decode, frame

T = TypeVar("T")

SILENCE_S = 5.0
"""A peer that moves no byte for this long while it should is lost. Senders that wait ping every second."""
PROOF_S = 5.0
"""For the whole proof: three small messages."""
USER_TIMEOUT_MS = 5_000
"""Unacknowledged data for this long = lost (a silently dropped link; keepalive alone does not see it)."""

_TIMEVAL = struct.Struct("ll")
_MAGIC = b"LAMINAR1"
_READY_BYTES = 4096
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class PeerLost(Exception):
    """The other side closed, died, fell silent or cannot be reached."""


class Refusal(StrEnum):
    """Why a connection was closed by us; the label of the counter."""

    UNAUTHORIZED = "unauthorized"
    MALFORMED = "malformed"
    TOO_LARGE = "tooLarge"
    TRUNCATED = "truncated"
    """A message that began and did not end: garbage, or a peer that died in the middle of it."""
    DAMAGED = "damaged"
    """Bytes that do not have the announced hash."""
    TOO_MANY = "tooMany"


class BadPeer(PeerLost):
    """The other side said something that no honest peer says; its connection is to be closed and counted."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(f"{refusal}: {detail}")
        self.refusal = refusal


class Waker:
    """Wakes a thread that waits in poll(). Thread-safe, level-triggered: stays set until `clear`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return  # it was not set

    def close(self) -> None:
        os.close(self._fd)


class Watch(Protocol):
    """Looks around while a thread sends or receives: at the other direction, at the clock."""

    slice_s: float
    """A wait is cut into pieces of this length, with a look after each."""

    def look(self, moved_bytes: int = 0) -> None:
        """Also called between the parts of a long transfer, so it must be cheap. `moved_bytes`: since the last look.
        Raises PeerLost to end the wait."""
        ...


class Conn(Protocol):
    """One connection, owned by one thread; only `interrupt`, `say` and `is_open` may be called by others."""

    peer: str

    def send(
        self, view: bytes | memoryview, deadline_s: float, *, more: bool = False, watch: Watch | None = None
    ) -> None:
        """Sends all of it. Raises PeerLost if no byte moves for `deadline_s`. `more`: the rest follows at once."""
        ...

    def recv_into(self, view: memoryview, deadline_s: float | None, watch: Watch | None = None) -> None:
        """Fills `view`. Raises PeerLost at EOF, or if no byte comes for `deadline_s` (None: wait for ever)."""
        ...

    def recv_ready(self) -> bytes:
        """What has come already, a few KiB at most; empty: nothing. Never waits. Raises PeerLost at EOF."""
        ...

    def say(self, word: bytes) -> bool:
        """Sends a few bytes whole and without waiting, from any thread; False: there is no room, nothing was sent."""
        ...

    def is_open(self) -> bool:
        """False: the other side has closed, though what it sent before may lie unread."""
        ...

    def fileno(self) -> int: ...

    def interrupt(self) -> None:
        """Makes the owner's pending and later calls fail with PeerLost."""
        ...

    def close(self) -> None: ...


class Dial(Protocol):
    """How a connection to host:port is made: `connect`, or another transport's own."""

    def __call__(self, address: str, deadline_s: float, /) -> Conn:
        """Raises PeerLost if there is none within `deadline_s`."""
        ...


class Listener(Protocol):
    """Where connections arrive; not yet proven."""

    address: str

    def accept(self, stop: Waker) -> Conn | None:
        """The next connection; None once `stop` is set."""
        ...

    def close(self) -> None: ...


class SocketConn:
    """`Conn` over a stream socket."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self.peer = peer
        self._timeouts_s: dict[int, float | None] = {}
        # The kernel minds the time-outs: with Python's own, every call costs a poll() more and moves less.
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            _tune(sock)

    @property
    def socket(self) -> socket.socket:
        """For passing descriptors over unix sockets."""
        return self._sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(
        self, view: bytes | memoryview, deadline_s: float, *, more: bool = False, watch: Watch | None = None
    ) -> None:
        rest = memoryview(view).cast("B")
        flags = socket.MSG_NOSIGNAL | (socket.MSG_MORE if more else 0)
        slice_s = deadline_s if watch is None else watch.slice_s
        self._limit(socket.SO_SNDTIMEO, slice_s)
        waited_s = 0.0
        while rest:
            try:
                moved = self._sock.send(rest, flags)
                waited_s = 0.0
            except BlockingIOError as error:
                moved, waited_s = 0, waited_s + slice_s
                if waited_s >= deadline_s:
                    raise PeerLost(f"{self.peer} took no byte for {deadline_s} s") from error
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error}") from error
            if watch is not None:
                watch.look(moved)
            rest = rest[moved:]

    def recv_into(self, view: memoryview, deadline_s: float | None, watch: Watch | None = None) -> None:
        slice_s = deadline_s if watch is None else watch.slice_s
        self._limit(socket.SO_RCVTIMEO, slice_s)
        waited_s = 0.0
        while view:
            try:
                moved = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
                waited_s = 0.0
            except BlockingIOError as error:
                assert slice_s is not None, "without a time-out the kernel waits for ever"
                moved, waited_s = 0, waited_s + slice_s
                if deadline_s is not None and waited_s >= deadline_s:
                    raise PeerLost(f"{self.peer} sent no byte for {deadline_s} s") from error
            except OSError as error:
                raise PeerLost(f"{self.peer}: {error}") from error
            else:
                if moved == 0:
                    raise PeerLost(f"{self.peer} closed the connection")
            if watch is not None:
                watch.look(moved)
            view = view[moved:]

    def recv_ready(self) -> bytes:
        if not self._is_ready(select.POLLIN):
            return b""
        try:
            came = self._sock.recv(_READY_BYTES, socket.MSG_DONTWAIT)
        except OSError as error:
            raise PeerLost(f"{self.peer}: {error}") from error
        if not came:
            raise PeerLost(f"{self.peer} closed the connection")
        return came

    def say(self, word: bytes) -> bool:
        # Writable means room for far more than a word, so that words of two threads never mix.
        if not self._is_ready(select.POLLOUT):
            return False
        try:
            sent = self._sock.send(word, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as error:
            raise PeerLost(f"{self.peer}: {error}") from error
        if sent < len(word):
            raise PeerLost(f"{self.peer} takes half words")
        return True

    def is_open(self) -> bool:
        try:
            return not self._is_ready(select.POLLRDHUP)
        except PeerLost:
            return False

    def _is_ready(self, event: int) -> bool:
        poll = select.poll()
        try:
            poll.register(self._sock, event)
            return bool(poll.poll(0))
        except (OSError, ValueError) as error:
            raise PeerLost(f"{self.peer}: {error}") from error

    def interrupt(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed by either side: nothing pends any more

    def close(self) -> None:
        self._sock.close()

    def _limit(self, option: int, timeout_s: float | None) -> None:
        """Of one direction: SO_RCVTIMEO or SO_SNDTIMEO."""
        if timeout_s == self._timeouts_s.get(option):
            return
        # Zero means for ever to the kernel.
        timeout_us = 0 if timeout_s is None else max(1, round(timeout_s * 1e6))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(timeout_us, 1_000_000)))
        except OSError as error:
            raise PeerLost(f"{self.peer}: {error}") from error
        self._timeouts_s[option] = timeout_s


class SocketListener:
    """`Listener` over a listening stream socket, possibly inherited and shared with the process that bound it."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        # Never shut down: the driver keeps the same socket for the next life of this slot.
        self._sock = sock
        sock.setblocking(False)
        self.address = address

    def accept(self, stop: Waker) -> SocketConn | None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(stop, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if stop.fileno() in ready:
                return None
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the caller gave up before we came
            return SocketConn(sock, _peer_name(sock))

    def close(self) -> None:
        self._sock.close()


def listen_tcp(sock: socket.socket) -> SocketListener:
    """Takes over a listening TCP socket."""
    return SocketListener(sock, bound_address(sock))


def listen_unix(path: str) -> SocketListener:
    """Binds a unix socket at `path` (mode 0600); a stale one of an earlier life is replaced in one step."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_folder(path) as folder:
        name = os.path.basename(path)
        beside = f"{folder}/{name}.{os.getpid()}"
        sock.bind(beside)
        os.chmod(beside, 0o600)
        sock.listen(BACKLOG)
        os.rename(beside, f"{folder}/{name}")
    return SocketListener(sock, path)


def connect(address: str, deadline_s: float) -> SocketConn:
    """TCP connection to host:port. Raises PeerLost if there is none within `deadline_s`."""
    try:
        return SocketConn(socket.create_connection(parse_address(address), timeout=deadline_s), address)
    except OSError as error:
        raise PeerLost(f"cannot connect to {address}: {error}") from error


def connect_unix(path: str, deadline_s: float) -> SocketConn:
    """Connection to the unix socket at `path`. Raises PeerLost if nobody answers there within `deadline_s`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline_s)
        with _short_folder(path) as folder:
            sock.connect(f"{folder}/{os.path.basename(path)}")
    except OSError as error:
        sock.close()
        raise PeerLost(f"cannot connect to {path}: {error}") from error
    return SocketConn(sock, path)


def prove_as_client(conn: Conn, token: str, job_uid: str, purpose: str, deadline_s: float = PROOF_S) -> None:
    """Checks that the listener knows the token, then shows that we do. Raises BadPeer(UNAUTHORIZED) or PeerLost."""
    until = time.monotonic() + deadline_s
    mine = os.urandom(_NONCE_BYTES)
    conn.send(_MAGIC + mine, deadline_s)
    theirs = _recv_within(conn, _NONCE_BYTES, until)
    proof = _recv_within(conn, _PROOF_BYTES, until)
    if not hmac.compare_digest(proof, _proof(token, "listener", job_uid, purpose, mine, theirs)):
        raise BadPeer(Refusal.UNAUTHORIZED, f"{conn.peer} does not know this job's token")
    conn.send(_proof(token, "client", job_uid, purpose, mine, theirs), PROOF_S)


def prove_as_listener(conn: Conn, token: str, job_uid: str, purpose: str) -> None:
    """The other half of `prove_as_client`. Raises BadPeer for anybody who does not finish the proof in time."""
    until = time.monotonic() + PROOF_S
    try:
        opening = _recv_within(conn, len(_MAGIC) + _NONCE_BYTES, until)
        if not opening.startswith(_MAGIC):
            raise BadPeer(Refusal.MALFORMED, f"{conn.peer} does not speak this protocol")
        theirs = opening[len(_MAGIC) :]
        mine = os.urandom(_NONCE_BYTES)
        conn.send(mine + _proof(token, "listener", job_uid, purpose, theirs, mine), PROOF_S)
        proof = _recv_within(conn, _PROOF_BYTES, until)
    except BadPeer:
        raise
    except PeerLost as error:
        raise BadPeer(Refusal.UNAUTHORIZED, f"{conn.peer} did not finish the proof ({error})") from error
    if not hmac.compare_digest(proof, _proof(token, "client", job_uid, purpose, theirs, mine)):
        raise BadPeer(Refusal.UNAUTHORIZED, f"{conn.peer} does not know this job's token")


def send_message(conn: Conn, message: msgspec.Struct, deadline_s: float = SILENCE_S, *, more: bool = False) -> None:
    """One framed message. Raises PeerLost."""
    conn.send(frame(message), deadline_s, more=more)


def recv_message(
    conn: Conn, type_: type[T], limit_bytes: int, deadline_s: float | None = SILENCE_S, watch: Watch | None = None
) -> T:
    """Waits `deadline_s` (None: for ever) for a message to begin. Raises PeerLost; BadPeer if it is too long or not
    of this type."""
    head = bytearray(4)
    conn.recv_into(memoryview(head), deadline_s, watch)
    (size,) = struct.unpack("<I", head)
    if size > limit_bytes:
        raise BadPeer(Refusal.TOO_LARGE, f"{conn.peer} announces a {type_.__name__} of {size} bytes")
    body = bytearray(size)
    try:
        conn.recv_into(memoryview(body), SILENCE_S)
    except PeerLost as error:
        raise BadPeer(Refusal.TRUNCATED, f"{conn.peer} began a {type_.__name__}: {error}") from error
    try:
        return decode(memoryview(body), type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadPeer(Refusal.MALFORMED, f"{conn.peer} sent no {type_.__name__}: {error}") from error


def _recv_within(conn: Conn, num_bytes: int, until: float) -> bytes:
    """Byte by byte in the worst case, but never past `until`: one that drips must not hold the thread."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    for index in range(num_bytes):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise PeerLost(f"{conn.peer} took too long over its proof")
        conn.recv_into(view[index : index + 1], left_s)
    return bytes(data)


def _proof(token: str, role: str, job_uid: str, purpose: str, client_nonce: bytes, listener_nonce: bytes) -> bytes:
    # The role keeps a listener's proof from being played back as a client's.
    text = "\0".join((role, purpose, job_uid)).encode()
    return hmac.new(token.encode(), text + b"\0" + client_nonce + listener_nonce, hashlib.sha256).digest()


@contextmanager
def _short_folder(path: str) -> Generator[str]:
    """The folder of `path` by a short name: a socket's address has room for 107 bytes only (man 7 unix)."""
    fd = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _peer_name(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return "a process of this machine"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return format_address(str(host), int(port))


def _tune(sock: socket.socket) -> None:
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS),
    ):
        sock.setsockopt(level, option, value)
