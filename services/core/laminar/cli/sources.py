"""From the sources that a job names to files that are there: recipes are made, files are checked.

Everything that can be known cheaply is checked before any process starts; the pool and the trainer check the rest
(every row, every tensor) and end with exit code 2.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from laminar.cli.errors import BadInput
from laminar.shell.process import child_environment
from laminar.wire.sources import is_file, local_path, recipes_of, with_recipes
from laminar.wire.spec import Evaluation, LaminarJob, Reward, TrainData

Report = Callable[[str], None]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""All read as one JSON object a line."""
MAX_RECIPE_LINE_BYTES = 2**20


async def resolve(job: LaminarJob, report: Report) -> LaminarJob:
    """The absolute job with every recipe made and named by its file. Raises BadInput with the recipe's own words."""
    names = recipes_of(job)
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_make(name, report)) for name in names}
    made: dict[str, Path] = {}
    for name, task in tasks.items():
        outcome = task.result()
        if not isinstance(outcome, Path):
            raise BadInput(outcome)
        made[name] = outcome
    return with_recipes(job, made)


def check(job: LaminarJob) -> None:
    """Every `file:` source and reward function of the job is there and has the right form. Raises BadInput.

    Recipes are passed over: what they make is right by construction.
    """
    spec = job.spec
    if is_file(spec.model.source):
        check_model(local_path(spec.model.source))
    for data in (spec.data.train, *spec.evaluations):
        if is_file(data.source):
            check_data(local_path(data.source), data)
    for reward in spec.rewards:
        if reward.function is not None:
            check_function(reward)


def check_model(folder: Path) -> None:
    """A Hugging Face model folder that the engine, the trainer and the pool can read."""
    if not folder.is_dir():
        raise BadInput(
            f"spec.model.source: there is no folder {folder}. It must be a Hugging Face model folder with config.json, "
            "tokenizer.json and weights."
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            hint = (
                " Save one with a fast tokenizer: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
                if name == "tokenizer.json"
                else ""
            )
            raise BadInput(f"spec.model.source: the model folder {folder} has no {name}.{hint}")
        try:
            whole = isinstance(json.loads((folder / name).read_bytes()), dict)
        except ValueError:
            whole = False
        if not whole:
            raise BadInput(f"spec.model.source: {folder / name} is not a JSON object. Copy or download it again.")
    if not any(True for _ in weight_files(folder)):
        raise BadInput(f"spec.model.source: the model folder {folder} has no weights (*.safetensors).")


def weight_files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def check_data(path: Path, data: TrainData | Evaluation) -> None:
    """The file is there, has a row, and its first row (its schema) has both columns."""
    where = f"evaluation '{data.name}'" if isinstance(data, Evaluation) else "spec.data.train"
    if path.is_dir():
        raise BadInput(f"{where}: {path} is a folder; name the file in it.")
    if not path.is_file():
        raise BadInput(f"{where}: there is no file {path}.")
    if path.suffix.lower() not in (*JSON_SUFFIXES, ".parquet"):
        raise BadInput(f"{where}: {path} is neither .jsonl nor .parquet; convert it to one of them.")
    if path.stat().st_size == 0:
        raise BadInput(f"{where}: the file {path} is empty.")
    columns = _parquet_columns(path, where) if path.suffix.lower() == ".parquet" else _jsonl_columns(path, where)
    for option, name in (("promptField", data.prompt_field), ("answerField", data.answer_field)):
        if name not in columns:
            near = difflib.get_close_matches(name, sorted(columns), n=1, cutoff=0.5) or [
                column for column in sorted(columns) if column.rpartition(".")[2] == name.rpartition(".")[2]
            ]
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise BadInput(
                f"{where}.{option}: the file {path} has no column '{name}'.{hint} "
                f"It has: {', '.join(sorted(columns)) or 'none'}."
            )


def check_function(reward: Reward) -> None:
    """`file.py:name`: the file can be parsed and defines the name."""
    assert reward.function is not None
    text, _, name = reward.function.rpartition(":")
    path = Path(text)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise BadInput(f"reward '{reward.name}': {path} cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"reward '{reward.name}': {path} is not valid Python: {error}.") from error
    names = set(_defined_names(tree))
    if name not in names:
        raise BadInput(
            f"reward '{reward.name}': {path} defines no '{name}'. It defines: {', '.join(sorted(names)) or 'nothing'}."
        )


async def _make(name: str, report: Report) -> Path | str:
    """The path that the recipe made, or why there is none."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "laminar.recipes", "build", name,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=child_environment(), limit=MAX_RECIPE_LINE_BYTES,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    last_error = ""
    try:
        async with asyncio.TaskGroup() as group:
            printed = group.create_task(process.stdout.read())
            async for line in process.stderr:
                text = line.decode(errors="replace").strip()
                if text:
                    last_error = text
                    report(f"{name}: {text}")
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = printed.result().decode().splitlines()
    if code != 0 or not lines:
        return last_error or f"The recipe '{name}' ended with exit code {code} and said nothing."
    return Path(str(json.loads(lines[-1])["path"]))


def _jsonl_columns(path: Path, where: str) -> set[str]:
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = cast(object, json.loads(line))
            except ValueError as error:
                raise BadInput(f"{where}: the first row of {path} is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise BadInput(f"{where}: the first row of {path} is not a JSON object.")
            return set(_dotted("", cast(object, row)))
    raise BadInput(f"{where}: the file {path} has no rows.")


def _dotted(prefix: str, value: object) -> Iterator[str]:
    """The columns of a row, also those inside objects: `reward_model.ground_truth`."""
    if prefix:
        yield prefix
    if isinstance(value, dict):
        for key, inner in cast(dict[str, object], value).items():
            yield from _dotted(f"{prefix}.{key}" if prefix else key, inner)


def _parquet_columns(path: Path, where: str) -> set[str]:
    # Only parquet needs it, and it takes a third of a second to import.
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            num_rows, fields = int(file.metadata.num_rows), list(file.schema_arrow)
    except arrow.ArrowException as error:
        raise BadInput(f"{where}: the file {path} is not a parquet file ({str(error).rstrip('.')}).") from error
    if num_rows == 0:
        raise BadInput(f"{where}: the file {path} has no rows.")
    return {name for field in fields for name in _arrow_names("", field)}


def _arrow_names(prefix: str, field: Any) -> Iterator[str]:
    name = f"{prefix}.{field.name}" if prefix else str(field.name)
    yield name
    # A struct has its fields inside; in other types `num_fields` counts something else or is 0.
    if str(field.type).startswith("struct<"):
        for index in range(int(field.type.num_fields)):
            yield from _arrow_names(name, field.type.field(index))


def _defined_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case _:
                continue
