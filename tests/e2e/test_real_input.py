"""Inputs as people have them, end to end: other layouts, models, rewards, schedules and trainer sizes than the
example's, and every command on the finished run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

pytestmark = pytest.mark.timeout(240)

DAPO = """
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {{name: dapo}}
spec:
  steps: 2
  model: {{source: "file:{models}/chat"}}
  data: {{train: {{source: "file:dapo.parquet", promptField: prompt, answerField: reward_model.ground_truth}}}}
  evaluations: [{{name: held-out, source: "file:heldout.jsonl"}}]
  rewards:
    - {{name: right, type: math}}
    - {{name: brief, type: python, function: "rewards.py:short", weight: 0.1}}
  sampling: {{maxResponseTokens: 24}}
  algorithm: {{promptsPerStep: 4, samplesPerPrompt: 4, miniBatchTrajectories: 4, learningRate: 1.0e-3}}
  trainer: {{checkpoint: {{everySteps: 1, keep: 2}}}}
  rollout: {{replicas: 1}}
  loggers: {{tensorboard: {{}}}}
"""
SYNCHRONOUS = """
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {{name: on-policy}}
spec:
  steps: 3
  model: {{source: "file:{models}/plain"}}
  data: {{train: {{source: "file:words.jsonl", promptField: question.text, answerField: answer}}}}
  rewards:
    - {{name: short, type: python, function: "rewards.py:short", weight: 0.5}}
    - {{name: begins, type: python, function: "rewards.py:begins"}}
  sampling: {{maxResponseTokens: 12, temperature: 0.8}}
  algorithm: {{promptsPerStep: 4, samplesPerPrompt: 4}}
  schedule: {{type: synchronous}}
  trainer: {{replicas: 2}}
  rollout: {{replicas: 2}}
"""
REWARDS = """
from words import FIRST

def short(prompt, response, answer):
    return 1.0 / (1 + len(response))

def begins(prompt, response, answer):
    return float(response[:1] in FIRST)
"""
WORDS = "FIRST = frozenset('abcdefghijklmnopqrstuvwxyz')\n"


def write_dapo(path: Path) -> None:
    """The columns of DAPO-Math-17k."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"Solve step by step: what is {n} + {n}?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"row-{n}"},
        }
        for n in range(24)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def steps_of(job: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]


def answer(laminar: Callable[..., subprocess.CompletedProcess[str]], *arguments: object) -> str:
    done = laminar(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chat_model_trains_on_the_layout_of_dapo_math_and_every_command_shows_the_run(
    make_job: Callable[..., Any], tiny_models: Path, laminar: Any, tmp_path: Path
) -> None:
    job = make_job(DAPO.format(models=tiny_models))
    write_dapo(job.job_file.parent / "dapo.parquet")
    (job.job_file.parent / "rewards.py").write_text(REWARDS)
    (job.job_file.parent / "words.py").write_text(WORDS)
    row = {"prompt": "What is 1 + 1?", "answer": 2}
    (job.job_file.parent / "heldout.jsonl").write_text(json.dumps(row) + "\n")
    assert "is valid: dapo, 2 steps" in answer(laminar, "validate", job.job_file)
    job.start()
    job.assert_complete_and_clean(2)

    rows = steps_of(job)
    assert [row["num_samples"] for row in rows] == [16, 16]
    # Four a step; one whose only group has equal rewards has nothing to learn from.
    assert all(2 <= row["stats"]["updates"] <= 4 for row in rows), [row["stats"] for row in rows]
    evaluations = {(row["name"], row["mode"], row["point"]) for row in job.output[-1]["evaluations"]}
    assert evaluations == {("held-out", mode, point) for mode in ("sampled", "greedy") for point in ("first", "last")}
    assert list((job.folder / "tensorboard").glob("events.out.tfevents.*"))

    status = json.loads(answer(laminar, "status", job.folder, "--json"))
    assert status["phase"] == "complete" and len(status["reward_curve"]) == 2 and not status["counts"]["open"], status
    shown = [json.loads(line) for line in answer(laminar, "samples", job.folder, "--step", 2, "--json").splitlines()]
    assert shown and all(item["prompt"].startswith("<|user|>Solve step by step") for item in shown)
    assert all(item["prompt"].endswith("<|end|><|assistant|>") for item in shown)
    assert "checkpoint written" in answer(laminar, "logs", job.folder, "trainer-0")
    report = tmp_path / "report.html"
    answer(laminar, "report", job.folder, "--out", report)
    assert "Solve step by step" in report.read_text()
    for step in (1, 2):
        out = tmp_path / f"step-{step}"
        answer(laminar, "export", job.folder, "--to", out, "--step", step)
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {path.name for path in out.iterdir()}
    assert (tmp_path / "step-2" / "model.safetensors").read_bytes() == (
        job.folder / "model" / "model.safetensors"
    ).read_bytes()
    refused = laminar("export", job.folder, "--to", tmp_path / "none", "--step", 7)
    assert refused.returncode == 2 and "keeps no checkpoint of step 7. Kept: 1, 2." in refused.stderr


def test_the_synchronous_schedule_has_no_staleness_on_two_ranks_with_python_rewards(
    make_job: Callable[..., Any], tiny_models: Path
) -> None:
    job = make_job(SYNCHRONOUS.format(models=tiny_models))
    folder = job.job_file.parent
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "words.py").write_text(WORDS)
    rows = [{"question": {"text": f"word {n}"}, "answer": n % 2 == 0} for n in range(20)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job.start()
    job.assert_complete_and_clean(3)
    for row in steps_of(job):
        assert row["num_samples"] == 16
        assert row["inherent"] == {"0": 16} and row["consumed"] == {"0": 16}, row
        assert 0 < row["reward_mean"] <= 1.5
    assert "model sharded over 2 ranks" in (job.folder / "logs" / "trainer-0.log").read_text()
