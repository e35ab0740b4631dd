"""YAML of job files: the types of YAML 1.2 (`1e-6` is a number, `yes` is text), with the line of every field."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 2**20
MAX_NODES = 20_000
"""With aliases a short file can stand for a huge one; a job has a few hundred fields at most."""
MAX_DEPTH = 32

_PREFIX = "tag:yaml.org,2002:"
_NULL, _TRUE, _FALSE = r"~|null|Null|NULL|", r"true|True|TRUE", r"false|False|FALSE"
_INT, _OCTAL, _HEX = r"[-+]?[0-9]{1,30}", r"0o[0-7]{1,30}", r"0x[0-9a-fA-F]{1,30}"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_NOT_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"

Place = tuple[str | int, ...]
"""Keys and list indices from the top of the file."""


@dataclass(frozen=True)
class YamlError(Exception):
    """What is wrong with the file as YAML, as a sentence, and where (line from 1; None: unknown)."""

    sentence: str
    line: int | None


@dataclass(frozen=True)
class Document:
    """The values of one file, and the line of each."""

    value: Any
    lines: dict[Place, int]


def is_section(value: object) -> TypeGuard[dict[str, Any]]:
    """A mapping as `parse` makes them."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """A sequence as `parse` makes them."""
    return isinstance(value, list)


class _Loader(yaml.SafeLoader):
    """Guesses the type of plain text by the core schema of YAML 1.2 instead of the rules of YAML 1.1."""

    # Not the base's. The stubs call it an instance's, but the resolver looks it up on the class.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


for _name, _pattern in (
    ("null", _NULL),
    ("bool", f"{_TRUE}|{_FALSE}"),
    ("int", f"{_INT}|{_OCTAL}|{_HEX}"),
    ("float", f"{_FLOAT}|{_NOT_FINITE}"),
):
    _Loader.add_implicit_resolver(_PREFIX + _name, re.compile(rf"^(?:{_pattern})$"), None)


def parse(text: str) -> Document:
    """The one document of `text`. Raises YamlError; a value of None means an empty document."""
    try:
        roots = list(_compose(text))
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error) from error
    except yaml.reader.ReaderError as error:
        raise YamlError(f"the character #x{error.character:04x} is not allowed in YAML", None) from error
    except RecursionError as error:
        raise YamlError("the values are nested too deeply", None) from error
    if len(roots) > 1:
        raise YamlError(
            f"there are {len(roots)} documents (separated by ---); a job file holds exactly one",
            roots[1].start_mark.line + 1,
        )
    builder = _Builder()
    value = builder.build(roots[0], ()) if roots else None
    return Document(value, builder.lines)


def parse_value(text: str) -> Any:
    """One value as it would be read in a file. Raises YamlError."""
    return parse(text).value


def _compose(text: str) -> Iterator[Node]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node said there is one"
            yield node
    finally:
        loader.dispose()


class _Builder:
    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self._num_nodes = 0

    def build(self, node: Node, place: Place) -> Any:
        line = node.start_mark.line + 1
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or len(place) > MAX_DEPTH:
            raise YamlError("there are too many nested or repeated values", line)
        self.lines.setdefault(place, line)
        if isinstance(node, MappingNode):
            return self._mapping(node, place)
        if isinstance(node, SequenceNode):
            _expect_tag(node, "seq")
            return [self.build(item, (*place, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return _scalar(node)

    def _mapping(self, node: MappingNode, place: Place) -> dict[str, Any]:
        _expect_tag(node, "map")
        value: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                raise YamlError("the name of a field must be text", line)
            key = str(key_node.value)
            if key in value:
                raise YamlError(f"the field '{key}' is there twice, first in line {first_lines[key]}", line)
            first_lines[key] = line
            self.lines[(*place, key)] = line
            value[key] = self.build(value_node, (*place, key))
        return value


def _expect_tag(node: Node, name: str) -> None:
    if node.tag != _PREFIX + name:
        raise YamlError(f"the tag {node.tag} is not supported", node.start_mark.line + 1)


def _scalar(node: ScalarNode) -> Any:
    text, line = str(node.value), node.start_mark.line + 1
    try:
        match node.tag.removeprefix(_PREFIX):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text[0] in "tT"
            case "int":
                return int(text, 0 if text[:2] in ("0o", "0x") else 10)
            case "float":
                value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case _:
                raise YamlError(f"the tag {node.tag} is not supported", line)
    except ValueError as error:
        raise YamlError(f"{text!r} does not fit the tag {node.tag}", line) from error
    if not math.isfinite(value):
        raise YamlError(f"{text} is not a finite number", line)
    return value


def _syntax_error(error: yaml.MarkedYAMLError) -> YamlError:
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem or "tab" in problem.lower():
        return YamlError("a tab stands where YAML allows only spaces; indent with spaces", line)
    context = f" ({error.context})" if error.context else ""
    return YamlError(f"this is not valid YAML: {problem}{context}", line)
