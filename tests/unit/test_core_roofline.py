"""Timings from data sheets, against values worked out by hand and against what the paper says of its machines."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.roofline import DecodeCost, Gpu, ModelShape, Serving, Training

PARAMS = tomllib.loads((Path(__file__).resolve().parents[2] / "benchmarks" / "paper_params.toml").read_text())

# Round numbers: 1 GB of weights, 1 MB of KV a token, 1 TB/s, 100 TFLOPS.
MODEL = ModelShape(
    num_parameters=5e8, num_layers=10, num_heads=100, num_kv_heads=25, head_size=1000, hidden_size=1000,
    bytes_per_value=2,
)  # fmt: skip
GPU = Gpu(memory_bytes=10e9, memory_bytes_per_s=1e12, flops_per_s=1e14, link_bytes_per_s=1e11, host_bytes_per_s=1e10)


def test_a_step_reads_all_weights_and_the_kv_of_all_responses() -> None:
    cost = Serving(MODEL, GPU).decode_cost(batch=4)
    assert MODEL.kv_bytes_per_token == 1_000_000
    assert cost.base_s == pytest.approx(1e-3)  # 1 GB at 1 TB/s
    assert cost.per_kv_token_s == pytest.approx(1e-6)  # 1 MB at 1 TB/s
    assert cost.step_s(2000) == pytest.approx(3e-3)


def test_above_the_bound_of_the_batch_arithmetic_takes_over() -> None:
    serving = Serving(MODEL, GPU)
    assert serving.batch_bound == 100  # 2 * 5e8 / 1e14 = 10 us a response, against 1 ms
    assert serving.decode_cost(100).base_s == pytest.approx(1e-3)
    assert serving.decode_cost(200).base_s == pytest.approx(2e-3)


def test_tensor_parallel_divides_reading_and_adds_all_reduces() -> None:
    gpu = replace(GPU, all_reduce_latency_s=1e-5, link_efficiency=0.5)
    cost = Serving(MODEL, gpu, tensor_parallel=4, step_overhead_s=2e-3).decode_cost(batch=50)
    # 2 layers' worth each of 10: (10 us + 1.5 * 50 * 1000 * 2 B / 50 GB/s = 3 us) * 20 = 260 us
    assert cost.base_s == pytest.approx(0.25e-3 + 0.26e-3 + 2e-3)
    assert cost.per_kv_token_s == pytest.approx(0.25e-6)


def test_the_cache_gets_what_the_weights_leave() -> None:
    assert Serving(MODEL, GPU, memory_share=0.9).kv_capacity_tokens == 8000  # (9 - 1) GB of 1 MB each
    assert Serving(MODEL, GPU, tensor_parallel=2, memory_share=0.9).kv_capacity_tokens == 17_000
    # 50 GPUs hold each of the 25 KV heads twice.
    assert Serving(MODEL, GPU, tensor_parallel=50, memory_share=0.9).kv_capacity_tokens == 224_500
    assert Serving(replace(MODEL, num_parameters=5e9), GPU).kv_capacity_tokens < 0


def test_prefill_is_arithmetic_and_its_attention_grows_with_the_square() -> None:
    serving = Serving(MODEL, GPU)
    # 2 * 5e8 * 1000 / 1e14 = 10 ms, and 2 * 10 * 100,000 * 1e6 / 1e14 = 20 ms of attention
    assert serving.prefill_s(1000) == pytest.approx(30e-3)
    assert serving.prefill_s(2000) == pytest.approx(20e-3 + 80e-3)
    assert serving.prefill_tokens_per_s == pytest.approx(100_000)


def test_new_weights_come_over_the_hosts_link() -> None:
    assert Serving(MODEL, GPU, tensor_parallel=2).load_s == pytest.approx(1e9 / 2 / 1e10)


def test_a_training_step_is_six_operations_a_parameter_and_token() -> None:
    training = Training(MODEL, GPU, num_gpus=8, model_flops_utilisation=0.5, update_overhead_s=0.25)
    # 6 * 5e8 * 1e6 / (8 * 0.5e14) = 7.5 s, and 4 updates
    assert training.step_s(1_000_000, num_updates=4) == pytest.approx(8.5)


def test_many_steps_at_once_take_as_long_as_one_by_one() -> None:
    cost = DecodeCost(0.01, 1e-6)
    one_by_one = sum(cost.step_s(5000 + 7 * step) for step in range(300))
    assert cost.steps_s(300, 5000, batch=7) == pytest.approx(one_by_one)


@given(
    st.floats(1e-5, 1e-1), st.floats(0, 1e-6), st.integers(0, 10**6), st.integers(1, 1000), st.integers(0, 20_000)
)  # fmt: skip
def test_steps_and_time_are_inverse(base_s: float, per_token_s: float, kv: int, batch: int, steps: int) -> None:
    cost = DecodeCost(base_s, per_token_s)
    assert cost.num_steps(cost.steps_s(steps, kv, batch), kv, batch) == steps
    if steps:
        assert cost.num_steps(cost.steps_s(steps, kv, batch) * (1 - 1e-9), kv, batch) == steps - 1


# --- the paper's machines -------------------------------------------------------------------------------------------


def h800(name: str, tensor_parallel: int) -> Serving:
    gpu: dict[str, Any] = dict(PARAMS["gpu"]["h800"])
    share, overhead = gpu.pop("memory_share"), gpu.pop("step_overhead_s")
    return Serving(ModelShape(**PARAMS["model"][name]), Gpu(**gpu), tensor_parallel, share, overhead)


@pytest.mark.parametrize(("name", "tp"), [("qwen2.5-7b", 1), ("qwen2.5-32b", 4)])
def test_a_small_decode_batch_takes_nearly_as_long_as_one_of_64(name: str, tp: int) -> None:
    """The paper's step 1, for 7B and 32B on H800s."""
    small, large = PARAMS["published"]["small_batch_like"]
    serving, context = h800(name, tp), 1000
    ratio = serving.decode_cost(large).step_s(large * context) / serving.decode_cost(small).step_s(small * context)
    assert 1.0 < ratio < 1.3
    assert serving.batch_bound >= large


