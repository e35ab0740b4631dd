"""The pipeline's formulas."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.broadcast import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    LinkMeter,
    best_num_chunks,
    best_s,
    chunk_bytes,
    pipeline_s,
)

nodes = st.integers(2, 200)
sizes = st.integers(1, 200 << 30)
byte_times = st.floats(1e-11, 1e-6)
message_times = st.floats(1e-6, 0.1)


def test_two_nodes_need_one_chunk_up_to_the_limit() -> None:
    assert best_num_chunks(2, 10 << 20, 1e-9, 5e-3) == 1
    assert chunk_bytes(2, 10 << 20, 1e-9, 5e-3) == 10 << 20
    assert chunk_bytes(2, 10 << 30, 1e-9, 5e-3) == MAX_CHUNK_BYTES


def test_small_weights_go_in_one_chunk() -> None:
    assert chunk_bytes(16, 1000, 1e-9, 5e-3) == MIN_CHUNK_BYTES


def test_the_worked_example_of_a_paced_link() -> None:
    # 64 MiB at 400 MB/s, 5 ms a message, 4 nodes: W T_b = 167.8 ms, T* = 167.8 + 10 + 2 sqrt(2 * 167.8 * 5)
    assert best_s(4, 64 << 20, 1 / 400e6, 5e-3) == pytest.approx(
        0.1678 + 0.010 + 2 * math.sqrt(2 * 0.1678 * 0.005), rel=1e-3
    )


@given(nodes, sizes, byte_times, message_times, st.integers(1, 10_000))
def test_no_number_of_chunks_beats_the_best_time(p: int, size: int, byte_s: float, message_s: float, k: int) -> None:
    assert pipeline_s(p, size, byte_s, message_s, k) >= best_s(p, size, byte_s, message_s) * (1 - 1e-9)


@given(st.integers(3, 200), sizes, byte_times, message_times)
def test_the_best_number_of_chunks_reaches_the_best_time(p: int, size: int, byte_s: float, message_s: float) -> None:
    best = best_num_chunks(p, size, byte_s, message_s)
    if best < 2:
        return
    rounded = min(pipeline_s(p, size, byte_s, message_s, k) for k in (math.floor(best), math.ceil(best)))
    assert rounded <= best_s(p, size, byte_s, message_s) * 1.13  # rounding to whole chunks costs most at 1 to 2 chunks


@given(st.integers(1, 200), sizes, byte_times, st.floats(0, 0.1))
def test_chunks_stay_within_their_limits(p: int, size: int, byte_s: float, message_s: float) -> None:
    assert MIN_CHUNK_BYTES <= chunk_bytes(p, size, byte_s, message_s) <= MAX_CHUNK_BYTES


def test_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="num_nodes=0"):
        best_s(0, 1, 1e-9, 1e-3)


def test_a_link_of_known_times_is_measured_as_such() -> None:
    meter, message_s, byte_s = LinkMeter(), 5e-3, 1 / 50e6
    for jitter_s in (0.0, 0.003, 0.001):
        meter.message(message_s + jitter_s)
        meter.version(32 << 20, 31, 31 * message_s + (32 << 20) * byte_s + jitter_s)
    assert meter.message_s == pytest.approx(message_s)
    assert meter.byte_s == pytest.approx(byte_s)
    assert meter.chunk_bytes(8, 64 << 20) == chunk_bytes(8, 64 << 20, meter.byte_s, meter.message_s)


def test_a_slower_link_further_down_is_the_one_that_counts() -> None:
    meter = LinkMeter()
    meter.message(1e-4)
    meter.version(1 << 20, 1, 1e-3)
    meter.told(1e-6, 2e-3)
    assert (meter.byte_s, meter.message_s) == (1e-6, 2e-3)


def test_a_first_exchange_that_took_long_is_forgotten_and_never_hides_the_cost_of_a_byte_for_good() -> None:
    meter = LinkMeter()
    meter.message(0.3)
    meter.version(64 << 20, 64, 1.4)
    assert meter.byte_s == pytest.approx(1 / 50e9)
    for _ in range(8):
        meter.message(1e-3)
        meter.version(64 << 20, 64, 1.4)
    assert meter.byte_s == pytest.approx((1.4 - 64e-3) / (64 << 20))


def test_nothing_measured_gives_no_advice() -> None:
    assert LinkMeter().chunk_bytes(8, 64 << 20) == 0
