"""Continuous batching over a transformers model: requests wait, get a slot, are prefilled, decode together, end.

    added -> waiting -> running (one slot, row r of every tensor) -> ended | aborted

Invariant between steps: running rows are 0 .. n-1; row r has all but its last token in the cache, and its last token
is `_last[r]`, to be fed at `_positions[r]`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from laminar.rollout.engine_messages import Ended, EngineRequest, LoadState, RequestKey, TokenBlock
from laminar.rollout.sampling import choose, seed_state, uniforms
from laminar.rollout.slots import DecodePlan, PrefillPlan, SlotCache, decode_length, decode_mask, prefill_mask
from laminar.wire.codec import pack_logprobs, pack_tokens, unpack_tokens

_PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass: bounds its activations, and how long running rows wait for it."""


@dataclass(slots=True)
class _Row:
    """One response. `logprobs` are of the tokens from `first` on, those generated here."""

    key: RequestKey
    prompt: list[int]
    response: list[int]
    first: int
    limit: int
    state: int
    temperature: float
    greedy: bool
    logprobs: list[float] = field(default_factory=list[float])
    sent: int = 0

    def take_block(self) -> TokenBlock | None:
        """Tokens since the last block."""
        if self.sent == len(self.response):
            return None
        block = TokenBlock(
            key=self.key,
            offset=self.sent,
            tokens=pack_tokens(self.response[self.sent :]),
            logprobs=pack_logprobs(self.logprobs[self.sent - self.first :]),
        )
        self.sent = len(self.response)
        return block


