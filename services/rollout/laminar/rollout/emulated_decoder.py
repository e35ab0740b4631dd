"""The emulated engine's responses: what they cost by the clock of the emulated machine, and the tokens they show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.core.decode_batch import DecodeBatch, End, Response
from laminar.rollout.emulated_tokens import TokenTape
from laminar.rollout.engine_messages import EmulatedMachine, Ended, EngineRequest, LoadState, RequestKey, TokenBlock
from laminar.wire.codec import num_items, unpack_tokens


class EmulatedClock:
    """Seconds of the emulated machine; they stand still while it is paused."""

    def __init__(self, scale: float, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._scale = scale
        self._monotonic_s = monotonic_s
        self._zero_s = monotonic_s()
        self._stopped_s: float | None = None

    @property
    def paused(self) -> bool:
        return self._stopped_s is not None

    def now_s(self) -> float:
        real_s = self._monotonic_s() if self._stopped_s is None else self._stopped_s
        return (real_s - self._zero_s) * self._scale

    def real_until_s(self, due_s: float) -> float:
        """Real seconds until then; negative: it was due so long ago."""
        return (due_s - self.now_s()) / self._scale

    def pause(self) -> None:
        if self._stopped_s is None:
            self._stopped_s = self._monotonic_s()

    def resume(self) -> None:
        if self._stopped_s is not None:
            self._zero_s += self._monotonic_s() - self._stopped_s
            self._stopped_s = None


@dataclass(slots=True)
class _Stream:
    """One response. Lengths are in tokens of the run; `end` is its last one's place, `sent` what the agent has."""

    key: RequestKey
    seed: int
    end: int
    reason: str
    sent: int


class EmulatedDecoder:
    """The same calls as the torch engine's Decoder, but time passes by itself: `advance` says what has ended."""

    def __init__(
        self, machine: EmulatedMachine, max_running: int, max_length: int, tape: TokenTape, eos_id: int,
        clock: EmulatedClock | None = None,
    ) -> None:  # fmt: skip
        self.clock = clock or EmulatedClock(machine.time_scale)
        self._grain = machine.token_grain
        self._lengths = machine.lengths
        self._tape = tape
        self._eos_id = eos_id
        self._batch: DecodeBatch[RequestKey] = DecodeBatch(machine.serving, max_running, self.clock.now_s())
        self.max_length = min(max_length, self._batch.kv_capacity_tokens // self._grain)
        self._streams: dict[RequestKey, _Stream] = {}
        self._blocks: list[TokenBlock] = []
        self._ended: list[Ended] = []
        self._late_s = 0.0

    @property
    def busy(self) -> bool:
        return self._batch.busy

    def take_load(self) -> LoadState:
        """In tokens of the run."""
        batch, late_s = self._batch, self._late_s
        self._late_s = 0.0
        return LoadState(
            running=batch.num_running,
            waiting=batch.num_waiting,
            kv_used_tokens=batch.kv_used_tokens // self._grain,
            kv_capacity_tokens=batch.kv_capacity_tokens // self._grain,
            generated_tokens=batch.generated_tokens // self._grain,
            late_s=late_s,
        )

    def next_event_s(self) -> float | None:
        """Real seconds until something ends."""
        due_s = self._batch.next_event_s()
        return None if due_s is None else self.clock.real_until_s(due_s)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queues them. What cannot be generated, or has nothing left to generate, ends at once."""
        responses = [response for request in requests if (response := self._admit(request)) is not None]
        self._take(self._batch.add(responses, self.clock.now_s()))

    def abort(self, keys: Sequence[RequestKey]) -> None:
        self._take(self._batch.abort(keys, self.clock.now_s()))
        for key in keys:
            self._streams.pop(key, None)

    def advance(self) -> None:
        """To now."""
        self._take(self._batch.advance(self.clock.now_s()))

    def take_ended(self) -> tuple[list[TokenBlock], list[Ended]]:
        """What ended since the last call, with the tokens that had not been taken."""
        blocks, ended = self._blocks, self._ended
        self._blocks, self._ended = [], []
        return blocks, ended

    def take_pending(self) -> list[TokenBlock]:
        """New tokens of the running responses."""
        blocks: list[TokenBlock] = []
        for key, length in self._batch.lengths():
            stream = self._streams[key]
            if length // self._grain > stream.sent:
                blocks.append(self._block(stream, length // self._grain))
        return blocks

    def _admit(self, request: EngineRequest) -> Response[RequestKey] | None:
        num_prompt, length = num_items(request.prompt), num_items(request.response)
        if not num_prompt or num_prompt >= self.max_length:
            detail = f"a prompt of {num_prompt} tokens does not fit a context of {self.max_length}"
            self._ended.append(Ended(key=request.key, length=length, reason="error", detail=detail))
            return None
        limit = min(request.max_new_tokens, self.max_length - num_prompt)
        drawn = self._lengths.of(request.seed)
        by_itself = -(-drawn // self._grain)
        end, reason = (by_itself, "stop") if by_itself <= limit else (limit, "length")
        if length and unpack_tokens(request.response[-4:]) == [self._eos_id]:
            reason, end = "stop", length
        if length >= end:
            self._ended.append(Ended(key=request.key, length=length, reason=reason))
            return None
        self._streams[request.key] = _Stream(request.key, request.seed, end, reason, sent=length)
        return Response(
            key=request.key, prefix=request.prompt, prompt_tokens=num_prompt * self._grain,
            length=length * self._grain, end=min(drawn, limit * self._grain),
        )  # fmt: skip

    def _take(self, ends: Sequence[End[RequestKey]]) -> None:
        for end in ends:
            self._late_s = max(self._late_s, -self.clock.real_until_s(end.due_s))
            stream = self._streams.pop(end.key)
            self._blocks.append(self._block(stream, stream.end))
            self._ended.append(Ended(key=end.key, length=stream.end, reason=stream.reason))

    def _block(self, stream: _Stream, length: int) -> TokenBlock:
        first, stream.sent = stream.sent, length
        ended = length == stream.end and stream.reason == "stop"
        return TokenBlock(
            key=stream.key,
            offset=first,
            tokens=self._tape.tokens(stream.seed, first, length, ended=ended),
            logprobs=self._tape.logprobs(first, length),
        )
