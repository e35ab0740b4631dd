"""The fields of a LaminarJob as Markdown tables: `python -m laminar.wire.spec_reference` prints them.

docs/spec.md ends with this text (a test holds the two together), so the models are the one source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from laminar.wire.job_problems import allowed, schema_at
from laminar.wire.spec import LaminarJob

_TOP = "document"


@dataclass(frozen=True, slots=True)
class Section:
    """Fields that stand together. `path` as in `spec.rewards[].extract`; empty: the document itself."""

    path: str
    model: type[BaseModel]
    about: str
    """The description of the field that holds it, and whether it must be there."""


def reference() -> str:
    """All sections, outer before inner, in the order of the models."""
    return "\n".join(line for section in sections() for line in _lines(section))


def sections() -> Iterator[Section]:
    """The document, then depth first."""
    yield from _within(Section("", LaminarJob, "A job file is one YAML document."))


def _within(section: Section) -> Iterator[Section]:
    yield section
    for path, info in _fields(section):
        model, is_list = _held(info.annotation)
        if model is not None:
            entries = f" {_sentence(allowed(schema_of(path)))}" if is_list else ""
            needed = " Required." if info.is_required() else ""
            about = f"{info.description}{entries}{needed}"
            yield from _within(Section(f"{path}[]" if is_list else path, model, about))


def _lines(section: Section) -> Iterator[str]:
    yield f"### {section.path or _TOP}"
    yield ""
    yield section.about
    yield ""
    rows = [
        f"| `{path}` | {_cell(allowed(schema_of(path)))} | {_default(info)} | {_cell(info.description or '')} |"
        for path, info in _fields(section)
        if _held(info.annotation)[0] is None
    ]
    if rows:
        yield "| field | value | default | |"
        yield "|---|---|---|---|"
        yield from rows
        yield ""


def _fields(section: Section) -> Iterator[tuple[str, FieldInfo]]:
    """(path, field) of a section."""
    prefix = f"{section.path}." if section.path else ""
    for info in section.model.model_fields.values():
        yield f"{prefix}{info.alias}", info


def schema_of(path: str) -> dict[str, Any]:
    """The JSON schema of a field, by its path in this reference."""
    schema = schema_at(path.replace("[]", ".0").split("."))
    assert schema is not None, f"the spec has no field {path}"
    return dict(schema)


def _held(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, if any, and whether in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in get_args(annotation):
        model, _ = _held(inner)
        if model is not None:
            return model, get_origin(annotation) is list
    return None, False


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value: object = info.default
    if value is None:
        return "unset"
    plain = value.value if isinstance(value, Enum) else value
    return f"`{plain if isinstance(plain, str) else json.dumps(plain)}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    """Nothing in a text may end its cell or be taken for HTML."""
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    sys.stdout.write(reference())
