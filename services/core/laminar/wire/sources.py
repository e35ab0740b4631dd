"""Where a job's model, data and functions are, and how that is written in the spec.

recipe://NAME     made and cached by laminar.recipes
file:PATH         as the writer of the job put it; relative to the job file
file:/ABSOLUTE    resolved: what services read
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from laminar.wire.spec import LaminarJob

_FILE = "file:"
_RECIPE = "recipe://"


class NotResolved(ValueError):
    """A service was given a source that names no absolute path."""


def is_file(source: str) -> bool:
    return source.startswith(_FILE)


def local_path(source: str) -> Path:
    """The path of a resolved `file:` source. Raises NotResolved for any other."""
    path = Path(source.removeprefix(_FILE))
    if not is_file(source) or not path.is_absolute():
        raise NotResolved(f"the source {source!r} is not resolved to file:/...")
    return path


def recipes_of(job: LaminarJob) -> list[str]:
    """Names of the recipes that the job's sources use, each once, in order of appearance."""
    sources = [job.spec.model.source, job.spec.data.train.source, *(item.source for item in job.spec.evaluations)]
    return list(dict.fromkeys(source.removeprefix(_RECIPE) for source in sources if not is_file(source)))


def absolute(job: LaminarJob, folder: Path) -> LaminarJob:
    """The job with `file:` sources and reward functions absolute; relative ones start at `folder`, which must be.

    Looks at no file: whether a path is there is checked by who opens it.
    """
    assert folder.is_absolute(), f"{folder} must be absolute"

    def path_of(text: str) -> str:
        return _normal(folder / text)

    def source_of(source: str) -> str:
        return _FILE + path_of(source.removeprefix(_FILE)) if is_file(source) else source

    def function_of(text: str) -> str:
        file, _, name = text.rpartition(":")
        return f"{path_of(file)}:{name}"

    rewards = [
        item if item.function is None else item.model_copy(update={"function": function_of(item.function)})
        for item in job.spec.rewards
    ]
    moved = _with_sources(job, source_of)
    return moved.model_copy(update={"spec": moved.spec.model_copy(update={"rewards": rewards})})


def with_recipes(job: LaminarJob, made: Mapping[str, Path]) -> LaminarJob:
    """The job with each recipe as the `file:` that it made. Raises KeyError for a recipe that is not in `made`."""

    def source_of(source: str) -> str:
        return source if is_file(source) else f"{_FILE}{_normal(made[source.removeprefix(_RECIPE)])}"

    return _with_sources(job, source_of)


def _with_sources(job: LaminarJob, change: Callable[[str], str]) -> LaminarJob:
    spec = job.spec
    model = spec.model.model_copy(update={"source": change(spec.model.source)})
    train = spec.data.train.model_copy(update={"source": change(spec.data.train.source)})
    evaluations = [item.model_copy(update={"source": change(item.source)}) for item in spec.evaluations]
    data = spec.data.model_copy(update={"train": train})
    changed = spec.model_copy(update={"model": model, "data": data, "evaluations": evaluations})
    return LaminarJob.model_validate_json(job.model_copy(update={"spec": changed}).model_dump_json())


def _normal(path: Path) -> str:
    """Without `.` and `..`, links left as they are."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part not in (".", ".."):
            parts.append(part)
    return str(Path(*parts))
