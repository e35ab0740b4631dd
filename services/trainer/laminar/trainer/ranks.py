"""The ranks of one attempt, and the few collectives that training needs; one rank needs no process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Above the longest time that rank 0 lets the others wait (it repeats its answer every few seconds) and the longest
skew of one training step; below it a dead rank is noticed by torchrun at once anyway."""


class Ranks:
    """Rank numbers and collectives over gloo. Every rank must make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_torchrun(cls) -> Ranks:
        """Joins the process group that torchrun describes in the environment."""
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, maximum=False)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, maximum=True)

    def meet(self) -> None:
        """Returns when every rank is here."""
        if self.size > 1:
            dist.barrier()

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on every rank."""
        box: list[T | None] = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]

    def side_channel(self) -> dist.ProcessGroup | None:
        """A second group for the collectives of a thread; None with one rank."""
        if self.size == 1:
            return None
        return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Sequence[float], *, maximum: bool) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        return cast("list[float]", tensor.tolist())