def test_more_gpus_shorten_a_step_of_a_small_batch_only_a_little() -> None:
    """The paper's step 1: from 4 to 8 GPUs, far from half the time."""
    four, eight = (h800("qwen2.5-32b", tp).decode_cost(8).step_s(8 * 2000) for tp in (4, 8))
    assert 0.6 < eight / four < 1.0


def test_the_longest_trajectory_takes_about_as_long_as_published() -> None:
    """32B on 4 GPUs at the published mean KV use: 16,384 tokens in 828 s, queueing included; ours is the same order and
    not slower than theirs."""
    serving = h800("qwen2.5-32b", 4)
    kv = PARAMS["published"]["kv_before"] * serving.kv_capacity_tokens
    took_s = 16_384 * serving.decode_cost(128).step_s(kv)
    assert 0.4 < took_s / PARAMS["published"]["latency_max_s"] < 1.0


def test_models_have_the_sizes_on_their_cards() -> None:
    assert h800("qwen2.5-32b", 4).model.kv_bytes_per_token == 262_144
    assert h800("qwen2.5-7b", 1).model.kv_bytes_per_token == 57_344
    assert 800_000 < h800("qwen2.5-32b", 4).kv_capacity_tokens < 900_000
    for name, billions in (("qwen2.5-7b", 7.6), ("qwen2.5-32b", 32.8), ("qwen2.5-72b", 72.7)):
        assert PARAMS["model"][name]["num_parameters"] / 1e9 == pytest.approx(billions, abs=0.05)


def test_every_number_of_the_file_names_its_source() -> None:
    text = (Path(__file__).resolve().parents[2] / "benchmarks" / "paper_params.toml").read_text()
    sections = text.split("\n[")[1:]
    for section in sections:
        header, *lines = section.splitlines()
        if "# [" in header:
            continue  # one source for the whole section
        for line in lines:
            if "=" in line and not line.startswith("#") and not header.startswith("published"):
                assert "# [" in line, f"no source: {line}"
