"""Prompt files: what is read, what is skipped and counted, and what is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laminar.pool.data import DataError, Message, read_prompts


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"file:{path}"


DAPO = {
    "prompt": [{"role": "user", "content": "Solve x = 1 + 1."}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "data_source": "math",
}


def test_strings_and_numbers_are_read_in_file_order(tmp_path: Path) -> None:
    table = read_prompts(jsonl(tmp_path, {"q": "one", "a": "1"}, {"q": "two", "a": 2}), "q", "a")
    assert [(row.row, row.prompt, row.answer) for row in table.rows] == [(1, "one", "1"), (2, "two", "2")]


def test_the_column_layout_of_dapo_math_is_read_from_jsonl(tmp_path: Path) -> None:
    table = read_prompts(jsonl(tmp_path, DAPO), "prompt", "reward_model.ground_truth")
    assert table.rows[0].prompt == (Message("user", "Solve x = 1 + 1."),)
    assert table.rows[0].answer == "2"


def test_the_column_layout_of_dapo_math_is_read_from_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([DAPO, DAPO]), path)
    table = read_prompts(f"file:{path}", "prompt", "reward_model.ground_truth")
    assert [row.answer for row in table.rows] == ["2", "2"]
    assert table.rows[1].prompt == (Message("user", "Solve x = 1 + 1."),)


def test_rows_without_a_prompt_or_an_answer_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"q": "x", "a": "1"}, {"q": "", "a": "1"}, {"a": "1"}, {"q": "x"}, {"q": "x", "a": None}]
    table = read_prompts(jsonl(tmp_path, *rows), "q", "a")
    assert len(table.rows) == 1
    assert table.skipped == {"missingPrompt": 2, "missingAnswer": 2}


@pytest.mark.parametrize(
    ("rows", "fields", "says"),
    [
        ([], ("q", "a"), ["is empty"]),
        ([{"question": "x", "a": "1"}], ("questions", "a"), ["no row", "'questions'", "Did you mean 'question'?"]),
        ([DAPO], ("prompt", "ground_truth"), ["Did you mean 'reward_model.ground_truth'?"]),
        ([{"q": "", "a": "1"}], ("q", "a"), ["no usable row", "1 have no prompt"]),
        ([{"q": 7, "a": "1"}], ("q", "a"), ["row 1", "column 'q'", "a int where"]),
        ([{"q": "x", "a": "1"}, {"q": "x", "a": {}}], ("q", "a"), ["row 2", "column 'a'", "a dict where"]),
        ([{"q": [{"role": "user"}], "a": "1"}], ("q", "a"), ["row 1", "'role' and 'content'"]),
        ([[1]], ("q", "a"), ["row 1", "a list where a JSON object"]),
    ],
)
def test_a_file_that_cannot_be_meant_so_is_one_sentence(
    tmp_path: Path, rows: list[Any], fields: tuple[str, str], says: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        read_prompts(jsonl(tmp_path, *rows), *fields)
    for words in [*says, "data.jsonl"]:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_a_folder_and_an_unknown_format_are_said(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    (tmp_path / "train.csv").write_text("a,b")
    for source, words in [
        (tmp_path / "no.jsonl", "does not exist"),
        (tmp_path, "it is a folder; name one of its files (train.parquet)"),
        (tmp_path / "train.csv", "neither .jsonl nor .parquet"),
        (tmp_path / "train.parquet", "cannot be read as a parquet file"),
    ]:
        with pytest.raises(DataError) as error:
            read_prompts(f"file:{source}", "q", "a")
        assert words in str(error.value)


def test_a_json_document_in_place_of_lines_is_said(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[\n  {"q": "x"}\n]')
    with pytest.raises(DataError, match="JSONL has one object a line"):
        read_prompts(f"file:{path}", "q", "a")
