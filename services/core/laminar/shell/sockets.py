"""Listening sockets and addresses, IPv4 and IPv6."""

from __future__ import annotations

import os
import socket

from laminar.shell.settings import SettingsError

BACKLOG = 1024
"""Connection attempts that queue while a service restarts: every member of a job may knock at once."""


def parse_address(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` -> (host, port). Raises SettingsError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{text!r} is not host:port")
    if ":" in host and not bracketed:
        raise SettingsError(f"{text!r}: an IPv6 address stands in brackets, as in [::1]:8000")
    return (host[1:-1] if bracketed else host), int(port)


def format_address(host: str, port: int) -> str:
    """Inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_address(sock: socket.socket) -> str:
    """`host:port` of a bound TCP socket, with the port that the system chose."""
    host, port = sock.getsockname()[:2]
    return format_address(str(host), int(port))


def listening_socket(spec: str) -> socket.socket:
    """A listening TCP socket of `fd:N` (inherited, already listening) or `host:port` (0 = a free port).

    Never inherited by children. Raises SettingsError for a bad spec, an fd that does not listen, a taken port.
    """
    if spec.startswith("fd:"):
        return _inherited(spec)
    host, port = parse_address(spec)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"cannot listen on {spec!r}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise SettingsError(f"cannot listen on {spec!r}: {error.strerror}") from error
    return sock


def _inherited(spec: str) -> socket.socket:
    number = spec.removeprefix("fd:")
    if not number.isascii() or not number.isdigit():
        raise SettingsError(f"{spec!r} is not fd:NUMBER")
    try:
        sock = socket.socket(fileno=int(number))
    except OSError as error:
        raise SettingsError(f"{spec!r} is not an inherited socket: {error.strerror}") from error
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise SettingsError(f"{spec!r} is a socket, but it does not listen")
    os.set_inheritable(sock.fileno(), False)
    return sock
