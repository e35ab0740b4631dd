"""`python -m laminar.recipes` as the driver calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.recipes import smollm2
from laminar.recipes.errors import RecipeError


def recipes(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laminar.recipes", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_build_prints_one_json_line_with_a_path_and_the_second_build_finds_it(tmp_path: Path) -> None:
    made = [recipes("build", "one-digit-sums", "--cache", str(tmp_path), "--seed", "3") for _ in range(2)]
    lines = [json.loads(run.stdout) for run in made]
    assert [run.returncode for run in made] == [0, 0]
    assert [set(line) for line in lines] == [{"name", "kind", "path", "cached", "seconds"}] * 2
    assert [line["cached"] for line in lines] == [False, True]
    assert lines[0]["path"] == lines[1]["path"] and lines[0]["kind"] == "data"
    rows = [json.loads(row) for row in Path(lines[0]["path"]).read_text().splitlines()]
    assert {"question", "prompt", "answer"} == set(rows[0])


def test_chain_sum_rows_have_a_question_an_answer_and_their_number_of_terms(tmp_path: Path) -> None:
    made = json.loads(recipes("build", "chain-sum-heldout", "--cache", str(tmp_path)).stdout)
    rows = [json.loads(row) for row in Path(made["path"]).read_text().splitlines()]
    assert len(rows) >= 500
    assert set(rows[0]) == {"question", "answer", "num_terms"} and isinstance(rows[0]["answer"], str)


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    run = recipes("build", "chain-sums")
    assert (run.returncode, run.stdout) == (2, "")
    assert "Did you mean chain-sum?" in run.stderr and "Traceback" not in run.stderr


def test_a_cache_that_cannot_be_written_is_refused_in_one_paragraph() -> None:
    run = recipes("build", "one-digit-sums", "--cache", "/dev/null/cache")
    assert run.returncode == 2
    assert "--cache DIR" in run.stderr and "Traceback" not in run.stderr


def test_list_names_every_recipe() -> None:
    names = {json.loads(line)["name"] for line in recipes("list").stdout.splitlines()}
    assert {"arithmetic-tiny", "chain-sum", "chain-sum-heldout", "smollm2-135m", "one-digit-sums"} <= names


def test_too_little_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(RecipeError, match=r"needs 3.0 GB of free memory, and there are 1.5 GB"):
        smollm2.require_room("memory", available_bytes=1_500_000_000, needed_bytes=3_000_000_000)


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(RecipeError, match=r"not-there-at-all.*make setup-smollm2"):
        smollm2.require_packages(["json", "not_there_at_all"])
