"""What is wrong with a job, in sentences: the path, the value, what is allowed, and the nearest right name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic_core import ErrorDetails

from laminar.wire.job_yaml import Place
from laminar.wire.spec import LaminarJob

Schema = Mapping[str, Any]

PATTERN_WORDS = {
    r"^[a-z]([-a-z0-9]*[a-z0-9])?$": "lower-case letters, digits and dashes that begin with a letter",
    r"^(file:|recipe://)": "text that begins with file: or recipe://, as in file:data/train.jsonl",
    r"^[A-Za-z][\w-]*$": "the name of a tag without its brackets, as in answer",
    r"^.+\.py:[A-Za-z_]\w*$": "a Python file and the name of a function in it, as in rewards.py:score",
}
"""Every pattern of the spec, in words (a test holds the two together)."""
_SHOWN_CHARS = 60


def path_text(place: Sequence[str | int]) -> str:
    """`spec.evaluations.0.name`: the form that --set takes."""
    return ".".join(str(part) for part in place)


@cache
def _root() -> dict[str, Any]:
    return LaminarJob.model_json_schema(by_alias=True)


def _resolved(schema: Schema) -> Schema:
    """Follows a reference, and takes the value's side of `X | None`; keeps the keys written beside them."""
    while True:
        if "$ref" in schema:
            target = _root()["$defs"][str(schema["$ref"]).rpartition("/")[2]]
            schema = {**target, **{key: value for key, value in schema.items() if key not in ("$ref", "default")}}
        elif "anyOf" in schema:
            real = [option for option in schema["anyOf"] if option.get("type") != "null"]
            rest = {key: value for key, value in schema.items() if key != "anyOf"}
            schema = {**real[0], **rest, "nullable": True}
        else:
            return schema


def schema_at(place: Sequence[str | int]) -> Schema | None:
    """The JSON schema of a field; None where the spec has no such field."""
    schema = _resolved(_root())
    for part in place:
        if schema.get("type") == "array":
            schema = _resolved(schema["items"])
        elif part in schema.get("properties", {}):
            schema = _resolved(schema["properties"][part])
        else:
            return None
    return schema


@cache
def all_paths() -> tuple[str, ...]:
    """Every field of a job in camelCase; list items are `*`."""
    return tuple(_paths(_resolved(_root()), ""))


def _paths(schema: Schema, prefix: str) -> Iterator[str]:
    if schema.get("type") == "array":
        yield from _paths(_resolved(schema["items"]), prefix + "*.")
        return
    for name, inner in schema.get("properties", {}).items():
        yield prefix + name
        yield from _paths(_resolved(inner), f"{prefix}{name}.")


def allowed(schema: Schema) -> str:
    """What a field takes, in words."""
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    match schema.get("type"):
        case "integer":
            return "a whole number" + _range(schema)
        case "number":
            return "a number" + _range(schema)
        case "boolean":
            return "true or false"
        case "string":
            return _text(schema)
        case "array":
            return "a list" + _count(schema)
        case _:
            return "a section with the fields " + ", ".join(schema.get("properties", {}))


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and low == high:
        return f" that is {low:g}"
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    limits = {"above": above, "of at least": low, "below": below, "up to": high}
    return "".join(f" {word} {_number(limit)}" for word, limit in limits.items() if limit is not None)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _text(schema: Schema) -> str:
    pattern, longest = schema.get("pattern"), schema.get("maxLength")
    words = "text" if pattern is None else PATTERN_WORDS.get(pattern, f"text that matches {pattern}")
    return words if longest is None else f"{words} (at most {longest} characters)"


def _count(schema: Schema) -> str:
    low, high = schema.get("minItems"), schema.get("maxItems")
    return "" if high is None else f" of {low or 0} to {high} entries"


def unknown_field(place: Place) -> str:
    """For a name that the spec does not have: what it has there, and the nearest right name."""
    *parent, name = place
    section = schema_at(parent) or {}
    names = list(section.get("properties", {}))
    where = path_text(parent) or "a job"
    return f"{where} has no field '{name}'.{_suggestion(str(name), names)} Its fields are: {', '.join(names)}."


def _suggestion(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(_folded(name), [_folded(known) for known in names], n=1, cutoff=0.7)
    if near:
        return f" Did you mean '{next(known for known in names if _folded(known) == near[0])}'?"
    elsewhere = {_folded(path.rpartition(".")[2]): path for path in reversed(all_paths())}
    near = difflib.get_close_matches(_folded(name), list(elsewhere), n=1, cutoff=0.8)
    return f" Did you mean {elsewhere[near[0]]}?" if near else ""


def _folded(name: str) -> str:
    """Case and separators are where people slip most; they must not hide the right name."""
    return name.lower().replace("_", "").replace("-", "")


def sentence(error: ErrorDetails) -> tuple[Place, str]:
    """Where an error of pydantic stands, and one sentence about it."""
    place: Place = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return place, unknown_field(place)
    schema = schema_at(place) or {}
    about = f" ({schema['description']})" if "description" in schema else ""
    if error["type"] == "missing":
        return place, f"{path_text(place)} is missing. It must be {allowed(schema)}.{about}"
    if error["type"] == "value_error":
        return place, f"{path_text(place) or 'the job'}: {error['msg'].removeprefix('Value error, ')}."
    value = shown(error["input"])
    return (
        place,
        f"{path_text(place) or 'a job'} is {value}. It must be {allowed(schema)}{_hint(error, schema)}.{about}",
    )


def _hint(error: ErrorDetails, schema: Schema) -> str:
    value = error["input"]
    if schema.get("type") == "string" and isinstance(value, (int, float)):
        return "; put the value in quotes"
    if schema.get("type") in ("integer", "number") and isinstance(value, str):
        return ", without quotes" if value.replace(".", "", 1).isdigit() else ""
    if "enum" in schema and isinstance(value, str):
        near = difflib.get_close_matches(value.lower(), [str(known) for known in schema["enum"]], n=1)
        return f"; the nearest is {near[0]}" if near else ""
    return ""


def shown(value: Any) -> str:
    """A value as people wrote it, cut to a readable length."""
    if value is None:
        return "empty"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