class Decoder:
    """`add` requests, call `step` while `busy`, and collect with `take_ended` and `take_pending`."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, eos_ids: frozenset[int], vocabulary: int) -> None:
        self._model, self._cache, self._eos_ids, self._vocabulary = model, cache, eos_ids, vocabulary
        slots = cache.shape.slots
        self._rows: list[_Row] = []
        self._waiting: deque[_Row] = deque()
        self._blocks: list[TokenBlock] = []
        self._ended: list[Ended] = []
        self._generated_tokens = 0
        self._last = torch.zeros(slots, dtype=torch.long)
        self._positions = torch.zeros(slots, dtype=torch.long)
        self._temperatures = torch.ones(slots)
        self._greedy = torch.zeros(slots, dtype=torch.bool)
        self._states = np.zeros(slots, dtype=np.uint64)
        self._drawn = np.zeros(slots, dtype=np.int64)  # response position of the next draw
        self._slot_ids = torch.arange(slots)

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    @property
    def load(self) -> LoadState:
        shape = self._cache.shape
        return LoadState(
            running=len(self._rows),
            waiting=len(self._waiting),
            kv_used_tokens=int(self._positions[: len(self._rows)].sum()),
            kv_capacity_tokens=shape.slots * shape.max_length,
            generated_tokens=self._generated_tokens,
        )

    def add(self, request: EngineRequest) -> None:
        """Queues a request. What cannot be generated, or has nothing left to generate, ends at once."""
        prompt, response = unpack_tokens(request.prompt), unpack_tokens(request.response)
        length, max_length = len(response), self._cache.shape.max_length
        if not prompt or len(prompt) >= max_length:
            detail = f"a prompt of {len(prompt)} tokens does not fit a context of {max_length}"
            self._ended.append(Ended(key=request.key, length=length, reason="error", detail=detail))
            return
        if max(prompt) >= self._vocabulary or min(prompt) < 0:
            detail = f"prompt ids reach {max(prompt)}, the model has {self._vocabulary} rows of embeddings"
            self._ended.append(Ended(key=request.key, length=length, reason="error", detail=detail))
            return
        limit = min(request.max_new_tokens, max_length - len(prompt))
        # A response that moved between its last append and its finish needs no further token.
        if response and response[-1] in self._eos_ids:
            self._ended.append(Ended(key=request.key, length=length, reason="stop"))
        elif length >= limit:
            self._ended.append(Ended(key=request.key, length=length, reason="length"))
        else:
            state = seed_state(request.seed)
            row = _Row(request.key, prompt, response, length, limit, state, request.temperature, request.greedy)
            row.sent = length
            self._waiting.append(row)

    def abort(self, keys: Sequence[RequestKey]) -> None:
        """Forgets these requests without a word; unknown ones are ignored."""
        unwanted = set(keys)
        self._waiting = deque(row for row in self._waiting if row.key not in unwanted)
        for index in range(len(self._rows) - 1, -1, -1):
            if self._rows[index].key in unwanted:
                self._release(index)

    def take_ended(self) -> tuple[list[TokenBlock], list[Ended]]:
        """What ended since the last call, with the tokens that had not been taken."""
        blocks, ended = self._blocks, self._ended
        self._blocks, self._ended = [], []
        return blocks, ended

    def take_pending(self) -> list[TokenBlock]:
        """New tokens of the running rows."""
        return [block for row in self._rows if (block := row.take_block()) is not None]

    @torch.inference_mode()
    def step(self) -> None:
        """Fills free slots, then gives each running row one token."""
        if self._waiting and len(self._rows) < self._cache.shape.slots:
            self._admit()
        if self._rows:
            self._decode()

    def _admit(self) -> None:
        first = len(self._rows)
        count = min(len(self._waiting), self._cache.shape.slots - first)
        self._rows += [self._waiting.popleft() for _ in range(count)]
        by_sequence: dict[tuple[int, ...], list[int]] = {}
        for index in range(first, first + count):
            row = self._rows[index]
            self._temperatures[index] = row.temperature
            self._greedy[index] = row.greedy
            self._states[index] = row.state
            self._drawn[index] = len(row.response)
            by_sequence.setdefault((*row.prompt, *row.response), []).append(index)
        for sequences in _batches(sorted(by_sequence, key=len)):
            self._prefill(sequences, [by_sequence[sequence] for sequence in sequences])
        self._end_rows(first)

    def _prefill(self, sequences: Sequence[tuple[int, ...]], slots: Sequence[Sequence[int]]) -> None:
        """Computes each sequence once, for all its slots, and draws their first tokens. Left-padded: ends align."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        width = int(lengths.max())
        starts = width - lengths
        tokens = torch.tensor([[0] * (width - len(sequence)) + list(sequence) for sequence in sequences])
        pairs = [(source, slot) for source, its_slots in enumerate(slots) for slot in its_slots]
        source = torch.tensor([pair[0] for pair in pairs])
        slot = torch.tensor([pair[1] for pair in pairs])
        copied = lengths[source]
        offsets = torch.arange(int(copied.sum())) - (copied.cumsum(0) - copied).repeat_interleave(copied)
        self._cache.plan = PrefillPlan(
            source=source.repeat_interleave(copied),
            column=offsets + starts[source].repeat_interleave(copied),
            slot=slot.repeat_interleave(copied),
            position=offsets,
        )
        positions = (torch.arange(width)[None] - starts[:, None]).clamp_(min=0)
        logits = self._forward(tokens, positions, prefill_mask(starts, width, self._cache.keys.dtype))
        self._positions[slot] = copied
        self._draw(logits[source], slot)

    def _decode(self) -> None:
        count = len(self._rows)
        positions = self._positions[:count]
        length = decode_length(int(positions.max()) + 1, self._cache.shape.max_length)
        self._cache.plan = DecodePlan(self._slot_ids[:count], positions, length)
        mask = decode_mask(positions, length, self._cache.keys.dtype)
        logits = self._forward(self._last[:count, None], positions[:, None], mask)
        self._positions[:count] += 1
        self._draw(logits, self._slot_ids[:count])
        self._end_rows(0)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits of the last column, `[sequences, vocabulary]`."""
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits
        return logits[:, -1]

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Appends one token to each row of `slots`; `logits` has their order."""
        indices = cast(npt.NDArray[np.int64], slots.numpy())
        draws = torch.from_numpy(uniforms(self._states[indices], self._drawn[indices]))
        greedy = self._greedy[slots]
        tokens, logprobs = choose(logits, self._temperatures[slots], draws, greedy if bool(greedy.any()) else None)
        self._last[slots] = tokens
        self._drawn[indices] += 1
        self._generated_tokens += len(indices)
        rows = [self._rows[index] for index in cast(list[int], indices.tolist())]
        token_list, logprob_list = cast(list[int], tokens.tolist()), cast(list[float], logprobs.tolist())
        for row, token, logprob in zip(rows, token_list, logprob_list, strict=True):
            row.response.append(token)
            row.logprobs.append(logprob)

    def _end_rows(self, first: int) -> None:
        """Releases the rows from `first` on whose newest token is their last."""
        for index in range(len(self._rows) - 1, first - 1, -1):
            row = self._rows[index]
            if not math.isfinite(row.logprobs[-1]):
                self._end(index, "error", "the logits are not finite")
            elif row.response[-1] in self._eos_ids:
                self._end(index, "stop")
            elif len(row.response) >= row.limit:
                self._end(index, "length")

    def _end(self, index: int, reason: str, detail: str = "") -> None:
        row = self._rows[index]
        if reason == "error":
            # A token drawn from NaN is no token.
            del row.response[-1], row.logprobs[-1]
        if (block := row.take_block()) is not None:
            self._blocks.append(block)
        self._ended.append(Ended(key=row.key, length=len(row.response), reason=reason, detail=detail))
        self._release(index)

    def _release(self, index: int) -> None:
        last = len(self._rows) - 1
        if index != last:
            self._cache.move(last, index, int(self._positions[last]))
            for tensor in (self._last, self._positions, self._temperatures, self._greedy):
                tensor[index] = tensor[last]
            self._states[index], self._drawn[index] = self._states[last], self._drawn[last]
            self._rows[index] = self._rows[last]
        self._rows.pop()


def _batches(sequences: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Cuts sequences, shortest first, into passes of at most `_PREFILL_TOKENS` padded tokens and half padding."""
    begin = 0
    for end in range(1, len(sequences) + 1):
        if end < len(sequences):
            width = len(sequences[end])
            if (end + 1 - begin) * width <= _PREFILL_TOKENS and width <= 2 * len(sequences[begin]) + 16:
                continue
        yield sequences[begin:end]
        begin = end
