"""Job files: YAML plus overrides -> a checked LaminarJob, or every problem in one clear paragraph each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from laminar.wire.job_problems import path_text, schema_at, sentence, shown, unknown_field
from laminar.wire.job_yaml import MAX_BYTES, Document, Place, YamlError, is_list, is_section, parse, parse_value
from laminar.wire.spec import API_VERSION, KIND, LaminarJob

_TOP = ("spec", "metadata", "apiVersion", "kind")
_NAMED = re.compile(r"(?P<list>[^\[\]]+)\[(?P<name>[^\[\]]+)\]")


class JobFileError(ValueError):
    """A job that cannot be run as written; the text is one paragraph a problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n\n".join(self.problems))


def load_job(path: Path | str, overrides: Iterable[str] = ()) -> LaminarJob:
    """The job of a YAML file with `path=value` overrides applied, checked. Raises JobFileError with all problems."""
    file = Path(path)
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise JobFileError([f"{path}: there is no such file."]) from error
    except IsADirectoryError as error:
        raise JobFileError([f"{path} is a folder, not a job file."]) from error
    except OSError as error:
        raise JobFileError([f"{path} cannot be read: {error.strerror}."]) from error
    if len(data) > MAX_BYTES:
        raise JobFileError([f"{path} has {len(data)} bytes; a job file has at most {MAX_BYTES}."])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobFileError([f"{path} is not UTF-8 text (byte {error.start}); is it a job file?"]) from error
    return parse_job(text, str(path), overrides)


def parse_job(text: str, file: str, overrides: Iterable[str] = ()) -> LaminarJob:
    """As `load_job`, for text that stands in `file`."""
    try:
        document = parse(text)
    except YamlError as error:
        raise JobFileError([f"{_at(file, error.line)}: {error.sentence}."]) from error
    value = document.value
    if value is None:
        raise JobFileError([f"{file} is empty; a job file begins with 'apiVersion: {API_VERSION}'."])
    if not is_section(value):
        raise JobFileError([f"{file} holds {shown(value)}; a job file holds fields: apiVersion, kind, metadata, spec."])
    _check_kind(document, file)
    origins: dict[Place, str] = {}
    problems: list[str] = []
    for override in overrides:
        try:
            origins[_apply(override, value)] = override
        except _OverrideError as error:
            problems.append(f"--set {override}: {error}")
    if problems:
        raise JobFileError(problems)
    return _validated(document, file, origins)


def _check_kind(document: Document, file: str) -> None:
    """Another kind of document gets one sentence, not one for each of its fields."""
    problems: list[str] = []
    for name, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        given = document.value.get(name, right)
        if given != right:
            problems.append(f"{_at(file, document.lines.get((name,)))}: {name} is {shown(given)}; it must be {right}.")
    if problems:
        raise JobFileError(problems)


