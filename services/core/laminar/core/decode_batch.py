"""Continuous batching as time and memory see it: a state machine without tokens, for the emulated engine and the
simulator.

    added -> waiting -> running -> ended
                ^  \\______/ |
                +-----------+  preempted when the KV cache is full: the youngest goes back and is computed again

All running responses gain one token a step, and a step's time is linear in the KV that is read (`roofline`), so what
happens between two events has a closed form: `advance` jumps from event to event and never steps. Times are seconds of
the emulated machine; `now_s` never goes back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from laminar.core.roofline import Serving

WATERMARK = 0.01
"""Of the cache: left free when a response joins others, or it would be thrown out again at once."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Response(Generic[Key]):
    """One response to be decoded from `length` to `end` tokens. Responses with equal `prefix` share the KV of their
    prompt."""

    key: Key
    prefix: Hashable
    prompt_tokens: int
    length: int
    end: int


@dataclass(slots=True)
class _Entry(Generic[Key]):
    """`length` is as of the step `joined`, while it runs; as of now, while it waits."""

    response: Response[Key]
    length: int
    joined: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class End(Generic[Key]):
    """A response reached its end at `due_s`."""

    key: Key
    length: int
    due_s: float


class DecodeBatch(Generic[Key]):
    """The batch of one engine. Invariants: 0 < KV in use <= capacity while anything runs; at most `max_running` run;
    `_clock_s` is the end of the last whole step and at most the `now_s` of the last call, or the end of a prefill that
    still runs then."""

    def __init__(self, serving: Serving, max_running: int, now_s: float = 0.0) -> None:
        self._serving = serving
        self._max_running = max_running
        self.kv_capacity_tokens = serving.kv_capacity_tokens
        self._clock_s = now_s
        self._steps = 0
        self._running: dict[Key, _Entry[Key]] = {}
        self._waiting: deque[_Entry[Key]] = deque()
        self._ends: list[tuple[int, int, Key]] = []
        """(step, order, key); those of responses that left otherwise are passed over."""
        self._prompts: dict[Hashable, int] = {}
        """Running responses of each prompt in the cache."""
        self._order = 0
        self.kv_used_tokens = 0
        self._kv_read_tokens = 0
        """Contexts of all running responses: a shared prompt is read by each."""
        self._generated_tokens = 0
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def generated_tokens(self) -> int:
        return self._generated_tokens

    def fits(self, response: Response[Key]) -> bool:
        """Whether it could run to its end alone; `add` only such ones."""
        return response.prompt_tokens + response.end <= self.kv_capacity_tokens

    def add(self, responses: Iterable[Response[Key]], now_s: float) -> list[End[Key]]:
        """Queues them; they join at the end of the step that runs. Returns what ended before."""
        ended = self.advance(now_s)
        for response in responses:
            assert 0 <= response.length < response.end and self.fits(response), response
            self._waiting.append(_Entry(response, response.length))
        self._admit(now_s)
        return ended

    def abort(self, keys: Iterable[Key], now_s: float) -> list[End[Key]]:
        """Forgets these; unknown ones are ignored. Returns what ended before."""
        ended = self.advance(now_s)
        unwanted = set(keys)
        self._waiting = deque(entry for entry in self._waiting if entry.response.key not in unwanted)
        for key in sorted(unwanted & self._running.keys(), key=lambda key: self._running[key].order):
            self._leave(key)
        self._admit(now_s)
        return ended

    def lengths(self) -> Iterable[tuple[Key, int]]:
        """Of the running ones, as of the last call that took a time."""
        return ((key, self._length(entry)) for key, entry in self._running.items())

    def next_event_s(self) -> float | None:
        """When the next response ends or is preempted, if nothing is added before; None: nothing runs."""
        if not self._running:
            return None
        num_steps = self._steps_to_event()
        cost = self._serving.decode_cost(len(self._running))
        return self._clock_s + cost.steps_s(num_steps, self._kv_read_tokens, len(self._running))

    def advance(self, now_s: float) -> list[End[Key]]:
        """Lets time pass until `now_s`; returns what ended, in order."""
        ended: list[End[Key]] = []
        while self._running and self._clock_s <= now_s:
            num, kv = len(self._running), self._kv_read_tokens
            cost = self._serving.decode_cost(num)
            num_steps = self._steps_to_event()
            took_s = cost.steps_s(num_steps, kv, num)
            if self._clock_s + took_s > now_s:
                num_steps = min(num_steps, cost.num_steps(now_s - self._clock_s, kv, num))
                self._step(num_steps, cost.steps_s(num_steps, kv, num))
                return ended
            self._step(num_steps, took_s)
            self._end_due(ended)
            if self._running and self.kv_used_tokens + len(self._running) > self.kv_capacity_tokens:
                self._preempt()
            else:
                self._admit(self._clock_s)
        return ended

    def _steps_to_event(self) -> int:
        """Until the first response ends, or until no further step fits into the cache."""
        while self._ends[0][2] not in self._running or self._running[self._ends[0][2]].order != self._ends[0][1]:
            heapq.heappop(self._ends)
        to_end = self._ends[0][0] - self._steps
        return min(to_end, (self.kv_capacity_tokens - self.kv_used_tokens) // len(self._running))

    def _step(self, num_steps: int, took_s: float) -> None:
        grown = num_steps * len(self._running)
        self._clock_s += took_s
        self._steps += num_steps
        self.kv_used_tokens += grown
        self._kv_read_tokens += grown
        self._generated_tokens += grown

    def _end_due(self, ended: list[End[Key]]) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            _, order, key = heapq.heappop(self._ends)
            entry = self._running.get(key)
            if entry is not None and entry.order == order:
                ended.append(End(key, entry.response.end, self._clock_s))
                self._leave(key)

    def _preempt(self) -> None:
        """The youngest goes back to the head of the queue, as it was there before those that wait."""
        assert len(self._running) > 1, "a response that fits alone was preempted"
        key = max(self._running, key=lambda key: self._running[key].order)
        entry = self._leave(key)
        self._waiting.appendleft(entry)
        self.num_preempted += 1

    def _admit(self, now_s: float) -> None:
        """First come, first served, while there is room; all who join are computed before the next step."""
        prefill_s = 0.0
        while self._waiting and len(self._running) < self._max_running:
            entry = self._waiting[0]
            shared = entry.response.prefix in self._prompts
            new_tokens = entry.length + (0 if shared else entry.response.prompt_tokens)
            free = self.kv_capacity_tokens - self.kv_used_tokens - new_tokens
            if free < (WATERMARK * self.kv_capacity_tokens + len(self._running) + 1 if self._running else 1):
                break
            if not self._running:
                self._clock_s = max(self._clock_s, now_s)  # it was idle
            after = entry.response.prompt_tokens if shared else 0
            prefill_s += self._serving.prefill_s(new_tokens, after) if new_tokens else 0.0
            self._waiting.popleft()
            self._join(entry, new_tokens)
        self._clock_s += prefill_s

    def _join(self, entry: _Entry[Key], new_tokens: int) -> None:
        response = entry.response
        self._order += 1
        entry.joined, entry.order = self._steps, self._order
        self._running[response.key] = entry
        self._prompts[response.prefix] = self._prompts.get(response.prefix, 0) + 1
        self.kv_used_tokens += new_tokens
        self._kv_read_tokens += response.prompt_tokens + entry.length
        heapq.heappush(self._ends, (self._steps + response.end - entry.length, entry.order, response.key))

    def _leave(self, key: Key) -> _Entry[Key]:
        entry = self._running.pop(key)
        entry.length = self._length(entry)
        response = entry.response
        self._prompts[response.prefix] -= 1
        freed = entry.length
        if not self._prompts[response.prefix]:
            del self._prompts[response.prefix]
            freed += response.prompt_tokens
        self.kv_used_tokens -= freed
        self._kv_read_tokens -= response.prompt_tokens + entry.length
        return entry

    def _length(self, entry: _Entry[Key]) -> int:
        """Of a running one, now."""
        return entry.length + self._steps - entry.joined
