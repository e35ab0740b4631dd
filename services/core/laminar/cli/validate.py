"""`laminar validate`: checks a job file, and the files that it names, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laminar.cli import sources
from laminar.cli.errors import BadInput
from laminar.wire.job_file import JobFileError, load_job
from laminar.wire.sources import absolute
from laminar.wire.spec import LaminarJob


def validate(file: Path, overrides: Sequence[str]) -> LaminarJob:
    """The job as `laminar run` would take it. Raises BadInput with every problem of the file, or the first of the
    files that it names."""
    try:
        job = load_job(file, overrides)
    except JobFileError as error:
        raise BadInput(str(error)) from error
    sources.check(absolute(job, file.absolute().parent))
    return job


def as_text(file: Path, job: LaminarJob) -> str:
    """What the job asks for, in two lines."""
    spec, algorithm = job.spec, job.spec.algorithm
    evaluations = ", ".join(entry.name for entry in spec.evaluations) or "none"
    return (
        f"{file} is valid: {job.metadata.name}, {spec.steps} steps of {algorithm.prompts_per_step} prompts x "
        f"{algorithm.samples_per_prompt} responses.\n"
        f"model {spec.model.source}, data {spec.data.train.source}, evaluations {evaluations}, schedule "
        f"{spec.schedule.type.value}, {spec.rollout.replicas} rollouts, {spec.trainer.replicas} trainer ranks."
    )
