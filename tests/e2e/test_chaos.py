"""One whole job under a random schedule of kill -9 and STOP/CONT of all its processes, its driver included.

The schedule comes from a seed, which is printed; LAMINAR_CHAOS_SEED takes another one. What each fault meets depends
on timing, so a seed gives the same faults at the same moments, not the same run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

SEED = int(os.environ.get("LAMINAR_CHAOS_SEED", "11"))
STEPS = 80
NUM_EVAL_PROMPTS = 256
"""Some seconds of evaluation: long enough to be hit."""
NUM_FIRST, NUM_MIDDLE, NUM_LAST = 3, 7, 2
"""Strikes during the start and the first evaluation, during the steps, and during the last evaluation."""
JOB = f"""
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {{name: chaos}}
spec:
  steps: {STEPS}
  model: {{source: recipe://arithmetic-tiny}}
  data: {{train: {{source: recipe://chain-sum, promptField: question, answerField: answer}}}}
  evaluations:
    - {{name: sums, source: "file:EVAL", promptField: question, answerField: answer, samplesPerPrompt: 1}}
  rewards: [{{name: answer, type: exact, extract: {{tag: answer}}}}]
  sampling: {{maxResponseTokens: 160}}
  algorithm: {{loss: grpo, promptsPerStep: 4, samplesPerPrompt: 8, learningRate: 1.0e-4}}
  trainer: {{replicas: 1, backoffLimit: 20, checkpoint: {{everySteps: 5, keep: 3}}}}
  rollout: {{replicas: 2, engine: {{type: torch}}}}
"""
VICTIMS = {
    "rollout-0": ("-m laminar.rollout ", "LAMINAR_SLOT=rollout-0"),
    "rollout-1": ("-m laminar.rollout ", "LAMINAR_SLOT=rollout-1"),
    "engine of rollout-0": ("laminar.rollout.torch_engine", "LAMINAR_SLOT=rollout-0"),
    "engine of rollout-1": ("laminar.rollout.torch_engine", "LAMINAR_SLOT=rollout-1"),
    "a grader": ("laminar.rollout.grader", ""),
    "relay-0": ("-m laminar.relay ", "LAMINAR_SLOT=relay-0"),
    "relay-1": ("-m laminar.relay ", "LAMINAR_SLOT=relay-1"),
    "pool": ("-m laminar.pool ", ""),
    "torchrun": ("torch.distributed.run", ""),
    "rank": ("-u -m laminar.trainer.rank", ""),
    "trainer's agent": ("-m laminar.trainer ", ""),
}
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Strike:
    """`pause_s` after the one before and after `step` was committed (None: after the last evaluation has begun).
    `sleep_s` None: kill -9; else STOP, and CONT after so long."""

    victim: str
    step: int | None
    pause_s: float
    sleep_s: float | None


def schedule(seed: int) -> list[Strike]:
    """Each victim once before any comes twice."""
    rng = random.Random(seed)
    first = [(0, rng.uniform(0.3, 7.0)) for _ in range(NUM_FIRST)]
    middle = [(step, rng.uniform(0.0, 1.5)) for step in sorted(rng.sample(range(STEPS), NUM_MIDDLE))]
    last = [(None, rng.uniform(0.0, 0.5)) for _ in range(NUM_LAST)]
    deck: list[str] = []
    strikes: list[Strike] = []
    for step, pause_s in [*first, *middle, *last]:
        deck = deck or rng.sample([*VICTIMS, DRIVER], len(VICTIMS) + 1)
        victim = deck.pop()
        sleeps = victim != DRIVER and rng.random() < 0.4
        strikes.append(Strike(victim, step, pause_s, rng.uniform(0.5, 6.0) if sleeps else None))
    return strikes


@dataclass
class Chaos:
    """Strikes a run; wakes whom it stopped."""

    job: Any
    started_s: float = field(default_factory=time.monotonic)
    log: list[str] = field(default_factory=list)
    sleepers: list[tuple[float, int]] = field(default_factory=list)

    def strike(self, strike: Strike) -> None:
        status = self.job.status(0.5)
        where = f"{status['phase']} at step {status['committed_step']}" if status else "without a pool"
        at = f"{time.strftime('%H:%M:%S')} {time.monotonic() - self.started_s:6.1f} s, {where}: "
        if strike.victim == DRIVER:
            self.job.kill(self.job.driver.pid)
            self.job.driver.wait(10)
            self._say(at + "driver killed and started again")
            self.job.start()
            return
        # A driver that is starting has not named its job yet.
        found = self.job.pids(*VICTIMS[strike.victim]) if (self.job.folder / "job.json").exists() else []
        if not found:
            self._say(at + f"{strike.victim} is not there")
            return
        try:
            handle = os.pidfd_open(found[0])
        except ProcessLookupError:
            return
        if strike.sleep_s is None:
            self._send(handle, signal.SIGKILL)
            os.close(handle)
            self._say(at + f"{strike.victim} killed (pid {found[0]})")
        else:
            self._send(handle, signal.SIGSTOP)
            self.sleepers.append((time.monotonic() + strike.sleep_s, handle))
            self._say(at + f"{strike.victim} stopped for {strike.sleep_s:.1f} s (pid {found[0]})")

    def wake(self, *, all_: bool = False) -> None:
        now_s = time.monotonic()
        for entry in [entry for entry in self.sleepers if all_ or entry[0] <= now_s]:
            self.sleepers.remove(entry)
            self._send(entry[1], signal.SIGCONT)
            os.close(entry[1])

    def _send(self, handle: int, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass

    def _say(self, text: str) -> None:
        self.log.append(text)
        print(text, flush=True)


def until_due(job: Any, chaos: Chaos, due: Callable[[], bool]) -> bool:
    """Waits until `due`, waking sleepers meanwhile; False: the run ended before."""
    while not due():
        chaos.wake()
        try:
            job.driver.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        return False
    return True


def has_reached(job: Any, step: int | None) -> bool:
    status = job.status(0.5)
    if status is None:
        return step == 0
    return status["phase"] == "evaluatingLast" if step is None else status["committed_step"] >= step


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """Sums that the model can answer, as a file."""
    rng = random.Random(0)
    rows: list[dict[str, str]] = []
    for _ in range(NUM_EVAL_PROMPTS):
        first, second = rng.randint(1, 4), rng.randint(1, 5)
        question = f"State the final answer to the following arithmetic problem: {first} + {second} =\n"
        rows.append({"question": question, "answer": str(first + second)})
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_under_random_kills_and_stops_completes_with_balanced_books(
    make_job: Callable[..., Any], evaluation: Path
) -> None:
    print(f"LAMINAR_CHAOS_SEED={SEED}", flush=True)
    job = make_job(JOB.replace("EVAL", str(evaluation)))
    job.start()
    chaos = Chaos(job)
    for strike in schedule(SEED):
        if not until_due(job, chaos, lambda strike=strike: has_reached(job, strike.step)):
            break
        due_s = time.monotonic() + strike.pause_s
        if not until_due(job, chaos, lambda due_s=due_s: time.monotonic() >= due_s):
            break
        chaos.strike(strike)
    until_due(job, chaos, lambda: not chaos.sleepers)
    chaos.wake(all_=True)
    job.assert_complete_and_clean(STEPS)
    print(f"{time.monotonic() - chaos.started_s:.1f} s", flush=True)
