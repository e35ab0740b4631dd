"""Continuous batching by events: against values worked out by hand, and against one that steps token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.decode_batch import WATERMARK, DecodeBatch, Response
from laminar.core.roofline import Gpu, ModelShape, Serving

# One step: 1 ms for the weights and 1 us for each token of KV; a prompt token takes 10 us; 1 MB of KV a token.
MODEL = ModelShape(num_parameters=5e8, num_layers=10, num_heads=1, num_kv_heads=25, head_size=1000, hidden_size=1000)
GPU = Gpu(memory_bytes=10e9, memory_bytes_per_s=1e12, flops_per_s=1e14, link_bytes_per_s=1e11, host_bytes_per_s=1e10)
ROOMY = Serving(MODEL, GPU, memory_share=0.9)  # 8000 tokens


def small(capacity: int) -> Serving:
    return Serving(MODEL, GPU, memory_share=(1e9 + capacity * 1e6) / 10e9 + 1e-9)


def response(key: int, end: int, *, length: int = 0, prompt: int = 100, prefix: int | None = None) -> Response[int]:
    return Response(key, ("prompt", key if prefix is None else prefix), prompt, length, end)


def run_out(batch: DecodeBatch[int]) -> list[tuple[int, float]]:
    """(key, time) of all ends."""
    ended: list[tuple[int, float]] = []
    while (due_s := batch.next_event_s()) is not None:
        ended += [(end.key, end.due_s) for end in batch.advance(due_s)]
    return ended


def test_one_response_takes_its_prefill_and_its_steps() -> None:
    batch: DecodeBatch[int] = DecodeBatch(ROOMY, max_running=8)
    batch.add([response(1, 50)], now_s=10.0)
    prefill_s = ROOMY.prefill_s(100)
    steps_s = sum(1e-3 + 1e-6 * (100 + step) for step in range(50))
    assert run_out(batch) == [(1, pytest.approx(10 + prefill_s + steps_s))]
    assert (batch.busy, batch.kv_used_tokens, batch.generated_tokens) == (False, 0, 50)


def test_a_continued_response_computes_its_context_and_ends_where_it_would_have() -> None:
    batch: DecodeBatch[int] = DecodeBatch(ROOMY, max_running=8)
    batch.add([response(1, 50, length=40)], now_s=0.0)
    steps_s = sum(1e-3 + 1e-6 * (140 + step) for step in range(10))
    assert run_out(batch) == [(1, pytest.approx(ROOMY.prefill_s(140) + steps_s))]


def test_responses_of_one_prompt_hold_and_compute_it_once_but_read_it_each() -> None:
    batch: DecodeBatch[int] = DecodeBatch(ROOMY, max_running=8)
    batch.add([response(key, 20, prefix=0) for key in range(4)], now_s=0.0)
    assert batch.kv_used_tokens == 100
    steps_s = sum(1e-3 + 1e-6 * 4 * (100 + step) for step in range(20))
    assert run_out(batch)[-1][1] == pytest.approx(ROOMY.prefill_s(100) + steps_s)


def test_lengths_grow_with_time_and_half_a_step_is_no_token() -> None:
    batch: DecodeBatch[int] = DecodeBatch(ROOMY, max_running=8)
    batch.add([response(1, 1000)], now_s=0.0)
    start_s = ROOMY.prefill_s(100)
    for num_steps in (0, 1, 7, 300):
        took_s = sum(1e-3 + 1e-6 * (100 + step) for step in range(num_steps))
        assert batch.advance(start_s + took_s + 5e-4) == []
        assert list(batch.lengths()) == [(1, num_steps)]


def test_whoever_comes_over_the_limit_waits_for_an_end() -> None:
    batch: DecodeBatch[int] = DecodeBatch(ROOMY, max_running=2)
    batch.add([response(1, 10), response(2, 20), response(3, 5)], now_s=0.0)
    assert (batch.num_running, batch.num_waiting) == (2, 1)
    assert [key for key, _ in run_out(batch)] == [1, 3, 2]


def test_a_full_cache_makes_responses_wait_in_order() -> None:
    batch: DecodeBatch[int] = DecodeBatch(small(1000), max_running=8)
    batch.add([response(1, 50, prompt=600), response(2, 50, prompt=600), response(3, 50)], now_s=0.0)
    assert (batch.num_running, batch.num_waiting) == (1, 2)  # the third does not overtake
    assert [key for key, _ in run_out(batch)] == [1, 2, 3] or batch.num_preempted


def test_when_the_cache_is_full_the_youngest_is_computed_again_later() -> None:
    batch: DecodeBatch[int] = DecodeBatch(small(1000), max_running=8)
    batch.add([response(1, 500), response(2, 500)], now_s=0.0)
    ended = run_out(batch)
    assert batch.num_preempted == 1
    assert [key for key, _ in ended] == [1, 2]
    assert batch.generated_tokens == 1000  # no token is generated twice


def test_an_aborted_response_makes_room_at_once() -> None:
    batch: DecodeBatch[int] = DecodeBatch(ROOMY, max_running=1)
    batch.add([response(1, 1000), response(2, 10)], now_s=0.0)
    batch.abort([1, 99], now_s=0.1)
    assert (batch.num_running, batch.num_waiting) == (1, 0)
    assert [key for key, _ in run_out(batch)] == [2]


# --- against one that steps -----------------------------------------------------------------------------------------


@dataclass
class Stepper:
    """The same rules, token by token."""

    serving: Serving
    max_running: int
    clock_s: float = 0.0
    running: list[Response[int]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    waiting: list[Response[int]] = field(default_factory=list)
    ends: list[tuple[int, float]] = field(default_factory=list)

    @property
    def used(self) -> int:
        prompts = {each.prefix: each.prompt_tokens for each in self.running}
        return sum(prompts.values()) + sum(self.lengths[each.key] for each in self.running)

    def admit(self) -> None:
        capacity = self.serving.kv_capacity_tokens
        prefill_s = 0.0
        while self.waiting and len(self.running) < self.max_running:
            first = self.waiting[0]
            shared = any(each.prefix == first.prefix for each in self.running)
            new = self.lengths[first.key] + (0 if shared else first.prompt_tokens)
            needed = WATERMARK * capacity + len(self.running) + 1 if self.running else 1
            if capacity - self.used - new < needed:
                break
            prefill_s += self.serving.prefill_s(new, first.prompt_tokens if shared else 0) if new else 0.0
            self.running.append(self.waiting.pop(0))
        self.clock_s += prefill_s

    def run(self, responses: list[Response[int]]) -> None:
        self.waiting, self.lengths = list(responses), {each.key: each.length for each in responses}
        self.admit()
        while self.running:
            if self.used + len(self.running) > self.serving.kv_capacity_tokens:
                self.waiting.insert(0, self.running.pop())
                continue
            read = sum(each.prompt_tokens + self.lengths[each.key] for each in self.running)
            self.clock_s += self.serving.decode_cost(len(self.running)).step_s(read)
            for each in self.running:
                self.lengths[each.key] += 1
            done = [each for each in self.running if self.lengths[each.key] == each.end]
            if done:
                self.ends += sorted((each.key, self.clock_s) for each in done)
                self.running = [each for each in self.running if each not in done]
                if self.running and self.used + len(self.running) > self.serving.kv_capacity_tokens:
                    self.waiting.insert(0, self.running.pop())
                else:
                    self.admit()


@given(st.integers(0, 2**32))
def test_jumping_from_event_to_event_gives_the_same_ends_as_stepping(seed: int) -> None:
    rng = random.Random(seed)
    capacity, max_running = rng.choice([400, 700, 5000]), rng.randint(1, 6)
    responses = [
        response(key, end := rng.randint(1, 150), length=rng.randrange(end), prompt=100, prefix=rng.randint(0, 3))
        for key in range(rng.randint(1, 8))
    ]
    stepper = Stepper(small(capacity), max_running)
    stepper.run(responses)
    batch: DecodeBatch[int] = DecodeBatch(small(capacity), max_running)
    batch.add(responses, now_s=0.0)
    ended = run_out(batch)
    assert sorted(key for key, _ in ended) == sorted(key for key, _ in stepper.ends)
    assert dict(ended) == {key: pytest.approx(due_s) for key, due_s in stepper.ends}
    assert batch.kv_used_tokens == 0 and not batch.busy


@given(st.integers(0, 2**32))
def test_looking_more_often_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    responses = [response(key, rng.randint(1, 300)) for key in range(6)]
    alone: DecodeBatch[int] = DecodeBatch(small(800), 4)
    alone.add(responses, 0.0)
    watched: DecodeBatch[int] = DecodeBatch(small(800), 4)
    watched.add(responses, 0.0)
    expected = dict(run_out(alone))
    seen: dict[int, float] = {}
    now_s = 0.0
    while watched.busy:
        now_s += rng.uniform(0.0, 0.05)
        for end in watched.advance(now_s):
            seen[end.key] = end.due_s
            assert end.due_s <= now_s
        assert watched.kv_used_tokens <= watched.kv_capacity_tokens
    assert seen == {key: pytest.approx(due_s) for key, due_s in expected.items()}
