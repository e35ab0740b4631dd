"""On links of 5 ms a message: does the chain keep the time of the formula, and the trainer its, whatever the length?

p nodes are the trainer and p - 1 relays. T*(p) is `laminar.core.broadcast.best_s`: with the best number of chunks, and
with nothing in the world but the links.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relay_parts.lines import NUM_CORES_SHARE, Line, Stopwatch, at_most, listed, median
from relay_parts.links import Interface, LinkSpeed
from relay_parts.nodes import TOKEN, UID, Chain, Weights, relays

from laminar.core.broadcast import best_num_chunks, best_s, pipeline_s
from laminar.shell.handover import best_chunk_bytes, hand_over

SPEED = LinkSpeed(byte_s=1 / 50e6, message_s=5e-3)
STALL_SPEED = LinkSpeed(byte_s=1 / 15e6, message_s=5e-3)
"""Slower, so that the few bytes that sixteen relays of a test machine can hold take as long as many: a hand-over in k
chunks costs k T_s, which counts for little only beside a long W T_b (two seconds here; 65 GB at 10 GB/s take seven)."""
NUM_RELAYS = 16
WARM_UP = 2
"""Versions: of one alone, the slowest first exchange of fifteen links would count."""
SWEEP_NODES = 8
SWEEP = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Times the formula's chunk count."""


@dataclass
class Paced:
    """A trainer and its chain on paced links."""

    chain: Chain
    weights: Weights
    speed: LinkSpeed
    cpu_shares: list[float] = field(default_factory=list[float])
    busiest: float = 0.0
    """The highest median of them for one length of the chain."""

    def __post_init__(self) -> None:
        self.interface = Interface(self.speed)

    def join(self, num_relays: int) -> None:
        """The first of them. Returns when nobody has to catch up any more."""
        self.chain.join(self.chain.nodes[:num_relays], tell=self.chain.nodes)
        if self.weights.version:
            self.chain.completed(self.weights.version)

    def chunk_bytes(self) -> int:
        """What the product chooses; 1 MiB before it has measured its links."""
        master = self.chain.members[0].address
        asked = best_chunk_bytes(master, TOKEN, UID, 1, self.weights.num_bytes, dial=self.interface.dial)
        return asked or 1 << 20

    def best_s(self) -> float:
        return best_s(len(self.chain.members) + 1, self.weights.num_bytes, self.speed.byte_s, self.speed.message_s)

    def stall(self, chunk_bytes: int) -> tuple[int, float, float]:
        """One hand-over: (version, when it began, how long it took)."""
        manifest, buffer = self.weights.next(chunk_bytes)
        master = self.chain.members[0].address
        began_s = time.monotonic()
        hand_over(master, TOKEN, UID, 1, manifest, buffer, dial=self.interface.dial)
        return manifest.version, began_s, time.monotonic() - began_s

    def broadcast(self, chunk_bytes: int) -> float:
        """Seconds from the first byte until the last relay holds all."""
        cpu_s, watch = self.chain.cpu_s(), Stopwatch()
        version, began_s, _ = self.stall(chunk_bytes)
        ended_s = max(self.chain.completed(version))
        self.cpu_shares.append((self.chain.cpu_s() - cpu_s) / watch.s / (os.cpu_count() or 1))
        return ended_s - began_s


def broadcasts(folder: Path, *, quick: bool) -> Iterator[Line]:
    """One version at a time."""
    with relays(folder, NUM_RELAYS, SPEED) as chain:
        scene = Paced(chain, Weights((32 if quick else 64) << 20), SPEED)
        scene.join(NUM_RELAYS)
        for _ in range(WARM_UP):
            scene.broadcast(scene.chunk_bytes())
        yield from formula(scene, (1, 1, 1) if quick else (7, 7, 7))
        yield chunks(scene, (0.5, 1.0, 2.0) if quick else SWEEP, repeats=1 if quick else 5)
        yield at_most(
            "paced_cpu_share", scene.busiest, "of all cores", NUM_CORES_SHARE,
            f"median with {NUM_RELAYS - 1} relays; single versions up to {max(scene.cpu_shares):.3f}",
        )  # fmt: skip


