"""The KV cache of continuous batching: a row is a slot, and every row has its own position.

The transformers model itself runs on it: `SlotCache` is handed over as `cache`, and the mask that goes with it is
built here too. Running rows are `0 .. n-1`, always; a row that ends is filled with the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

_LENGTH_STEP = 32  # keys are read up to a multiple of it: few different shapes, little waste


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: int
    slots: int
    kv_heads: int
    max_length: int
    key_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Where a left-padded prefill goes: sequence `source[i]`, column `column[i]` -> slot `slot[i]`, `position[i]`.

    One sequence may go to several slots (samples of one prompt are computed once).
    """

    source: torch.Tensor
    column: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One token for each of the rows `0 .. rows-1`, at `positions`; keys are read up to `length`."""

    rows: torch.Tensor
    positions: torch.Tensor
    length: int


class SlotCache(Cache):
    """Keys and values of all slots, `[slots, kv heads, max length, width]` a layer; pages are touched when used.

    Set `plan` before each forward pass of the model.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self.shape = shape
        size = (shape.layers, shape.slots, shape.kv_heads, shape.max_length)
        self.keys = torch.zeros(*size, shape.key_width, dtype=dtype)
        self.values = torch.zeros(*size, shape.value_width, dtype=dtype)
        self.plan: PrefillPlan | DecodePlan | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: stores the new keys and values, answers with those to attend to."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        match self.plan:
            case DecodePlan(rows, positions, length):
                keys[rows, :, positions] = key_states[:, :, 0]
                values[rows, :, positions] = value_states[:, :, 0]
                return keys[: len(rows), :, :length], values[: len(rows), :, :length]
            case PrefillPlan(source, column, slot, position):
                keys[slot, :, position] = key_states[source, :, column]
                values[slot, :, position] = value_states[source, :, column]
                return key_states, value_states
            case None:
                raise AssertionError("SlotCache.plan must be set before the model runs")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No common length: positions and masks are always passed to the model."""
        return 0

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another."""
        self.keys[:, destination, :, :length] = self.keys[:, source, :, :length]
        self.values[:, destination, :, :length] = self.values[:, source, :, :length]


def decode_length(longest: int, max_length: int) -> int:
    """How many key positions a decode step reads when the longest row has `longest` tokens, the new one included."""
    return min(max_length, -(-longest // _LENGTH_STEP) * _LENGTH_STEP)


def decode_mask(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive, `[rows, 1, 1, length]`: row r sees the keys 0 .. positions[r]."""
    visible = torch.arange(length)[None] <= positions[:, None]
    return _additive(visible, dtype)[:, None, None]


def prefill_mask(starts: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive, `[sequences, 1, width, width]`: causal, and no key before the sequence's start in its left-padded row.

    Padding sees itself: a row that sees nothing would be NaN, and NaN times a masked weight of 0 is NaN again.
    """
    columns = torch.arange(width)
    causal = columns[None, :] <= columns[:, None]
    visible = causal[None] & (columns[None, None, :] >= starts[:, None, None]) | torch.eye(width, dtype=torch.bool)
    return _additive(visible, dtype)[:, None]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
