"""Without a limit of the links: what a relay adds to the plain copying and hashing of bytes. Interleaved with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from relay_parts.lines import Line, at_least, at_most, listed, median
from relay_parts.nodes import TOKEN, UID, Weights, relays
from relay_parts.raw import pump

from laminar.shell.handover import hand_over

CHUNK_BYTES = 8 << 20
"""Near what relays choose here for 256 MiB; their choice itself varies from run to run with the load of the machine."""
PUMP_BYTES = 1 << 20
"""The pump's own chunks: what it hashes and sends still lies in the core's cache."""
WARM_UP = 3
"""Versions: each slot has been written to once, as every slot has in a job that goes on."""


def measure(folder: Path, *, quick: bool) -> Iterator[Line]:
    weights = Weights((128 if quick else 256) << 20)
    repeats = 5 if quick else 15
    gigabytes = weights.num_bytes / 1e9
    with (
        pump(2, weights.num_bytes, hashes=True) as raw,
        pump(1, weights.num_bytes, hashes=False) as copy,
        relays(folder, 2) as chain,
    ):
        relay, tail = chain.nodes
        chain.join([relay, tail])

        def publish() -> tuple[float, float, float]:
            """Seconds of the hand-over, until the tail has it, and of the first relay's CPU."""
            manifest, buffer = weights.next(CHUNK_BYTES)
            cpu_s, began_s = relay.ask("cpu_s"), time.monotonic()
            hand_over(relay.address, TOKEN, UID, 1, manifest, buffer)
            handed_s = time.monotonic() - began_s
            ended_s = max(chain.completed(manifest.version))
            return handed_s, ended_s - began_s, relay.ask("cpu_s") - cpu_s

        for _ in range(WARM_UP):
            publish()
            raw.send(weights.next(PUMP_BYTES)[1], PUMP_BYTES)
        ours, plain = [], []
        for _ in range(repeats):
            ours.append(publish())
            plain.append(raw.send(weights.next(PUMP_BYTES)[1], PUMP_BYTES))
        our_cpu = [cpu_s / gigabytes for _, _, cpu_s in ours]
        raw_cpu = [cpu_s[0] / gigabytes for _, cpu_s in plain]
        yield at_most(
            "hop_cpu_vs_raw", median(our_cpu) / median(raw_cpu), "x", 1.3,
            f"{median(our_cpu):.3f} and {median(raw_cpu):.3f} CPU s/GB; best {min(our_cpu):.3f}, {min(raw_cpu):.3f}",
        )  # fmt: skip
        our_speed = [gigabytes / took_s for _, took_s, _ in ours]
        raw_speed = [gigabytes / took_s for took_s, _ in plain]
        yield at_least(
            "hop_vs_raw", median(our_speed) / median(raw_speed), "x", 0.8,
            f"{median(our_speed):.2f} and {median(raw_speed):.2f} GB/s through one hop; {listed(our_speed, 2)}",
        )  # fmt: skip
        chain.join([relay], tell=chain.nodes)
        ours, plain = [], []
        for _ in range(repeats):
            ours.append(publish()[0])
            plain.append(copy.send(weights.next(PUMP_BYTES)[1], PUMP_BYTES)[0])
        yield at_least(
            "stall_vs_raw_copy", median(plain) / median(ours), "x", 0.7,
            f"{gigabytes / median(ours):.2f} and {gigabytes / median(plain):.2f} GB/s; best "
            f"{gigabytes / min(ours):.2f}, {gigabytes / min(plain):.2f}",
        )  # fmt: skip
