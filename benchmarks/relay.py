"""The relay tier, measured: is it as fast as its links, whatever its length, and soon well after a fault?

    python benchmarks/relay.py --quick                        under 50 seconds
    python benchmarks/relay.py                                longer, with more repeats
    python benchmarks/relay.py --only hop_vs_raw,epoch_s      only these (with `--quick`: a few seconds)

One JSON line a quantity: {"bench","metric","value","unit","target","reference","ok"}. Ratios are measured in one run,
their two sides in turn; values are medians. Links of a chosen speed are emulated (see relay_parts/links.py); the race
beside other ways to move weights uses network namespaces where it may (see relay_parts/hosts.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import relay_soak
from relay_parts import beside, faults, handing, hop, paced, services
from relay_parts.lines import Line, at_most

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = ROOT / "tests" / "sim" / "test_chain_faults.py"
NUM_SCHEDULES = 10_000
SCHEDULES_S = 60.0
QUICK_SCHEDULES_S = 1.0


def soak(folder: Path, *, quick: bool) -> Iterator[Line]:
    """A part of `relay_soak.py`; the whole of it takes half an hour."""
    del folder
    sizes = ((200, 1 << 20, 64 << 10),) if quick else ((2000, 64 << 10, 8 << 10), (40, 16 << 20, 1 << 20))
    mixed, found, made, kills, stops = 0, [], 0, 0, 0
    for num, num_bytes, chunk_bytes in sizes:
        tally, leaks, published, _ = relay_soak.soak(num, num_bytes, chunk_bytes, 1, 2.0 if quick else 90.0)
        mixed, kills, stops = mixed + tally.mixed, kills + tally.kills, stops + tally.stops
        made, found = made + published, found + leaks
    under = f"{made} publications, {kills} kills, {stops} stops; all of it: benchmarks/relay_soak.py"
    yield at_most("soak_mixed_versions", mixed, "reads", 0, under)
    yield at_most("soak_leaks", len(found), "things", 0, "; ".join(found) or under)


def schedules(folder: Path, *, quick: bool) -> Iterator[Line]:
    """Seeded fault schedules of the chain's state machine, the ones of the tests."""
    del folder
    spec = importlib.util.spec_from_file_location("chain_faults", SCHEDULES)
    assert spec is not None and spec.loader is not None
    simulation = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = simulation
    spec.loader.exec_module(simulation)
    began_s, done, broken = time.monotonic(), 0, ""
    while done < NUM_SCHEDULES and time.monotonic() - began_s < (QUICK_SCHEDULES_S if quick else SCHEDULES_S):
        try:
            simulation.run(done)
        except AssertionError as error:
            broken = f"seed {done}: {error}"
            break
        done += 1
    took_s = time.monotonic() - began_s
    in_time = round(done / took_s * SCHEDULES_S) if quick else done
    unit = "schedules, at this rate, in 60 s" if quick else "schedules within 60 s"
    reference = broken or f"{done} in {took_s:.1f} s, invariants after each event"
    ok = in_time >= NUM_SCHEDULES and not broken
    yield Line("sim_schedules", in_time, unit, f">= {NUM_SCHEDULES}", ok, reference)


@dataclass(frozen=True)
class Part:
    """What is measured together."""

    measure: Callable[..., Iterator[Line]]
    metrics: tuple[str, ...]


PARTS = (
    Part(faults.bypass_after_kill, ("bypass_kill_ms",)),
    Part(faults.bypass_after_stop, ("bypass_stop_ms",)),
    Part(faults.master_failover, ("master_failover_s",)),
    Part(paced.stalls, ("stall_ratio_16_over_1", "stall_completion_over_tstar")),
    Part(
        paced.broadcasts,
        ("paced_p4_over_tstar", "paced_p8_over_tstar", "paced_p16_over_tstar", "chunks_vs_best", "paced_cpu_share"),
    ),
    Part(hop.measure, ("hop_vs_raw", "hop_cpu_vs_raw", "stall_vs_raw_copy")),
    Part(handing.measure, ("handoff_vs_memcpy",)),
    Part(services.next_epoch, ("epoch_s",)),
    Part(services.memory, ("memory_ratio",)),
    Part(beside.measure, ("speed_vs_gloo", "speed_vs_redis", "speed_vs_http", "speed_vs_files")),
    Part(soak, ("soak_mixed_versions", "soak_leaks")),
    Part(schedules, ("sim_schedules",)),
)
METRICS = tuple(metric for part in PARTS for metric in part.metrics)
BESIDE_FAULTS = "stall_ratio_16_over_1,stall_completion_over_tstar"
"""Two waits, for slow links and for time-outs, leave the cores nearly idle: in the quick form they go on together."""


def run(wanted: set[str], *, quick: bool, times: bool) -> None:
    for part in PARTS:
        if wanted.isdisjoint(part.metrics):
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            for line in part.measure(Path(folder), quick=quick):
                if line.metric in wanted:
                    print(line, flush=True)
        if times:
            print(f"{part.measure.__name__}: {time.monotonic() - began_s:.1f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="metrics, with commas between")
    parser.add_argument("--times", action="store_true", help="on stderr, how long each part takes")
    args = parser.parse_args()
    wanted = set(args.only.split(",")) if args.only else set(METRICS)
    if unknown := wanted - set(METRICS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(METRICS)}")
    if args.only or not args.quick:
        run(wanted, quick=args.quick, times=args.times)
        return
    command = [sys.executable, __file__, "--quick", "--only", BESIDE_FAULTS]
    with subprocess.Popen(command) as stalls:
        waits = {"bypass_kill_ms", "bypass_stop_ms", "master_failover_s"}
        run(waits, quick=True, times=args.times)
        assert stalls.wait() == 0, "the stalls could not be measured"
    run(wanted - waits - set(BESIDE_FAULTS.split(",")), quick=True, times=args.times)


if __name__ == "__main__":
    main()