def formula(scene: Paced, repeats_each: Sequence[int]) -> Iterator[Line]:
    for num_nodes, repeats in zip((16, 8, 4), repeats_each, strict=True):
        scene.join(num_nodes - 1)
        chunk_bytes = scene.chunk_bytes()
        best = scene.best_s()
        took = [scene.broadcast(chunk_bytes) for _ in range(repeats)]
        share = median(scene.cpu_shares[-repeats:])
        scene.busiest = max(scene.busiest, share)
        num_bytes = scene.weights.num_bytes
        num_chunks = -(-num_bytes // chunk_bytes)
        cut_s = pipeline_s(num_nodes, num_bytes, scene.speed.byte_s, scene.speed.message_s, num_chunks)
        reference = (
            f"{num_bytes >> 20} MiB: {listed(took)} s; T* {best:.3f} s, {cut_s:.3f} s with the {num_chunks} chunks "
            f"chosen; CPU {share:.0%} of all cores"
        )
        yield at_most(f"paced_p{num_nodes}_over_tstar", median(took) / best, "x", 1.1, reference)


def chunks(scene: Paced, sweep: Sequence[float], repeats: int) -> Line:
    scene.join(SWEEP_NODES - 1)
    num_bytes = scene.weights.num_bytes
    ideal = best_num_chunks(SWEEP_NODES, num_bytes, scene.speed.byte_s, scene.speed.message_s)
    chosen = -(-num_bytes // scene.chunk_bytes())
    counts = sorted({chosen, *(max(1, round(ideal * factor)) for factor in sweep)})
    took: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            took[count].append(scene.broadcast(-(-num_bytes // count)))
    best = min(counts, key=lambda count: median(took[count]))
    each = ", ".join(f"{count}: {median(took[count]):.3f} s" for count in counts)
    reference = f"p = {SWEEP_NODES}, chosen {chosen}, best {best}, formula {ideal:.1f}; {each}"
    return at_most("chunks_vs_best", median(took[chosen]) / median(took[best]), "x", 1.1, reference)


def stalls(folder: Path, *, quick: bool) -> Iterator[Line]:
    """Back to back: while a version is handed over the one before still travels down the chain."""
    stalled: dict[int, list[float]] = {}
    over: dict[int, float] = {}
    repeats = 2 if quick else 6
    with relays(folder, NUM_RELAYS, STALL_SPEED) as chain:
        scene = Paced(chain, Weights(32 << 20), STALL_SPEED)
        for num_relays in (NUM_RELAYS, 1) if quick else (NUM_RELAYS, 4, 1):
            scene.join(num_relays)
            cpu_s, watch = chain.cpu_s(), Stopwatch()
            chunk_bytes = scene.chunk_bytes()
            # Nothing is forwarded yet while the first is handed over; a single relay never forwards.
            handed = [scene.stall(chunk_bytes) for _ in range(repeats + 1 if num_relays > 1 else max(1, repeats // 2))]
            stalled[num_relays] = [took_s for _, _, took_s in handed[num_relays > 1 :]]
            ends = [max(chain.completed(version)) - began_s for version, began_s, _ in handed]
            over[num_relays] = median(ends) / scene.best_s()
            scene.cpu_shares.append((chain.cpu_s() - cpu_s) / watch.s / (os.cpu_count() or 1))
    each = "; ".join(f"{num} relays: {listed(took)} s" for num, took in sorted(stalled.items()))
    reference = f"32 MiB back to back on 15 MB/s, {each}; CPU up to {max(scene.cpu_shares):.0%} of all cores"
    ratio = median(stalled[NUM_RELAYS]) / median(stalled[1])
    yield at_most("stall_ratio_16_over_1", ratio, "x", 1.1, reference)
    ratios = ", ".join(f"{num} relays: {value:.3f}" for num, value in sorted(over.items()))
    yield at_most("stall_completion_over_tstar", over[NUM_RELAYS], "x", 1.2, f"median of a run; {ratios}")
