"""Where a job's model, data and functions are, and how that is written in the spec.

recipe://NAME     made and cached by laminar.recipes
file:PATH         as the writer of the job put it; relative to the job file
file:/ABSOLUTE    resolved: what services read
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from laminar.wire.spec import LaminarJob

_FILE = "file:"
_RECIPE = "recipe://"


FIXED_SEED = 0
"""Of the recipes that stay the same for every `data.seed`."""


@dataclass(frozen=True, slots=True)
class RecipeUse:
    """One product of a recipe that a job asks for.

    Training data follow `data.seed`. Models and evaluations are those of FIXED_SEED: runs that differ in the seed alone
    start from the same weights and are measured on the same questions.
    """

    name: str
    seed: int


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


def recipes_of(job: LaminarJob) -> list[RecipeUse]:
    """What the job's sources ask of recipes, each once, in order of appearance."""
    fixed = [(item.source, FIXED_SEED) for item in (job.spec.model, *job.spec.evaluations)]
    seeded = [fixed[0], (job.spec.data.train.source, job.spec.data.seed), *fixed[1:]]
    return list(dict.fromkeys(_use(source, seed) for source, seed in seeded if not is_file(source)))


def absolute(job: LaminarJob, folder: Path) -> LaminarJob:
    """The job with `file:` sources and reward functions absolute; relative ones start at `folder`, which must be.

    Looks at no file: whether a path is there is checked by who opens it.
    """
    assert folder.is_absolute(), f"{folder} must be absolute"

    def path_of(text: str) -> str:
        return _normal(folder / text)

    def source_of(source: str, seed: int) -> str:
        del seed
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


def with_recipes(job: LaminarJob, made: Mapping[RecipeUse, Path]) -> LaminarJob:
    """The job with each recipe as the `file:` that it made. Raises KeyError for a recipe that is not in `made`."""

    def source_of(source: str, seed: int) -> str:
        return source if is_file(source) else f"{_FILE}{_normal(made[_use(source, seed)])}"

    return _with_sources(job, source_of)


def _use(source: str, seed: int) -> RecipeUse:
    return RecipeUse(source.removeprefix(_RECIPE), seed)


def _with_sources(job: LaminarJob, change: Callable[[str, int], str]) -> LaminarJob:
    """`change`: of a source and the seed that it follows."""
    spec = job.spec
    model = spec.model.model_copy(update={"source": change(spec.model.source, FIXED_SEED)})
    train = spec.data.train.model_copy(update={"source": change(spec.data.train.source, spec.data.seed)})
    evaluations = [item.model_copy(update={"source": change(item.source, FIXED_SEED)}) for item in spec.evaluations]
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