def _validated(document: Document, file: str, origins: Mapping[Place, str]) -> LaminarJob:
    # Through JSON, where pydantic's strict mode takes text for an enum but no text for a number.
    try:
        return LaminarJob.model_validate_json(json.dumps(document.value), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        found = [sentence(details) for details in error.errors(include_url=False)]
        found.sort(key=lambda problem: _line(problem[0], document) or 0)  # as one reads the file
        problems = [f"{_origin(place, document, file, origins)}: {text}" for place, text in found]
        raise JobFileError(dict.fromkeys(problems)) from error


def _at(file: str, line: int | None) -> str:
    return file if line is None else f"{file}, line {line}"


def _line(place: Place, document: Document) -> int | None:
    """The line of a place, else that of the nearest section around it."""
    around = (place[:length] for length in range(len(place), 0, -1))
    return next((document.lines[outer] for outer in around if outer in document.lines), None)


def _origin(place: Place, document: Document, file: str, origins: Mapping[Place, str]) -> str:
    """The override that set a place or something around it, else file and line."""
    for length in range(len(place), 0, -1):
        if place[:length] in origins:
            return f"--set {origins[place[:length]]}"
    return _at(file, _line(place, document))


class _OverrideError(Exception):
    """Why a `path=value` cannot be applied."""


def _apply(override: str, top: dict[str, Any]) -> Place:
    """Sets one `path=value` in `top`; returns the place. Raises _OverrideError."""
    path, equals, text = override.partition("=")
    names = [name for part in path.strip().split(".") for name in _split_named(part)]
    if not equals or not all(names):
        raise _OverrideError("this is not path=value, as in --set steps=10.")
    if names[0] not in _TOP:
        names.insert(0, "spec")
    try:
        value = parse_value(text)
    except YamlError as error:
        raise _OverrideError(f"the value: {error.sentence}.") from error
    target: Any = top
    place: Place = ()
    for name, following in zip(names, [*names[1:], None], strict=True):
        key = _key(target, name, place)
        place = (*place, key)
        if following is None:
            target[key] = value
        else:
            target = _inside(target, key, place, following)
    return place


def _key(target: object, name: str, place: Place) -> str | int:
    """The key or index that `name` stands for inside `target`, which stands at `place`. Raises _OverrideError."""
    if is_list(target):
        found = _entry(target, name)
        if found is None:
            raise _OverrideError(f"{path_text(place)} has no entry '{name}'; it has {_entries(target)}.")
        return found
    if not is_section(target):
        raise _OverrideError(f"{path_text(place)} is {shown(target)}, not a section with fields.")
    if schema_at((*place, name)) is None:
        raise _OverrideError(unknown_field((*place, name)))
    return name


def _inside(target: Any, key: str | int, place: Place, following: str) -> Any:
    """What stands under `key`; a section that is not there yet is made."""
    if isinstance(key, int):
        return target[key]
    if target.get(key) is None:
        if (schema_at(place) or {}).get("type") == "array":
            raise _OverrideError(f"{path_text(place)} has no entry '{following}'; it is empty.")
        target[key] = {}
    return target[key]


def _split_named(part: str) -> tuple[str, ...]:
    """`evaluations[heldout]` -> evaluations, heldout."""
    match = _NAMED.fullmatch(part)
    return (part,) if match is None else (match["list"], match["name"])


def _entry(entries: list[Any], name: str) -> int | None:
    """The index that an index or a name stands for."""
    for index, entry in enumerate(entries):
        if name == str(index) or (is_section(entry) and entry.get("name") == name):
            return index
    return None


def _entries(entries: list[Any]) -> str:
    names = [str(entry["name"]) for entry in entries if is_section(entry) and "name" in entry]
    return ", ".join(names) if names else f"{len(entries)} entries, counted from 0"


def job_digest(job: LaminarJob) -> str:
    """SHA-256 hex of the job's canonical JSON: equal for equal jobs, however their files are written."""
    canonical = json.dumps(_plain(job), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff_jobs(old: LaminarJob, new: LaminarJob) -> list[str]:
    """The changed fields, sorted: `spec.steps: 60 -> 80`. List entries are compared by position."""
    before, after = _leaves(_plain(old), ()), _leaves(_plain(new), ())
    places = sorted(before.keys() | after.keys(), key=path_text)
    return [
        f"{path_text(place)}: {_side(before, place)} -> {_side(after, place)}"
        for place in places
        if before.get(place) != after.get(place) or (place in before) != (place in after)
    ]


def is_steps_upward_only(old: LaminarJob, new: LaminarJob) -> bool:
    """Whether a run of `old` may go on as `new`: equal, or differing only in a higher `spec.steps`."""
    grown = old.model_copy(update={"spec": old.spec.model_copy(update={"steps": new.spec.steps})})
    return new.spec.steps >= old.spec.steps and grown == new


def _plain(job: LaminarJob) -> dict[str, Any]:
    return job.model_dump(mode="json", by_alias=True)


def _side(leaves: Mapping[Place, Any], place: Place) -> str:
    return shown(leaves[place]) if place in leaves else "nothing"


def _leaves(value: Any, place: Place) -> dict[Place, Any]:
    """Every scalar with its place; an empty list or section is a leaf itself."""
    if is_section(value) and value:
        return {k: v for key, item in value.items() for k, v in _leaves(item, (*place, key)).items()}
    if is_list(value) and value:
        return {k: v for index, item in enumerate(value) for k, v in _leaves(item, (*place, index)).items()}
    return {place: value}
