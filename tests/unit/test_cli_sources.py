"""What a seed changes of what a job makes for itself: the training data, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.cli import sources
from laminar.cli.errors import BadInput
from laminar.wire.spec import LaminarJob


def job(seed: int, train: str = "recipe://one-digit-sums") -> LaminarJob:
    spec = {
        "steps": 1,
        "model": {"source": "file:/models/m"},
        "data": {"train": {"source": train}, "seed": seed},
        "evaluations": [{"name": "heldout", "source": "recipe://one-digit-sums-heldout"}],
        "rewards": [{"name": "answer", "type": "exact"}],
    }
    return LaminarJob.model_validate({"metadata": {"name": "sums"}, "spec": spec})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINAR_CACHE", str(tmp_path))
    return tmp_path


def made(job: LaminarJob) -> tuple[Path, Path]:
    """Training and held-out file of the resolved job."""
    spec = asyncio.run(sources.resolve(job, lambda line: None)).spec
    train, heldout = spec.data.train.source, spec.evaluations[0].source
    return Path(train.removeprefix("file:")), Path(heldout.removeprefix("file:"))


def test_training_data_follow_the_seed_and_held_out_questions_do_not() -> None:
    (first, heldout), (again, _), (other, same) = made(job(1)), made(job(1)), made(job(2))
    assert first == again and first.read_text() != other.read_text()
    assert heldout == same


def test_a_recipe_that_is_not_there_is_refused_in_its_own_words_wherever_it_stands() -> None:
    with pytest.raises(BadInput, match="There is no recipe 'one-digit-sum'"):
        asyncio.run(sources.resolve(job(0, "recipe://one-digit-sum"), lambda line: None))


def test_training_files_of_a_persons_own_stay_what_they_are(tmp_path: Path) -> None:
    train, heldout = made(job(3, f"file:{tmp_path}/mine.jsonl"))
    assert train == tmp_path / "mine.jsonl" and heldout.is_file()
