"""Copies, shards of a trainer, and the two coverage reports: by name and by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.reshard import (
    Copy,
    Extent,
    MissingTensors,
    NothingMatched,
    Piece,
    Runs,
    Tally,
    TensorSpec,
    UnfitTensors,
    UnknownTensors,
    Window,
    copy_rectangle,
    match_names,
    plan_shard,
    shard_range,
    sources_of,
    tally,
    targets_of,
)


def tensor(name: str = "w", *shape: int, item_bytes: int = 2) -> TensorSpec:
    return TensorSpec(name, "BF16", item_bytes, shape)


def test_whole_rows_on_both_sides_are_one_run() -> None:
    copy = copy_rectangle("a", Window(8, 2), "b", Window(8, 5), 3, 8)
    assert copy == Copy("a", 16, "b", 40, 24)
    assert list(copy.segments()) == [(16, 40, 24)]


def test_a_part_of_each_row_is_a_strided_copy_and_its_inverse_goes_back() -> None:
    copy = copy_rectangle("a", Window(8, 0, 4), "b", Window(4, 1), 3, 4)
    assert copy == Copy("a", 4, "b", 4, 4, Runs(3, 8, 4))
    assert list(copy.segments()) == [(4, 4, 4), (12, 8, 4), (20, 12, 4)]
    assert list(copy.inverse().segments()) == [(4, 4, 4), (8, 12, 4), (12, 20, 4)]
    assert copy.inverse().inverse() == copy


def test_a_part_of_a_single_row_is_one_run() -> None:
    assert copy_rectangle("a", Window(8, 3, 4), "b", Window(4, 0), 1, 4).runs == Runs()


def test_the_last_shard_is_short_and_ranks_behind_it_are_empty() -> None:
    assert [shard_range(tensor("w", 5, 3), rank, 4) for rank in range(4)] == [(0, 12), (12, 24), (24, 30), (30, 30)]
    assert [shard_range(tensor("w", 2), rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 4)]


def test_a_scalar_and_a_rank_outside_the_world_are_refused() -> None:
    with pytest.raises(UnfitTensors, match="scale is a scalar"):
        shard_range(tensor("scale"), 0, 2)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        shard_range(tensor("w", 4), 2, 2)


def test_a_piece_that_straddles_shards_is_sent_by_each_rank_in_part() -> None:
    fused = tensor("gate_up", 6, 2)  # 4 bytes a row
    pieces = [Piece(fused, 0, tensor("gate", 3, 2)), Piece(fused, 12, tensor("up", 3, 2))]
    assert plan_shard(pieces, 0, 2).copies == (Copy("gate_up", 0, "gate", 0, 12),)
    assert plan_shard(pieces, 1, 4).copies == (Copy("gate_up", 0, "gate", 8, 4), Copy("gate_up", 4, "up", 0, 4))
    assert plan_shard(pieces, 3, 4).copies == ()


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=5),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    world=st.integers(1, 9),
)
def test_the_ranks_together_send_each_byte_once_and_no_rank_sends_a_byte_it_lacks(
    shapes: list[list[int]], item_bytes: int, world: int
) -> None:
    tensors = [tensor(f"t{index}", *shape, item_bytes=item_bytes) for index, shape in enumerate(shapes)]
    plans = [plan_shard([Piece(t, 0, t) for t in tensors], rank, world) for rank in range(world)]
    assert sum(plan.total_bytes for plan in plans) == sum(t.nbytes for t in tensors)
    written = targets_of(copy for plan in plans for copy in plan.copies)
    for t in tensors:
        assert tally(written.get(t.name, []), t.nbytes) == Tally(0, 0)
    for plan in plans:
        assert all(copy.runs.count == 1 for copy in plan.copies)
        for name, extents in sources_of(plan.copies).items():
            start, end = shard_range(next(t for t in tensors if t.name == name), plan.rank, world)
            assert tally(extents, end - start) == Tally(0, 0)


KNOWN = {"model.norm.weight": (4,), "lm_head.weight": (8, 4)}


def offered(**renamed: str) -> list[TensorSpec]:
    return [tensor(renamed.get(name.split(".")[0], name), *shape) for name, shape in KNOWN.items()]


def test_all_known_names_match() -> None:
    assert list(match_names(KNOWN, offered(), tied={}, exempt={})) == list(KNOWN)


def test_one_renamed_layer_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(UnknownTensors, match=r"1 tensors have unknown names: model\.norms\.weight") as told:
        match_names(KNOWN, offered(model="model.norms.weight"), tied={}, exempt={})
    assert "(nearest: model.norm.weight)" in str(told.value)
    assert "1 parameters are missing: model.norm.weight" in str(told.value)


def test_an_extra_tensor_is_an_error_too() -> None:
    with pytest.raises(UnknownTensors, match="nothing is near it"):
        match_names(KNOWN, [*offered(), tensor("zzz", 1)], tied={}, exempt={})


def test_a_missing_parameter_is_an_error() -> None:
    with pytest.raises(MissingTensors, match=r"1 parameters of 2 are not there: lm_head\.weight"):
        match_names(KNOWN, offered()[:1], tied={}, exempt={})


@pytest.mark.parametrize("names", [[], ["transformer.norm.weight"], ["tied"]])
def test_no_match_at_all_is_an_error_of_its_own(names: list[str]) -> None:
    with pytest.raises(NothingMatched, match="none of 2 parameters"):
        match_names(KNOWN, [tensor(name, 1) for name in names], tied={"tied": "lm_head.weight"}, exempt={})


def test_thousands_of_unknown_names_are_counted_and_five_are_told() -> None:
    with pytest.raises(NothingMatched) as told:
        match_names(KNOWN, [tensor(f"layer{index}.norm", 1) for index in range(5000)], tied={}, exempt={})
    assert "and 4995 more" in str(told.value) and len(str(told.value)) < 1000


def test_another_shape_and_a_double_are_errors() -> None:
    with pytest.raises(UnfitTensors, match=r"model\.norm\.weight has shape \[5\], not \[4\]"):
        match_names(KNOWN, [tensor("model.norm.weight", 5), *offered()[1:]], tied={}, exempt={})
    with pytest.raises(UnfitTensors, match=r"listed twice: lm_head\.weight"):
        match_names(KNOWN, [*offered(), offered()[1]], tied={}, exempt={})


def test_tied_and_exempt_names_are_left_out_and_no_alarm() -> None:
    extra = [tensor("head", 8, 4), tensor("inv_freq", 2)]
    found = match_names(KNOWN, offered() + extra, tied={"head": "x"}, exempt={"inv_freq": "computed"})
    assert list(found) == list(KNOWN)


extents = st.builds(
    Extent, st.integers(0, 20), st.integers(1, 6), st.integers(1, 4), st.sampled_from([0, 4, 6, 8])
).map(lambda e: e if e.count > 1 and e.stride else Extent(e.offset, e.nbytes))


@given(st.lists(extents, max_size=6), st.integers(0, 3), st.sampled_from([4, 6, 8]), st.booleans())
def test_a_tally_is_what_counting_byte_by_byte_gives(found: list[Extent], more: int, stride: int, rows: bool) -> None:
    if rows:  # the same rows for all: the short cut
        found = [Extent(e.offset % stride, min(e.nbytes, stride - e.offset % stride), 4, stride) for e in found]
    last = max((e.offset + (e.count - 1) * e.stride + e.nbytes for e in found), default=0)
    total = 4 * stride if rows else last + more
    counts = [0] * total
    for extent in found:
        for run in range(extent.count):
            start = extent.offset + run * extent.stride
            for byte in range(start, start + extent.nbytes):
                counts[byte] += 1
    assert tally(found, total) == Tally(counts.count(0), sum(max(count - 1, 0) for count in counts))
