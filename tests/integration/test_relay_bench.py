"""The relay benchmark still runs and measures; what it measures is not judged here, where others use the cores."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "relay.py"
ONLY = ("hop_cpu_vs_raw", "hop_vs_raw", "stall_vs_raw_copy", "bypass_kill_ms")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_part_of_the_benchmark_prints_one_line_a_quantity() -> None:
    done = run("--quick", "--only", ",".join(ONLY))
    assert done.returncode == 0, done.stderr
    lines = {line["metric"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(lines) == set(ONLY)
    for line in lines.values():
        assert set(line) == {"bench", "metric", "value", "unit", "target", "reference", "ok"}
        assert line["bench"] == "relay"
        assert line["value"] > 0
    # Far from any limit: a hop that costs five times the copying, or a chain that does not recover, is no noise.
    assert lines["hop_cpu_vs_raw"]["value"] < 5
    assert lines["bypass_kill_ms"]["value"] < 2000


def test_an_unknown_quantity_is_named() -> None:
    done = run("--only", "hop_vs_rawr")
    assert done.returncode == 2
    assert "hop_vs_rawr" in done.stderr
