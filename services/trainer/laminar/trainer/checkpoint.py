"""Saving and restoring what training needs, by torch.distributed.checkpoint.

A save copies the state to host memory (the only time training waits) and is written by threads, while training goes
on. Content: weights, AdamW's state, the step. Learning rate is a function of the step and training draws no random
numbers, so nothing else is needed to continue bit for bit. A checkpoint can be restored by another number of ranks.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.state_dict_saver import async_save  # pyright: ignore[reportUnknownVariableType]

from laminar.trainer.failures import InputFailure, paragraph
from laminar.trainer.learner import Learner
from laminar.trainer.saving import WaitWritten

MODEL_PREFIX = "model."
"""Of the names in a checkpoint that are weights."""

State = dict[str, dict[str, Any]]


def training_state(learner: Learner, step: int) -> State:
    """Everything to be saved; its tensors are those of the learner, so loading into it restores the learner."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in learner.policy.module.named_parameters()}
    optimizer = {names[parameter]: dict(values) for parameter, values in learner.optimizer.state.items()}
    return {
        "model": {name: tensor.detach() for name, tensor in learner.policy.named_tensors()},
        "optimizer": optimizer,
        "trainer": {"step": torch.tensor(step)},
    }


def restore(learner: Learner, folder: Path) -> int:
    """Loads a verified checkpoint into the learner; a collective. Returns its step. Raises InputFailure."""
    state = training_state(learner, -1)
    try:
        load(
            cast("dict[str, Any]", state),
            storage_reader=FileSystemReader(folder),
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        raise InputFailure(f"The checkpoint {folder} does not fit the model of this job: {paragraph(error)}") from error
    return int(cast("Tensor", state["trainer"]["step"]).item())


class CheckpointWriter(FileSystemWriter):
    """Refuses to make the checkpoints' folder: if it is gone, its volume is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder = folder

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(f"the folder {self._folder.parent} is gone")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


def save(learner: Learner, folder: Path, step: int, group: dist.ProcessGroup | None) -> WaitWritten:
    """Copies the state to host memory and begins to write it; a collective of `group`."""
    written = cast(
        "Future[Any]",
        async_save(
            cast("dict[str, Any]", training_state(learner, step)),
            storage_writer=CheckpointWriter(folder),
            process_group=group,
            no_dist=not dist.is_initialized(),
        ),
    )

    def wait_written(limit_s: float) -> None:
        try:
            written.result(limit_s)
        except CheckpointException as error:
            cause = _root_cause(error)
            raise cause if isinstance(cause, OSError) else OSError(paragraph(cause)) from error

    return wait_written


def _root_cause(error: BaseException) -> BaseException:
    """Of the ranks' failures the first one; torch wraps it into a report with its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
