"""`laminar export`: a Hugging Face folder from a finished run, or from one of its checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from laminar.cli.checkpoints import find, whole_steps
from laminar.cli.errors import BadInput
from laminar.cli.run_data import open_run
from laminar.cli.run_folder import RunFolder
from laminar.wire.sources import local_path
from laminar.wire.spec import LaminarJob

EXPORT_S = 3600.0
"""A large model is read and written once; an hour means that the disk hangs."""


def export(path: Path, step: int | None, to: Path) -> Path:
    """Writes the trained model to the new folder `to`; returns it. `step` None: the final model. Raises BadInput."""
    folder, _, job = open_run(path)
    target = to.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{to} exists and is not an empty folder; nothing was written.")
    if step is None:
        return _copy(folder, target)
    _run_exporter(job, find(folder, step), target)
    return target


def _copy(folder: RunFolder, target: Path) -> Path:
    if not folder.model.is_dir():
        steps = ", ".join(map(str, whole_steps(folder)))
        hint = f" Its checkpoints can be exported: --step {steps}." if steps else " It has no checkpoint yet either."
        raise BadInput(f"{folder.path} has no final model: the run has not finished.{hint}")
    unfinished = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder.model, unfinished)
        os.replace(unfinished, target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise BadInput(f"The model cannot be written to {target}: {error}.") from error
    return target


def _run_exporter(job: LaminarJob, checkpoint: Path, target: Path) -> None:
    """In its own process: this one never loads torch."""
    model = str(local_path(job.spec.model.source))
    command = [
        sys.executable, "-P", "-m", "laminar.trainer.export",
        "--checkpoint", str(checkpoint), "--model", model, "--out", str(target),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=EXPORT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"The export of {checkpoint} has not ended within {EXPORT_S:.0f} s and was stopped.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1].removeprefix("error: ") if said else f"the exporter ended with code {done.returncode}"
        raise BadInput(f"{checkpoint} cannot be exported: {reason}")
