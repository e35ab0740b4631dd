"""The embedded run, measured: does it learn, how fast is it, what does it lose, what does it cost when idle?

    python benchmarks/embedded.py --quick        one seed, cached warm-up, under 4 minutes
    python benchmarks/embedded.py                three seeds, a first run with an empty cache, kills, idle cost
    python benchmarks/embedded.py --peer trl     time to +0.3 training reward beside TRL's GRPOTrainer

One JSON line a quantity: {"bench","metric","value","unit","target","reference","ok"}. Ratios are measured in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "arithmetic.yaml"
LAMINAR = (sys.executable, "-m", "laminar.cli")
PACE = threading.Event()
"""Never set: `PACE.wait(s)` paces measurements."""
REWARD_STEPS = 5
"""Single steps are noisy: means over the first and last five are compared."""
GAIN = 0.3
PEER_REQUIREMENTS = ("trl==1.16.0", "transformers==5.24.0", "torch==2.13.0", "numpy==2.4.6", "datasets==5.2.0")


def emit(metric: str, value: float, unit: str, target: str, *, ok: bool, reference: str = "") -> None:
    line = dict(bench="embedded", metric=metric, value=round(value, 4), unit=unit, target=target)
    print(json.dumps({**line, "reference": reference, "ok": ok}), flush=True)


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **extra}


@dataclass(frozen=True)
class Finished:
    """A run that ended: its rows and how long everything took."""

    folder: Path
    wall_s: float
    steps: list[dict[str, Any]]
    result: dict[str, Any]
    first_lease_wall_s: float

    @property
    def reward_gain(self) -> float:
        rewards = [row["reward_mean"] for row in self.steps]
        return mean(rewards[-REWARD_STEPS:]) - mean(rewards[:REWARD_STEPS])

    def heldout(self, point: str, mode: str) -> dict[str, Any]:
        rows = [r for r in self.result["evaluations"] if (r["point"], r["mode"]) == (point, mode)]
        assert len(rows) == 1, f"{len(rows)} rows of {point}/{mode} in {self.result['evaluations']}"
        return rows[0]

    @property
    def heldout_gain(self) -> float:
        return self.heldout("last", "sampled")["mean"] - self.heldout("first", "sampled")["mean"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def train(folder: Path, *arguments: str, **variables: str) -> Finished:
    """One `laminar run` of the example, to its end. Raises CalledProcessError if it fails."""
    started_s = time.monotonic()
    command = [*LAMINAR, "run", str(JOB), "--run", str(folder), "--json", *arguments]
    done = subprocess.run(command, env=environment(**variables), stdout=subprocess.PIPE, text=True, check=True)
    wall_s = time.monotonic() - started_s
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    statuses = [line for line in lines if line["type"] == "status"]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    return Finished(folder, wall_s, steps, result, float(statuses[-1]["first_lease_wall_s"]))


def audit_violations(folder: Path) -> int:
    done = subprocess.run([*LAMINAR, "audit", str(folder), "--json"], env=environment(), capture_output=True, text=True)
    violations = json.loads(done.stdout)["violations"]
    assert (done.returncode == 0) == (not violations), "the exit code and the report disagree"
    return len(violations)


def learning(seeds: list[int], scratch: Path) -> list[Finished]:
    runs = [train(scratch / f"seed-{seed}", "--set", f"data.seed={seed}") for seed in seeds]
    for seed, run in zip(seeds, runs, strict=True):
        first, last = run.heldout("first", "sampled"), run.heldout("last", "sampled")
        greedy = f"greedy {run.heldout('first', 'greedy')['mean']:.3f} -> {run.heldout('last', 'greedy')['mean']:.3f}"
        interval = (
            f"{first['mean']:.3f} +- {1.96 * first['stderr']:.3f} -> {last['mean']:.3f} +- {1.96 * last['stderr']:.3f}"
        )
        emit(
            "heldout_gain", run.heldout_gain, "pass@1", ">= 0.15", ok=run.heldout_gain >= 0.15,
            reference=f"seed {seed}: {interval} (95 %), {first['num_items']} items; {greedy}",
        )  # fmt: skip
    gains = [run.reward_gain for run in runs]
    if len(gains) > 1:
        ok = mean(gains) >= GAIN and min(gains) >= 0.2
        each = ", ".join(f"{gain:.3f}" for gain in gains)
        emit("reward_gain", mean(gains), "reward", ">= 0.3 mean of 3 seeds, each >= 0.2", ok=ok, reference=each)
    else:
        emit("reward_gain", gains[0], "reward", ">= 0.2 (one seed)", ok=gains[0] >= 0.2)
    walls = [run.wall_s for run in runs]
    emit("cached_wall_s", max(walls), "s", "< 150", ok=max(walls) < 150, reference=f"{len(runs[0].steps)} steps")
    violations = sum(audit_violations(run.folder) for run in runs)
    emit("audit_violations", violations, "violations", "0", ok=violations == 0)
    return runs


def first_run(scratch: Path) -> None:
    """Nothing cached: data, tokenizer and warm-up are made first."""
    run = train(scratch / "first", LAMINAR_CACHE=str(scratch / "cache"))
    emit("first_wall_s", run.wall_s, "s", "< 300", ok=run.wall_s < 300)


def seconds_to_gain(rewards: list[float], times_s: list[float]) -> float | None:
    """When the 5-step mean reached the first 5-step mean + 0.3; None: never."""
    goal = mean(rewards[:REWARD_STEPS]) + GAIN
    for end in range(2 * REWARD_STEPS, len(rewards) + 1):
        if mean(rewards[end - REWARD_STEPS : end]) >= goal:
            return times_s[end - 1]
    return None


def recipe(name: str, seed: int = 0) -> Path:
    command = [sys.executable, "-m", "laminar.recipes", "build", name, "--seed", str(seed)]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True)
    return Path(json.loads(done.stdout.splitlines()[-1])["path"])


def peer_python() -> Path:
    """TRL's own environment, made once in the cache with the uv of `make setup`."""
    folder = Path(os.environ.get("LAMINAR_CACHE", Path.home() / ".cache" / "laminar")) / "peers" / PEER_REQUIREMENTS[0]
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        uv = str(ROOT / ".tools" / "bin" / "uv")
        subprocess.run([uv, "venv", "--clear", "-q", "-p", sys.executable, str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *PEER_REQUIREMENTS], check=True)
        (folder / ".ready").touch()
    return python


