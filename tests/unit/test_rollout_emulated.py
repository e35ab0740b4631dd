"""The emulated engine: its clock, its tokens, and the real process behind the interface of engines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from laminar.core.lengths import Lognormal, Recorded
from laminar.core.roofline import Gpu, ModelShape, Serving
from laminar.rollout.emulated_decoder import EmulatedClock, EmulatedDecoder
from laminar.rollout.emulated_tokens import TokenTape
from laminar.rollout.engine import ENGINES, EngineProcess, UnservableModel
from laminar.rollout.engine_messages import (
    Begin,
    EmulatedMachine,
    Ended,
    EngineRequest,
    LoadResult,
    LoadState,
    Progress,
    RequestKey,
    TokenBlock,
)
from laminar.wire.codec import pack_tokens, unpack_logprobs, unpack_tokens
from laminar.wire.spec import EngineType

EOS = 0
VOCABULARY = 50
# 1 ms for the weights, 1 us for a token of KV, 8000 tokens of cache.
MODEL = ModelShape(num_parameters=5e8, num_layers=10, num_heads=1, num_kv_heads=25, head_size=1000, hidden_size=1000)
GPU = Gpu(memory_bytes=10e9, memory_bytes_per_s=1e12, flops_per_s=1e14, link_bytes_per_s=1e11, host_bytes_per_s=1e10)
SERVING = Serving(MODEL, GPU, memory_share=0.9)


def machine(scale: float = 1.0, grain: int = 1, lengths: Lognormal | Recorded | None = None) -> EmulatedMachine:
    lengths = lengths or Recorded((40,))
    return EmulatedMachine(
        serving=SERVING, time_scale=scale, token_grain=grain,
        lognormal=lengths if isinstance(lengths, Lognormal) else None,
        recorded=lengths if isinstance(lengths, Recorded) else None,
    )  # fmt: skip


def tape() -> TokenTape:
    return TokenTape(range(VOCABULARY), EOS, 4000)


def request(name: str, *, seed: int = 1, response: bytes = b"", budget: int = 4000, term: int = 1) -> EngineRequest:
    return EngineRequest(
        key=RequestKey(name, term), prompt=pack_tokens([5] * 10), response=response, max_new_tokens=budget, seed=seed,
        temperature=1.0,
    )  # fmt: skip


class Hands:
    """A monotonic clock that tests set."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


def decoder(the_machine: EmulatedMachine) -> tuple[EmulatedDecoder, Hands]:
    hands = Hands()
    return EmulatedDecoder(the_machine, 64, 4000, tape(), EOS, EmulatedClock(the_machine.time_scale, hands)), hands


def drained(made: EmulatedDecoder) -> tuple[dict[str, list[int]], list[Ended]]:
    """Tokens by sample, and the ends."""
    made.advance()
    blocks, ended = made.take_ended()
    blocks += made.take_pending()
    return tokens_of(blocks), ended


