"""A job without any model: emulated engines and an emulated trainer, all else real, as `laminar run` starts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

STEPS = 4
JOB = f"""
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {{name: emulated}}
spec:
  steps: {STEPS}
  model: {{source: recipe://placeholder-model}}
  data: {{train: {{source: recipe://placeholder-prompts}}}}
  rewards: [{{name: answer, type: exact}}]
  sampling: {{maxResponseTokens: 256}}
  algorithm: {{promptsPerStep: 8, samplesPerPrompt: 8}}
  trainer:
    type: emulated
    gpusPerReplica: 8
    checkpoint: {{everySteps: 2, keep: 2}}
    emulated: {{stallSeconds: 0.64, broadcastSeconds: 0.8}}
  rollout:
    replicas: 2
    gpusPerReplica: 4
    engine:
      type: emulated
      emulated: {{stepOverheadSeconds: 0.003, lengths: {{medianTokens: 1600, p99OverMedian: 10}}}}
  emulation:
    timeScale: 60
    tokenGrain: 64
    model: {{numParameters: 32.8e+9, numHiddenLayers: 64, numAttentionHeads: 40, numKeyValueHeads: 8, headDim: 128,
             hiddenSize: 5120}}
    gpu: {{memoryBytes: 80.0e+9, memoryBytesPerSecond: 3.35e+12, flopsPerSecond: 989.0e+12,
           linkBytesPerSecond: 200.0e+9, hostBytesPerSecond: 64.0e+9}}
"""


def test_an_emulated_job_completes_with_a_clean_audit_and_without_torch(make_job: Callable[..., Any]) -> None:
    job = make_job(JOB).start()
    job.wait_step(1)
    assert not job.pids("torch"), "an emulated job starts no process with torch in its command"
    report = job.assert_complete_and_clean(STEPS)
    assert report["consumed"] == STEPS * 8 * 8
    rows = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["stats"]["emulated_train_s"] == pytest.approx(60 * row["stats"]["train_s"]) for row in rows)
    assert (job.folder / "model" / "tokenizer.json").is_file()


def test_an_emulated_trainer_that_dies_goes_on_from_its_checkpoint(make_job: Callable[..., Any]) -> None:
    job = make_job(JOB.replace(f"steps: {STEPS}", "steps: 8")).start()
    job.wait_step(3)
    job.kill(job.process("-m laminar.trainer.emulated_rank"))
    report = job.assert_complete_and_clean(8)
    assert report["consumed"] == 8 * 8 * 8


def test_a_dead_emulated_engine_is_replaced_and_nothing_is_lost_or_counted_twice(make_job: Callable[..., Any]) -> None:
    job = make_job(JOB).start()
    job.wait_step(1)
    job.kill(job.process("laminar.rollout.emulated_engine", "LAMINAR_SLOT=rollout-0"))
    report = job.assert_complete_and_clean(STEPS)
    assert report["consumed"] == STEPS * 8 * 8
