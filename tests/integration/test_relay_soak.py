"""A small part of the soak: publications under kills, stops, leaves and slow readers, on real relay processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "relay_soak.py"


@pytest.mark.parametrize("seed", [11, 12])
def test_under_churn_no_read_is_mixed_nothing_leaks_and_the_last_version_is_everywhere(seed: int) -> None:
    command = [sys.executable, str(SOAK), "--small", "400", "--large", "12", "--limit-s", "30", "--seed", str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert all(line["ok"] for line in lines), (lines, ended.stderr)
    seen = {line["metric"]: line["value"] for line in lines}
    assert (seen["soak_small_publications"], seen["soak_large_publications"]) == (400, 12)
    assert seen["soak_small_kills"] + seen["soak_small_stops"] + seen["soak_small_leaves"] > 0
    assert (seen["soak_mixed_versions"], seen["soak_leaks"]) == (0, 0)
