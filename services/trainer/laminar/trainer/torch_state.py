"""The learner's weights and state, as an attempt hands them on (`laminar.trainer.attempt.Trained`)."""

from __future__ import annotations

from pathlib import Path

import torch

from laminar.trainer import checkpoint
from laminar.trainer.export import write_model
from laminar.trainer.learner import Learner
from laminar.trainer.model_folder import ModelFolder
from laminar.trainer.policy import WIRE_NAMES, full_tensor, wire_dtype
from laminar.trainer.saving import WaitWritten
from laminar.wire.manifest import TensorEntry, layout


class TorchState:
    """Of one rank; every call is made on all of them together."""

    def __init__(self, learner: Learner, folder: ModelFolder) -> None:
        self._learner = learner
        self._folder = folder
        tensors = learner.policy.named_tensors()
        self._entries = layout(
            (name, WIRE_NAMES[wire_dtype(tensor, folder)], tuple(tensor.shape)) for name, tensor in tensors
        )
        self._group = learner.policy.ranks.side_channel()

    @property
    def entries(self) -> list[TensorEntry]:
        return self._entries

    def restore(self, folder: Path) -> int:
        return checkpoint.restore(self._learner, folder)

    def begin_save(self, folder: Path, step: int) -> WaitWritten:
        return checkpoint.save(self._learner, folder, step, self._group)

    def copy_weights(self, buffer: bytearray | None) -> None:
        """All ranks gather each tensor; rank 0 casts it into its place in the buffer."""
        target = None if buffer is None else torch.frombuffer(buffer, dtype=torch.uint8)
        for (_, tensor), entry in zip(self._learner.policy.named_tensors(), self._entries, strict=True):
            whole = full_tensor(tensor)
            if target is not None:
                place = target[entry.offset : entry.offset + entry.nbytes].view(wire_dtype(whole, self._folder))
                place.view(whole.shape).copy_(whole)

    def write_model(self, out: Path) -> None:
        tensors = {name: full_tensor(tensor) for name, tensor in self._learner.policy.named_tensors()}
        if self._learner.policy.ranks.is_first:
            write_model(out, self._folder, tensors)
