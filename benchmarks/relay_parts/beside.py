"""Relays beside what a user would pick instead: the same bytes from one trainer to the same number of hosts.

Hosts are network namespaces with an interface of 50 MB/s each, both ways, where the system allows that (root); else
everybody shares loopback, and says so. The time runs until the last host has all bytes in its memory. Ours includes
hashing and checking every byte; the others check nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from relay_parts import peers
from relay_parts.hosts import hosts, inside, why_not
from relay_parts.lines import Line, at_least, listed, median
from relay_parts.nodes import TOKEN, UID, Chain, Site, Weights, relays

from laminar.shell.handover import best_chunk_bytes, hand_over

BYTE_S = 1 / 50e6
NUM_HOSTS = 4
"""Beside the trainer's."""
WARM_UP = 3
"""Versions until every slot has been written to, and the links are known."""
SHARED_MEMORY = Path("/dev/shm")


def measure(folder: Path, *, quick: bool) -> Iterator[Line]:
    repeats = 1 if quick else 5
    reason = why_not()
    local = [Site()] * (NUM_HOSTS + 1)
    with nullcontext(local) if reason else hosts(NUM_HOSTS + 1, BYTE_S) as sites:
        where = reason or f"{NUM_HOSTS} hosts at 50 MB/s each"
        yield from _network(folder, sites, (16 if quick else 64) << 20, repeats, where)
    yield from _files(folder, (64 if quick else 256) << 20, 3 if quick else 7)


def _ours(chain: Chain, weights: Weights, site: Site) -> float:
    master = chain.members[0].address
    with inside(site):
        chunk_bytes = best_chunk_bytes(master, TOKEN, UID, 1, weights.num_bytes) or 1 << 20
        began_s = time.monotonic()
        manifest, buffer = weights.next(chunk_bytes)
        hand_over(master, TOKEN, UID, 1, manifest, buffer)
    return max(chain.completed(manifest.version)) - began_s


def _network(folder: Path, sites: Sequence[Site], num_bytes: int, repeats: int, where: str) -> Iterator[Line]:
    source, others = sites[0], sites[1:]
    weights = Weights(num_bytes)
    ours: list[float] = []
    took: dict[str, list[float]] = {"redis": [], "http": []}
    missing = ""
    readers = peers.Readers(others, num_bytes)
    with relays(folder, len(others), sites=others) as chain:
        gloo = peers.Gloo(sites, num_bytes, repeats)
        chain.join(chain.nodes)
        for _ in range(WARM_UP):
            _ours(chain, weights, source)
        for _ in range(repeats):
            ours.append(_ours(chain, weights, source))
            buffer = weights.next(1 << 20)[1]
            with peers.http_server(source, buffer) as place:
                took["http"].append(peers.by_http(place, readers, buffer))
            try:
                with peers.redis_server(source, folder):
                    took["redis"].append(peers.by_redis(source, readers, buffer))
            except peers.Missing as error:
                missing = str(error)
    readers.close()
    took["gloo"] = gloo.run()
    for name, times in took.items():
        if not times:
            yield Line(f"speed_vs_{name}", None, "x", ">= 1", ok=False, reference=missing)
            continue
        reference = f"{num_bytes >> 20} MiB, {where}; {name} {listed(times, 2)} s, ours {listed(ours, 2)} s"
        yield at_least(f"speed_vs_{name}", median(times) / median(ours), "x", 1, reference)


def _files(folder: Path, num_bytes: int, repeats: int) -> Iterator[Line]:
    """On one machine without limits, where a shared folder is at its best: in memory."""
    weights, site = Weights(num_bytes), Site()
    readers = peers.Readers([site] * NUM_HOSTS, num_bytes)
    ours, files = [], []
    with (
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else folder) as shared,
        relays(folder, NUM_HOSTS) as chain,
    ):
        chain.join(chain.nodes)
        for _ in range(repeats + WARM_UP):
            ours.append(_ours(chain, weights, site))
            files.append(peers.by_files(Path(shared), readers, weights.next(1 << 20)[1]))
        del ours[:WARM_UP], files[:WARM_UP]
    readers.close()
    reference = (
        f"{num_bytes >> 20} MiB to {NUM_HOSTS}, one machine; files {listed(files, 2)} s, ours {listed(ours, 2)} s"
    )
    yield at_least("speed_vs_files", median(files) / median(ours), "x", 1, reference)