def beside_trl(scratch: Path, seed: int, num_steps: int) -> None:
    """The same warm-up model, data, reward and numbers, one after the other on the same two cores."""
    ours = train(scratch / "ours", "--set", f"data.seed={seed}", "--set", f"steps={num_steps}")
    ours_s = seconds_to_gain(
        [row["reward_mean"] for row in ours.steps], [row["wall_s"] - ours.first_lease_wall_s for row in ours.steps]
    )
    command = [peer_python(), ROOT / "benchmarks" / "peers" / "trl_grpo.py", "--model", recipe("arithmetic-tiny")]
    command += ["--data", recipe("chain-sum", seed), "--steps", str(num_steps), "--threads", "2", "--seed", str(seed)]
    variables = environment(OMP_NUM_THREADS="2")
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    trl_s = seconds_to_gain([row["reward"] for row in rows], [row["t_s"] for row in rows])
    detail = f"ours {ours_s} s, TRL {trl_s} s to +{GAIN} over {num_steps} steps, seed {seed}"
    if ours_s is None or trl_s is None:
        emit("time_to_reward_vs_trl", 0.0, "x", ">= 3", ok=False, reference=f"{detail}: one never reached it")
    else:
        emit("time_to_reward_vs_trl", trl_s / ours_s, "x", ">= 3", ok=trl_s >= 3 * ours_s, reference=detail)


class LiveRun:
    """A `laminar run` that is disturbed or watched while it goes on."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        command = [*LAMINAR, "run", str(JOB), "--run", str(folder), "--quiet", *arguments]
        self.driver = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [*LAMINAR, "status", str(self.folder), "--json"], env=environment(), capture_output=True, text=True
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def wait_step(self, step: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        deadline_s = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert time.monotonic() < deadline_s and self.driver.poll() is None, f"step {step} was not reached"
            PACE.wait(0.2)

    def pids(self, command: str) -> list[int]:
        """Processes of this run whose command line contains `command`."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() if entry.name.isdigit() else ""
                if command in line and f"{self.folder}/".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


def after_kills(scratch: Path) -> None:
    """kill -9 of one process of each kind in one run: trajectories that the books cannot account for."""
    run = LiveRun(scratch / "kills", "--set", "trainer.checkpoint.everySteps=5")
    victims = [
        "laminar.rollout ",
        "laminar.rollout.torch_engine",
        "laminar.relay",
        "laminar.pool",
        "laminar.trainer.rank",
    ]
    for number, victim in enumerate(victims):
        run.wait_step(5 + 8 * number)
        os.kill(run.pids(victim)[0], signal.SIGKILL)
    code = run.driver.wait(300)
    lost = audit_violations(run.folder) + (code != 0)
    emit("lost_after_kills", lost, "violations", "0", ok=lost == 0, reference=f"killed: {', '.join(victims)}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cost(scratch: Path, window_s: float = 10.0) -> None:
    """With the trainer stopped, back-pressure makes everybody else wait; what does waiting cost?"""
    run = LiveRun(scratch / "idle")
    try:
        run.wait_step(3)
        ranks = run.pids("laminar.trainer.rank")
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        PACE.wait(15.0)  # until every started group has ended
        services = ("laminar.pool", "laminar.relay", "laminar.rollout ")
        pids = {service: run.pids(service) for service in services}
        before = {pid: cpu_s(pid) for group in pids.values() for pid in group}
        PACE.wait(window_s)
        shares = {
            service.strip(): max(100 * (cpu_s(pid) - before[pid]) / window_s for pid in group)
            for service, group in pids.items()
        }
        worst = max(shares.values())
        each = ", ".join(f"{service} {share:.1f}" for service, share in shares.items())
        emit("idle_cpu_pct", worst, "% of a core", "< 2", ok=worst < 2, reference=each)
    finally:
        run.driver.kill()
        run.driver.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed with the cached warm-up")
    parser.add_argument("--peer", choices=["trl"], help="only the race beside a peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80, help="steps of the race beside a peer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        scratch = Path(name)
        if arguments.peer:
            beside_trl(scratch, arguments.seed, arguments.steps)
            return
        for recipe_name in ("arithmetic-tiny", "chain-sum", "chain-sum-heldout"):
            recipe(recipe_name)
        learning([arguments.seed] if arguments.quick else [0, 1, 2], scratch)
        idle_cost(scratch)
        if not arguments.quick:
            after_kills(scratch)
            first_run(scratch)


if __name__ == "__main__":
    main()