def tokens_of(blocks: list[TokenBlock]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for block in blocks:
        tokens = unpack_tokens(block.tokens)
        assert len(unpack_logprobs(block.logprobs)) == len(tokens)
        found[block.key.sample] += tokens
    return dict(found)


def test_the_clock_goes_at_its_scale_and_stands_while_it_is_paused() -> None:
    hands = Hands()
    clock = EmulatedClock(60.0, hands)
    hands.at_s += 2.0
    assert clock.now_s() == pytest.approx(120.0)
    assert clock.real_until_s(150.0) == pytest.approx(0.5)
    clock.pause()
    hands.at_s += 5.0
    assert clock.now_s() == pytest.approx(120.0)
    clock.resume()
    hands.at_s += 1.0
    assert clock.now_s() == pytest.approx(180.0)


def test_tokens_depend_on_seed_and_index_alone() -> None:
    one, other = tape(), tape()
    whole = one.tokens(7, 0, 100)
    assert whole == other.tokens(7, 0, 30) + other.tokens(7, 30, 100)
    assert whole != one.tokens(8, 0, 100)
    assert EOS not in unpack_tokens(whole) and set(unpack_tokens(whole)) <= set(range(VOCABULARY))
    assert unpack_tokens(one.tokens(7, 90, 100, ended=True)) == [*unpack_tokens(whole[4 * 90 : 4 * 99]), EOS]


def test_a_response_ends_when_the_roofline_says() -> None:
    made, hands = decoder(machine(scale=10.0))
    made.add([request("a")])
    took_s = SERVING.prefill_s(10) + sum(1e-3 + 1e-6 * (10 + step) for step in range(40))
    hands.at_s += 0.999 * took_s / 10
    tokens, ended = drained(made)
    assert len(tokens["a"]) == 39 and not ended
    hands.at_s += 0.002 * took_s / 10
    tokens, ended = drained(made)
    assert [(end.length, end.reason) for end in ended] == [(40, "stop")] and tokens["a"][-1] == EOS
    assert 0 < made.take_load().late_s < 0.01 * took_s


def test_a_moved_response_continues_token_by_token_where_it_was() -> None:
    first, hands = decoder(machine(lengths=Lognormal(200, 5)))
    first.add([request("a", seed=11)])
    hands.at_s += 0.05
    begun, _ = drained(first)
    hands.at_s += 100.0
    rest, ended = drained(first)
    second, hands = decoder(machine(lengths=Lognormal(200, 5)))
    second.add([request("a", seed=11, response=pack_tokens(begun["a"]), term=2)])
    hands.at_s += 100.0
    continued, ended_there = drained(second)
    assert continued == rest and 0 < len(begun["a"]) < ended[0].length
    assert [(end.length, end.reason) for end in ended_there] == [(end.length, end.reason) for end in ended]


def test_the_budget_cuts_a_response() -> None:
    made, hands = decoder(machine())
    made.add([request("a", budget=15)])
    hands.at_s += 10.0
    tokens, ended = drained(made)
    assert [(end.length, end.reason) for end in ended] == [(15, "length")]
    assert len(tokens["a"]) == 15 and EOS not in tokens["a"]


DONE = [
    ("at its end", pack_tokens([3] * 39 + [EOS]), 4000, "stop", 40),
    ("at its budget", pack_tokens([3] * 15), 15, "length", 15),
    ("ended elsewhere earlier", pack_tokens([3, EOS]), 4000, "stop", 2),
]


@pytest.mark.parametrize(("response", "budget", "reason", "length"), [r[1:] for r in DONE], ids=[r[0] for r in DONE])
def test_what_has_nothing_left_to_generate_ends_at_once(response: bytes, budget: int, reason: str, length: int) -> None:
    made, _ = decoder(machine())
    made.add([request("a", response=response, budget=budget)])
    tokens, ended = drained(made)
    assert tokens == {} and [(end.reason, end.length) for end in ended] == [(reason, length)]


def test_a_prompt_that_does_not_fit_is_an_error() -> None:
    made, _ = decoder(machine(grain=500))  # room for 16 tokens of the run
    assert made.max_length == 16
    long = EngineRequest(
        key=RequestKey("a", 1), prompt=pack_tokens([5] * 16), max_new_tokens=5, seed=1, temperature=1.0
    )
    made.add([long])
    _, ended = drained(made)
    assert [end.reason for end in ended] == ["error"] and "16" in ended[0].detail


def test_with_a_grain_one_token_stands_for_many() -> None:
    made, hands = decoder(machine(grain=8, lengths=Recorded((100,))))
    made.add([request("a")])
    assert made.take_load().kv_used_tokens == 10
    steps_s = sum(1e-3 + 1e-6 * (80 + step) for step in range(50))
    hands.at_s += SERVING.prefill_s(80) + steps_s + 5e-4
    tokens, _ = drained(made)
    assert len(tokens["a"]) == 50 // 8
    hands.at_s += 10.0
    _, ended = drained(made)
    assert [end.length for end in ended] == [13]  # 100 tokens in eights, rounded up


def test_an_aborted_response_is_forgotten() -> None:
    made, hands = decoder(machine())
    made.add([request("a"), request("b", seed=2)])
    made.abort([RequestKey("a", 1), RequestKey("nobody", 1)])
    hands.at_s += 10.0
    tokens, ended = drained(made)
    assert list(tokens) == ["b"] and [end.key.sample for end in ended] == ["b"]
    load = made.take_load()
    assert (load.running, load.waiting, load.kv_used_tokens, load.generated_tokens) == (0, 0, 0, 40)
    assert made.take_load() == LoadState(generated_tokens=40, kv_capacity_tokens=8000)


# --- the process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, "t1")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return tmp_path


@asynccontextmanager
async def engine(folder: Path, the_machine: EmulatedMachine) -> AsyncIterator[EngineProcess]:
    spawned = await EngineProcess.spawn(ENGINES[EngineType.EMULATED])
    try:
        await spawned.start(Begin(model_folder=str(folder), max_running=64, max_length=4000, emulated=the_machine))
        yield spawned
    finally:
        await spawned.kill()


async def until(engine_: EngineProcess, done: Callable[[Progress], bool]) -> Progress:
    async with asyncio.timeout(30):
        while True:
            event = await engine_.next_event()
            assert not isinstance(event, LoadResult)
            if isinstance(event, Progress) and done(event):
                return event


def test_the_process_generates_nothing_before_a_version_is_loaded(model_folder: Path) -> None:
    async def scene() -> None:
        async with engine(model_folder, machine()) as engine_:
            engine_.add([request("a")])
            progress = await until(engine_, lambda progress: bool(progress.ended))
            assert [end.reason for end in progress.ended] == ["error"]

    asyncio.run(scene())


def test_a_model_that_does_not_fit_the_gpus_is_refused(model_folder: Path) -> None:
    async def scene() -> None:
        tight = EmulatedMachine(
            serving=Serving(ModelShape(5e9, 10, 1, 25, 1000, 1000), GPU), time_scale=1.0, token_grain=1,
            recorded=Recorded((1,)),
        )  # fmt: skip
        with pytest.raises(UnservableModel, match="gpusPerReplica"):
            async with engine(model_folder, tight):
                pass

    asyncio.run(scene())


def test_the_process_loads_neither_torch_nor_numpy(model_folder: Path) -> None:
    code = (
        "import sys, laminar.rollout.emulated_loop; "
        "sys.exit(' '.join(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules))) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_thousands_of_responses_take_a_small_part_of_a_core() -> None:
    """1,024 responses on 4 replicas, one minute of which is an hour."""
    hands = Hands()
    paced, tape_ = machine(60.0, grain=8, lengths=Lognormal(160, 10)), tape()
    decoders = [EmulatedDecoder(paced, 512, 600, tape_, EOS, EmulatedClock(60.0, hands)) for _ in range(4)]
    for number, made in enumerate(decoders):
        made.add([request(f"{number}/{i}", seed=1000 * number + i, budget=256) for i in range(256)])
    begun_s = time.process_time()
    num_ended = 0
    for _ in range(240):
        hands.at_s += 0.25
        for made in decoders:
            num_ended += len(drained(made)[1])
    used_s = time.process_time() - begun_s
    assert num_ended == 1024
    # It takes a twentieth of a second on an idle core; a loop over tokens would take minutes.
    assert used_s < 6
