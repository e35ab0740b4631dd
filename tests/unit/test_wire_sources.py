"""Sources: recipes are replaced by what they made, relative paths start at the job file."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.wire.job_file import parse_job
from laminar.wire.sources import NotResolved, absolute, local_path, recipes_of, with_recipes
from laminar.wire.spec import LaminarJob

JOB = """\
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {name: toy}
spec:
  steps: 3
  model: {source: recipe://tiny}
  data: {train: {source: file:../data.jsonl}}
  evaluations:
    - {name: a, source: 'recipe://held'}
    - {name: b, source: file:/abs/x.jsonl}
    - {name: c, source: 'recipe://tiny'}
  rewards: [{name: f, type: python, function: ../code/r.py:score}]
"""
MADE = {"tiny": Path("/cache/tiny"), "held": Path("/cache/./held.jsonl")}


def job() -> LaminarJob:
    return parse_job(JOB, "job.yaml")


def test_recipes_are_named_once_in_order() -> None:
    assert recipes_of(job()) == ["tiny", "held"]


def test_sources_and_functions_become_absolute_and_stay_so() -> None:
    moved = absolute(job(), Path("/base/jobs"))
    assert moved.spec.model.source == "recipe://tiny"
    assert local_path(moved.spec.data.train.source) == Path("/base/data.jsonl")
    assert moved.spec.rewards[0].function == "/base/code/r.py:score"
    assert absolute(moved, Path("/elsewhere")) == moved


def test_recipes_become_the_files_that_they_made() -> None:
    made = with_recipes(job(), MADE)
    assert local_path(made.spec.model.source) == Path("/cache/tiny")
    assert [item.source for item in made.spec.evaluations] == [
        "file:/cache/held.jsonl", "file:/abs/x.jsonl", "file:/cache/tiny",
    ]  # fmt: skip
    assert recipes_of(made) == []
    with pytest.raises(KeyError, match="held"):
        with_recipes(job(), {"tiny": Path("/cache/tiny")})


@pytest.mark.parametrize("source", ["recipe://tiny", "file:relative/path", "/no/scheme"])
def test_a_source_that_is_not_resolved_has_no_path(source: str) -> None:
    with pytest.raises(NotResolved, match="not resolved"):
        local_path(source)
