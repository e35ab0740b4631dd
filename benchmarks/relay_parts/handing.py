"""Relay -> engine on one machine: a version that the relay holds already, into the engine's own memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from relay_parts.lines import Line, at_most, listed, median
from relay_parts.nodes import FORK, TOKEN, UID, Weights, relays

from laminar.shell.handoff import open_version
from laminar.shell.handover import hand_over
from laminar.shell.process import die_with_parent

CHUNK_BYTES = 4 << 20


def _engine(pipe: Connection, num_bytes: int) -> None:
    """Copies the newest version into its model, and another buffer of its own, turn by turn."""
    die_with_parent()
    model = memoryview(mmap.mmap(-1, num_bytes))
    other = memoryview(mmap.mmap(-1, num_bytes))
    # Every page has been there once, as in an engine that has loaded before.
    model[:] = other
    while (ask := pipe.recv()) is not None:
        handoff, version = ask
        began_s = time.perf_counter()
        with open_version(handoff, TOKEN, UID, version) as held:
            held.check()
            model[:] = held.tensor("w")
            held.check()
        loaded_s = time.perf_counter() - began_s
        assert model[:8] == version.to_bytes(8, "little")
        other[:8] = model[8:16]
        began_s = time.perf_counter()
        model[:] = other
        pipe.send((loaded_s, time.perf_counter() - began_s))
    os._exit(0)


def measure(folder: Path, *, quick: bool) -> Iterator[Line]:
    num_bytes = (128 if quick else 256) << 20
    ours, theirs = FORK.Pipe()
    engine = FORK.Process(target=_engine, args=(theirs, num_bytes), daemon=True)
    engine.start()
    theirs.close()
    with relays(folder, 1) as chain:
        weights = Weights(num_bytes)
        chain.join(chain.nodes)
        took: list[tuple[float, float]] = []
        for _ in range(5 if quick else 12):
            manifest, buffer = weights.next(CHUNK_BYTES)
            hand_over(chain.nodes[0].address, TOKEN, UID, 1, manifest, buffer)
            chain.completed(manifest.version)
            ours.send((chain.nodes[0].handoff, manifest.version))
            took.append(ours.recv())
    ours.send(None)
    engine.join()
    loads_ms, copies_ms = ([1e3 * each for each in column] for column in zip(*took, strict=True))
    yield at_most(
        "handoff_vs_memcpy", median(loads_ms) / median(copies_ms), "x", 1.5,
        f"{num_bytes >> 20} MiB, open + copy + checks {listed(loads_ms, 0)} ms, one memcpy {listed(copies_ms, 0)} ms",
    )  # fmt: skip
