"""Runs that people stop at awkward moments, resume, and ask more of: books stay whole, and each end is prompt."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

STEPS = 8
JOB = f"""
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {{name: stops}}
spec:
  steps: {STEPS}
  model: {{source: recipe://arithmetic-tiny}}
  data: {{train: {{source: recipe://chain-sum, promptField: question, answerField: answer}}}}
  evaluations:
    - {{name: sums, source: "file:EVAL", promptField: question, answerField: answer, samplesPerPrompt: 1}}
  rewards: [{{name: answer, type: exact, extract: {{tag: answer}}}}]
  sampling: {{maxResponseTokens: 160}}
  algorithm: {{loss: grpo, promptsPerStep: 4, samplesPerPrompt: 8, learningRate: 1.0e-4}}
  trainer: {{replicas: 1, checkpoint: {{everySteps: 3, keep: 3}}}}
  rollout: {{replicas: 2, engine: {{type: torch}}}}
"""


@pytest.fixture
def job(make_job: Callable[..., Any], tmp_path: Path) -> Any:
    rng = random.Random(0)
    path = tmp_path / "sums.jsonl"
    with path.open("w") as file:
        for _ in range(256):
            first, second = rng.randint(1, 4), rng.randint(1, 5)
            question = f"State the final answer to the following arithmetic problem: {first} + {second} =\n"
            file.write(json.dumps({"question": question, "answer": str(first + second)}) + "\n")
    return make_job(JOB.replace("EVAL", str(path)))


def in_phase(job: Any, phase: str) -> bool:
    status = job.status()
    return status is not None and status["phase"] == phase


def points(job: Any) -> set[str]:
    return {row["point"] for row in json.loads((job.folder / "result.json").read_text())["evaluations"]}


def test_a_stop_during_the_start_and_during_each_evaluation_loses_nothing(job: Any, until: Any) -> None:
    """The first stop meets processes that have not registered; the last run has its evaluations all the same."""
    job.start()
    until("the job is admitted", lambda: (job.folder / "endpoint.json").exists())
    job.driver.send_signal(signal.SIGTERM)
    assert job.wait_end(60) == 130
    job.assert_nothing_left()
    for phase in ("evaluatingFirst", "evaluatingLast"):
        job.start()
        until(phase, lambda phase=phase: in_phase(job, phase))
        job.driver.send_signal(signal.SIGINT)
        assert job.wait_end(60) == 130
        job.assert_nothing_left()
        job.audit()
    job.start()
    until("evaluatingLast", lambda: in_phase(job, "evaluatingLast"))
    job.driver.send_signal(signal.SIGINT)
    job.driver.send_signal(signal.SIGINT)
    assert job.wait_end(20) == 130
    job.assert_nothing_left()
    job.audit()
    job.start()
    job.assert_complete_and_clean(STEPS)
    assert points(job) == {"first", "last"}


def test_a_complete_run_goes_on_with_more_steps_and_back_to_a_checkpoint(job: Any) -> None:
    job.start()
    first = job.assert_complete_and_clean(STEPS)
    job.start("--set", f"steps={STEPS + 5}")
    more = job.assert_complete_and_clean(STEPS + 5)
    assert more["consumed"] == first["consumed"] + 5 * 4 * 8
    assert points(job) == {"first", "last"}
    kept = sorted(int(path.name.split("-")[1]) for path in (job.folder / "checkpoints").glob("step-*-attempt-*"))
    job.start("--set", f"steps={STEPS + 5}", "--resume-from", str(kept[0]))
    again = job.assert_complete_and_clean(STEPS + 5)
    assert again["consumed"] == more["consumed"]
    job.assert_no_alarm()
