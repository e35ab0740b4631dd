"""Hosts that are network namespaces: each with its own address and an interface of a chosen speed, both ways.

One bridge is the switch. Needs root, `ip` and `tc`; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from relay_parts.nodes import Site, set_namespace

INTERFACE = "eth0"
BURST_BYTES = 256 << 10
"""More than the largest piece that the kernel sends at once, 64 KiB; 5 ms at 50 MB/s."""
QUEUE_BYTES = 32 << 20
"""More than all send buffers together: a switch that drops nothing, or TCP would measure its own recovery."""


def why_not() -> str:
    """Empty: namespaces can be made here."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        return f"no network namespaces: {', '.join(missing) or 'not root'}"
    name = f"lam{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""


@contextmanager
def hosts(num: int, byte_s: float) -> Iterator[list[Site]]:
    """`num` hosts on one switch; each sends and receives at most one byte in `byte_s`."""
    stem = f"lam{os.getpid() % 100_000}"
    bridge, names = f"{stem}b", [f"{stem}n{index}" for index in range(num)]
    shape = f"rate {round(8 / byte_s)}bit burst {BURST_BYTES} limit {QUEUE_BYTES}".split()
    try:
        _run("ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0")
        _run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            port = f"{stem}p{index}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "link", "set", port, "master", bridge, "up")
            _run("ip", "-n", name, "address", "add", f"{_address(index)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
            _run("tc", "qdisc", "add", "dev", port, "root", "tbf", *shape)
        sites = [Site(_address(index), name) for index, name in enumerate(names)]
        _wait_for_switch(sites)
        yield sites
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


@contextmanager
def inside(site: Site) -> Iterator[None]:
    """Sockets that this thread makes meanwhile are those of the host."""
    with open("/proc/self/ns/net") as home:
        site.enter()
        try:
            yield
        finally:
            if site.namespace is not None:
                set_namespace(home.fileno())


def _address(index: int) -> str:
    return f"10.97.0.{index + 1}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _wait_for_switch(sites: list[Site]) -> None:
    """A port of a bridge forwards a moment after it is up."""
    ends_s = time.monotonic() + 10
    for site in sites[1:]:
        ping = ["ip", "netns", "exec", str(sites[0].namespace), "bash", "-c", f"echo > /dev/tcp/{site.address}/9"]
        while "refused" not in subprocess.run(ping, capture_output=True, text=True, check=False).stderr:
            assert time.monotonic() < ends_s, f"{site.address} cannot be reached"
