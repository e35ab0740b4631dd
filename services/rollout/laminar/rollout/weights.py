"""New weights into a live model: all or nothing until the first byte is overwritten, and honest after it.

The order is what keeps the promise "never generates with weights it cannot prove": digest, names, shapes, coverage
and the slot's generation are checked first; then the copy; then the slot's generation again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laminar.rollout.loading import TornLoad, UnfitVersion, WeightsSource
from laminar.shell.handoff import SlotReused
from laminar.wire.manifest import TensorEntry

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Copy:
    entry: TensorEntry
    target: torch.Tensor


class WeightLoader:
    """Knows the model's tensors by all their names; tied ones are one tensor with several."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._parameters: dict[int, str] = {id(tensor): name for name, tensor in model.named_parameters()}
        persistent = model.state_dict(keep_vars=True)
        self._tensors.update({name: tensor for name, tensor in persistent.items() if isinstance(tensor, torch.Tensor)})

    def load(self, entries: Sequence[TensorEntry], source: WeightsSource) -> int:
        """Copies all tensors; returns their bytes.

        Raises UnfitVersion or SlotReused before anything is overwritten, TornLoad after.
        """
        copies = self._plan(entries)
        source.check()
        try:
            with torch.no_grad():
                for copy in copies:
                    # Also in between: pages of a dead relay stay charged to it as long as we map them.
                    source.check()
                    copy.target.copy_(_view(source.tensor(copy.entry.name), copy.entry))
            source.check()
        except (SlotReused, KeyError, OSError, RuntimeError, ValueError) as error:
            raise TornLoad(f"{type(error).__name__}: {error}") from error
        return sum(copy.entry.nbytes for copy in copies)

    def _plan(self, entries: Sequence[TensorEntry]) -> list[_Copy]:
        copies: list[_Copy] = []
        missing = dict(self._parameters)
        for entry in entries:
            target = self._tensors.get(entry.name)
            if target is None:
                raise UnfitVersion(f"the model has no tensor {entry.name}")
            if tuple(entry.shape) != tuple(target.shape):
                raise UnfitVersion(f"{entry.name} has shape {list(entry.shape)}, the model {list(target.shape)}")
            if entry.dtype not in _DTYPES:
                raise UnfitVersion(f"{entry.name} has dtype {entry.dtype}, known are {', '.join(_DTYPES)}")
            if entry.nbytes != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
                raise UnfitVersion(f"{entry.name} has {entry.nbytes} bytes, its shape and dtype need another number")
            missing.pop(id(target), None)
            copies.append(_Copy(entry, target))
        if missing:
            names = sorted(missing.values())
            raise UnfitVersion(f"{len(names)} parameters are not in the version: {', '.join(names[:3])}")
        return copies


def _view(data: memoryview, entry: TensorEntry) -> torch.Tensor:
    with warnings.catch_warnings():
        # The map is read-only, and so is what we do with it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(*entry.shape)
