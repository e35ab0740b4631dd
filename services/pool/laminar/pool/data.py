"""Prompt files: JSONL or parquet, one prompt a row, as they come from the wild.

A row without a prompt or without an answer is skipped and counted; a file that cannot be meant so is one sentence
that names the file, the row and the column.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from laminar.wire.sources import local_path

MISSING_PROMPT, MISSING_ANSWER = "missingPrompt", "missingAnswer"
_COLUMNS_SHOWN = 12
_ABSENT = object()


class DataError(ValueError):
    """A data file that cannot be used; the text is one paragraph for people."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """`row` counts from 1, as editors do. A chat prompt is a tuple of messages."""

    row: int
    prompt: str | tuple[Message, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class PromptTable:
    """The usable rows in file order, and why others were left out."""

    path: Path
    rows: list[PromptRow]
    skipped: Counter[str] = field(default_factory=Counter[str])


def read_prompts(source: str, prompt_field: str, answer_field: str) -> PromptTable:
    """All usable rows of `file:PATH`. Dots in a field go into nested columns. Raises DataError."""
    path = local_path(source)
    if not path.is_file():
        raise DataError(f"the data file {path} does not exist{_is_folder(path)}.")
    table = PromptTable(path, [])
    columns: dict[str, None] = {}
    num_rows, found = 0, {prompt_field: False, answer_field: False}
    for number, row in _rows(path, (prompt_field, answer_field)):
        num_rows += 1
        prompt, answer = _value(row, prompt_field), _value(row, answer_field)
        found[prompt_field] |= prompt is not _ABSENT
        found[answer_field] |= answer is not _ABSENT
        if num_rows <= _COLUMNS_SHOWN:
            columns.update(dict.fromkeys(_paths(row)))
        usable = _prompt(prompt, path, number, prompt_field)
        text = _answer(answer, path, number, answer_field)
        if not usable:
            table.skipped[MISSING_PROMPT] += 1
        elif not text:
            table.skipped[MISSING_ANSWER] += 1
        else:
            table.rows.append(PromptRow(number, usable, text))
    if num_rows == 0:
        raise DataError(f"the data file {path} is empty: it has no row.")
    for name, is_there in found.items():
        if not is_there:
            raise DataError(_no_column(path, name, list(columns)))
    if not table.rows:
        raise DataError(
            f"the data file {path} has no usable row: of {num_rows} rows, {table.skipped[MISSING_PROMPT]} have no "
            f"prompt in '{prompt_field}' and {table.skipped[MISSING_ANSWER]} no answer in '{answer_field}'."
        )
    return table


def _is_folder(path: Path) -> str:
    if not path.is_dir():
        return ""
    files = sorted(p.name for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
    return f" as a file: it is a folder; name one of its files ({', '.join(files) or 'none is jsonl or parquet'})"


# --- formats ----------------------------------------------------------------------------------------------------


def _rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson" | ".json":
            return _jsonl_rows(path)
        case ".parquet":
            return _parquet_rows(path, fields)
        case _:
            raise DataError(f"the data file {path} is neither .jsonl nor .parquet.")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                hint = " It looks like one JSON document; JSONL has one object a line." if number == 1 else ""
                raise DataError(f"{path}, row {number}: not a JSON object ({error}).{hint}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: a {type(row).__name__} where a JSON object was expected.")
            yield number, cast(dict[str, Any], row)


def _parquet_rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Reads only the columns that are needed, if they are there."""
    import pyarrow.parquet  # here: 20 MB and 0.3 s that a JSONL job does not need

    try:
        file: Any = pyarrow.parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path} cannot be read as a parquet file: {error}.") from error
    names: list[str] = list(file.schema_arrow.names)
    wanted = {name for name in names for field_ in fields if name in (field_, field_.split(".")[0])}
    if any(field_ not in names and field_.split(".")[0] not in names for field_ in fields):
        wanted = set(names)  # the error will name what is there
    number = 0
    for batch in file.iter_batches(columns=sorted(wanted)):
        for row in cast(list[dict[str, Any]], batch.to_pylist()):
            number += 1
            yield number, row


# --- values -----------------------------------------------------------------------------------------------------


def _value(row: Mapping[str, Any], field_: str) -> object:
    """The value at a dotted path; a column whose own name has dots comes first."""
    if field_ in row:
        return row[field_]
    value: object = row
    for part in field_.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = cast(Mapping[str, object], value)[part]
    return value


def _prompt(value: object, path: Path, row: int, field_: str) -> str | tuple[Message, ...]:
    """Empty for a row to skip."""
    if value is _ABSENT or value is None:
        return ""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list):
        return tuple(_message(item, path, row, field_) for item in cast(list[object], value))
    raise DataError(
        f"{path}, row {row}, column '{field_}': a {type(value).__name__} where a string or a list of chat messages "
        f"({{role, content}}) was expected."
    )


def _message(value: object, path: Path, row: int, field_: str) -> Message:
    none: Mapping[str, object] = {}
    turn = cast(Mapping[str, object], value) if isinstance(value, Mapping) else none
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{path}, row {row}, column '{field_}': each chat message needs the strings 'role' and 'content'; "
            f"found {json.dumps(value, default=str)[:80]}."
        )
    return Message(role, content)


def _answer(value: object, path: Path, row: int, field_: str) -> str:
    """Empty for a row to skip. Numbers and booleans are written as JSON does."""
    if value is _ABSENT or value is None:
        return ""
    if isinstance(value, str):
        return value.strip() and value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise DataError(
        f"{path}, row {row}, column '{field_}': a {type(value).__name__} where a string or a number was expected."
    )


def _paths(row: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for name, value in row.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(cast(Mapping[str, Any], value), f"{prefix}{name}.")


def _no_column(path: Path, name: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.5) or [
        column for column in columns if column.split(".")[-1] == name.split(".")[-1]
    ]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    shown = ", ".join(columns[:_COLUMNS_SHOWN]) + (", ..." if len(columns) > _COLUMNS_SHOWN else "")
    return f"no row of the data file {path} has a column '{name}'.{hint} Its columns: {shown}."
