"""Versions onto the ranks of an engine: against slicing by hand, and there and back again byte for byte."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.core.reshard import (
    Copy,
    MissingTensors,
    NothingMatched,
    TensorSpec,
    UnfitTensors,
    UnknownTensors,
    plan_shard,
    shard_range,
)
from laminar.core.reshard_layout import (
    Indivisible,
    Parallel,
    RankPlan,
    check_engine,
    plan_engine,
    plan_rank,
    plan_return,
)
from laminar.core.reshard_models import Attention, Experts, Model, trainer_pieces, version_shapes

HEAD_DIM = 3
DENSE = Model(
    num_layers=1, hidden_size=5, vocab_size=70, tied_embeddings=False, attention=Attention(8, 2, HEAD_DIM),
    intermediate_size=16,
)  # fmt: skip
QWEN_EXPERTS = Experts(8, 16, "mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = Experts(8, 16, "block_sparse_moe", "w1", "w3", "w2")
LAYER = "model.layers.0"


def version_of(model: Model, item_bytes: int = 2) -> list[TensorSpec]:
    return [TensorSpec(name, "BF16", item_bytes, shape) for name, shape in version_shapes(model).items()]


def filled(tensors: Iterable[TensorSpec], seed: int = 0) -> dict[str, bytearray]:
    chance = random.Random(seed)
    return {tensor.name: bytearray(chance.randbytes(tensor.nbytes)) for tensor in tensors}


def execute(copies: Iterable[Copy], sources: Mapping[str, bytearray], targets: Mapping[str, bytearray]) -> None:
    """The dumb executor: it knows bytes, offsets and nothing else."""
    for copy in copies:
        for src, dst, nbytes in copy.segments():
            piece = sources[copy.tensor][src : src + nbytes]
            assert len(piece) == nbytes and dst + nbytes <= len(targets[copy.dst_tensor])
            targets[copy.dst_tensor][dst : dst + nbytes] = piece


def zeroed(tensors: Iterable[TensorSpec]) -> dict[str, bytearray]:
    return {tensor.name: bytearray(tensor.nbytes) for tensor in tensors}


def loaded(plan: RankPlan, source: Mapping[str, bytearray]) -> dict[str, np.ndarray]:
    """A rank's tensors after the load, as arrays of 16-bit items."""
    memory = zeroed(plan.targets)
    execute(plan.copies, source, memory)
    return {t.name: np.frombuffer(memory[t.name], np.uint16).reshape(t.shape) for t in plan.targets}


def arrays(model: Model, source: Mapping[str, bytearray]) -> dict[str, np.ndarray]:
    return {n: np.frombuffer(source[n], np.uint16).reshape(shape) for n, shape in version_shapes(model).items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_dense_rank_holds_its_heads_its_columns_and_its_words(tp: int) -> None:
    source = filled(version_of(DENSE))
    full = arrays(DENSE, source)
    for plan in plan_engine(DENSE, Parallel(tp), version_of(DENSE)):
        r = plan.rank
        got = loaded(plan, source)
        heads = [full[f"{LAYER}.self_attn.{n}_proj.weight"].reshape(-1, HEAD_DIM, 5) for n in "qkv"]
        mine = [range(r * 8 // tp, (r + 1) * 8 // tp)] + [
            range(r * 2 // tp, max((r + 1) * 2 // tp, r * 2 // tp + 1))
        ] * 2
        stacked = np.concatenate([head[list(which)].reshape(-1, 5) for head, which in zip(heads, mine, strict=True)])
        assert np.array_equal(got[f"{LAYER}.self_attn.qkv_proj.weight"], stacked)
        output = np.split(full[f"{LAYER}.self_attn.o_proj.weight"], tp, axis=1)[r]
        assert np.array_equal(got[f"{LAYER}.self_attn.o_proj.weight"], output)
        gate, up = (np.split(full[f"{LAYER}.mlp.{n}_proj.weight"], tp)[r] for n in ("gate", "up"))
        assert np.array_equal(got[f"{LAYER}.mlp.gate_up_proj.weight"], np.concatenate([gate, up]))
        down = np.split(full[f"{LAYER}.mlp.down_proj.weight"], tp, axis=1)[r]
        assert np.array_equal(got[f"{LAYER}.mlp.down_proj.weight"], down)
        for table in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = np.zeros((128, 5), np.uint16)
            padded[:70] = full[table]
            assert np.array_equal(got[table], np.split(padded, tp)[r])
        assert np.array_equal(got["model.norm.weight"], full["model.norm.weight"])


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("experts", [QWEN_EXPERTS, MIXTRAL_EXPERTS], ids=["qwen3Moe", "mixtral"])
def test_an_expert_rank_holds_its_experts_gate_above_up(tp: int, ep: int, experts: Experts) -> None:
    model = replace(DENSE, experts=experts)
    source = filled(version_of(model))
    full = arrays(model, source)
    prefix = f"{LAYER}.{experts.block}"
    for plan in plan_engine(model, Parallel(tp, ep), version_of(model)):
        got = loaded(plan, source)
        group, inside = divmod(plan.rank, tp // ep)
        w13, w2 = [], []
        for expert in range(group * 8 // ep, (group + 1) * 8 // ep):
            whole = {n: full[f"{prefix}.experts.{expert}.{n}.weight"] for n in (experts.gate, experts.up, experts.down)}
            gate_up = [np.split(whole[name], tp // ep)[inside] for name in (experts.gate, experts.up)]
            w13.append(np.concatenate(gate_up))
            w2.append(np.split(whole[experts.down], tp // ep, axis=1)[inside])
        assert np.array_equal(got[f"{prefix}.experts.w13_weight"], np.stack(w13))
        assert np.array_equal(got[f"{prefix}.experts.w2_weight"], np.stack(w2))
        assert np.array_equal(got[f"{prefix}.gate.weight"], full[f"{prefix}.gate.weight"])


def test_neighbours_hold_the_same_kv_head_when_there_are_fewer_heads_than_ranks() -> None:
    plans = plan_engine(DENSE, Parallel(8), version_of(DENSE))
    name = f"{LAYER}.self_attn.k_proj.weight"
    first_bytes = [copy.src_offset for plan in plans for copy in plan.copies if copy.tensor == name]
    head_bytes = HEAD_DIM * 5 * 2
    assert first_bytes == [0] * 4 + [head_bytes] * 4


def test_ranks_behind_the_vocabulary_hold_padding_only() -> None:
    model = replace(DENSE, vocab_size=65)
    plan = plan_rank(model, Parallel(8), 6, version_of(model))
    assert [(p.tensor, p.offset, p.nbytes) for p in plan.padding] == [
        ("model.embed_tokens.weight", 0, 160), ("lm_head.weight", 0, 160)
    ]  # fmt: skip
    assert plan.coverage.updated["lm_head.weight"] == ()


def test_only_split_columns_are_strided_and_one_rank_alone_has_no_strides() -> None:
    model = replace(DENSE, experts=QWEN_EXPERTS)
    alone = plan_rank(model, Parallel(1), 0, version_of(model))
    assert all(copy.runs.count == 1 for copy in alone.copies)
    shared = plan_rank(model, Parallel(2), 1, version_of(model))
    strided = {copy.tensor.split(".")[-2] for copy in shared.copies if copy.runs.count > 1}
    assert strided == {"o_proj", "down_proj"}
    whole_experts = plan_rank(model, Parallel(2, ep=2), 1, version_of(model))
    assert {copy.tensor.split(".")[-2] for copy in whole_experts.copies if copy.runs.count > 1} == {"o_proj"}


def test_writes_of_a_rank_are_contiguous_so_no_two_runs_could_be_one() -> None:
    model = replace(DENSE, experts=MIXTRAL_EXPERTS)
    for plan in plan_engine(model, Parallel(4, ep=2), version_of(model)):
        for copy in plan.copies:
            assert copy.runs.count == 1 or copy.runs.dst_stride == copy.nbytes
            assert copy.runs.count == 1 or copy.runs.src_stride > copy.nbytes
        assert len({copy.tensor for copy in plan.copies}) == len(plan.copies)


@pytest.mark.parametrize(
    ("model", "parallel", "told"),
    [
        (replace(DENSE, attention=Attention(4, 2, HEAD_DIM)), Parallel(8), r"q_proj\.weight: 4 can't be split"),
        (replace(DENSE, attention=Attention(12, 3, HEAD_DIM)), Parallel(2), r"k_proj\.weight: 3 can't be split"),
        (replace(DENSE, attention=Attention(12, 3, HEAD_DIM)), Parallel(4), r"k_proj\.weight: 4 can't be split"),
        (replace(DENSE, intermediate_size=18), Parallel(4), r"gate_proj\.weight: 18 can't be split evenly by 4"),
        (replace(DENSE, vocab_size=9), Parallel(2, vocab_pad=3), "padded to 9 rows,: 9 can't be split evenly by 2"),
        (replace(DENSE, experts=replace(QWEN_EXPERTS, num_experts=6)), Parallel(4, 4), "experts of .*: 6 can't"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_name(model: Model, parallel: Parallel, told: str) -> None:
    with pytest.raises(Indivisible, match=told):
        plan_rank(model, parallel, 0, version_of(model))


def test_ranks_and_groups_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="ep divides tp"):
        Parallel(4, ep=3)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        plan_rank(DENSE, Parallel(2), 2, version_of(DENSE))


def test_parts_of_one_tensor_in_two_dtypes_are_refused() -> None:
    version = [replace(t, dtype="F16") if "k_proj" in t.name else t for t in version_of(DENSE)]
    with pytest.raises(UnfitTensors, match=r"qkv_proj\.weight is made of tensors of several dtypes"):
        plan_rank(DENSE, Parallel(1), 0, version)


def test_a_version_with_a_renamed_layer_is_refused_with_the_nearest_name() -> None:
    version = [replace(t, name=t.name.replace("o_proj", "out_proj")) for t in version_of(DENSE)]
    with pytest.raises(UnknownTensors, match=r"out_proj\.weight \(nearest: .*self_attn\.o_proj\.weight"):
        plan_rank(DENSE, Parallel(1), 0, version)


def test_a_version_under_another_prefix_matches_nothing() -> None:
    version = [replace(t, name=f"module.{t.name}") for t in version_of(DENSE)]
    with pytest.raises(NothingMatched, match=r"module\.model\.embed_tokens\.weight \(nearest: model\.embed_tokens"):
        plan_rank(DENSE, Parallel(1), 0, version)


def test_a_tied_head_is_named_as_tied_whether_listed_or_not() -> None:
    tied = replace(DENSE, tied_embeddings=True)
    plain = plan_rank(tied, Parallel(2), 0, version_of(tied))
    listed = plan_rank(tied, Parallel(2), 0, version_of(DENSE))
    assert plain == listed
    assert plain.coverage.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in {target.name for target in plain.targets}


def test_a_head_that_is_not_tied_must_be_there() -> None:
    with pytest.raises(MissingTensors, match=r"lm_head\.weight"):
        plan_rank(DENSE, Parallel(1), 0, version_of(replace(DENSE, tied_embeddings=True)))


def test_computed_buffers_of_old_checkpoints_are_named_as_exempt() -> None:
    buffer = TensorSpec(f"{LAYER}.self_attn.rotary_emb.inv_freq", "F32", 4, (2,))
    plan = plan_rank(DENSE, Parallel(1), 0, [*version_of(DENSE), buffer])
    assert plan.coverage.exempt == {buffer.name: "computed from the configuration"}


def test_an_engine_whose_parameters_are_all_planned_is_covered() -> None:
    plan = plan_rank(replace(DENSE, tied_embeddings=True), Parallel(2), 0, version_of(DENSE))
    head = TensorSpec("lm_head.weight", "BF16", 2, (64, 5))
    scale = TensorSpec(f"{LAYER}.self_attn.attn.k_scale", "F32", 4, ())
    report = check_engine(plan, [*plan.targets, head, scale], {scale.name: "KV scale, constant 1"})
    qkv = [f"{LAYER}.self_attn.{letter}_proj.weight" for letter in "qkv"]
    assert report.updated[f"{LAYER}.self_attn.qkv_proj.weight"] == tuple(qkv)
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.exempt == {scale.name: "KV scale, constant 1"}


def test_an_engine_parameter_that_the_plan_does_not_write_is_an_error() -> None:
    plan = plan_rank(DENSE, Parallel(2), 0, version_of(DENSE))
    extra = TensorSpec(f"{LAYER}.self_attn.q_norm.weight", "BF16", 2, (3,))
    with pytest.raises(UnknownTensors, match="q_norm"):
        check_engine(plan, [*plan.targets, extra])
    with pytest.raises(MissingTensors, match="embed_tokens"):
        check_engine(plan, plan.targets[1:])
    with pytest.raises(UnfitTensors, match="F32 in the engine and BF16 in the version"):
        check_engine(plan, [replace(plan.targets[0], dtype="F32", item_bytes=4), *plan.targets[1:]])


# ------------------------------------------------------------------------------------------------ there and back


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, Parallel]:
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, tp) * draw(st.integers(1, 2))
    experts = None
    ep = 1
    inner = tp * draw(st.integers(1, 3))
    if draw(st.booleans()):
        ep = draw(st.sampled_from([size for size in (1, 2, 4, 8) if size <= tp]))
        dense_layers = frozenset(draw(st.sets(st.integers(0, 1))))
        style = draw(st.sampled_from([QWEN_EXPERTS, MIXTRAL_EXPERTS]))
        experts = replace(
            style, num_experts=ep * draw(st.integers(1, 3)), intermediate_size=inner, dense_layers=dense_layers
        )
    attention = Attention(
        heads, kv_heads, draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    )
    model = Model(
        num_layers=draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 9)),
        vocab_size=draw(st.integers(1, 70)),
        tied_embeddings=draw(st.booleans()),
        attention=attention,
        intermediate_size=tp * draw(st.integers(1, 3)),
        mlp_bias=experts is None and draw(st.booleans()),
        experts=experts,
    )
    return model, Parallel(tp, ep, vocab_pad=tp * draw(st.integers(1, 4)))


def live_parameters(model: Model, item_bytes: int, *, stacked: bool) -> list[TensorSpec]:
    """As a live transformers model has them: experts apart (version 4) or stacked (version 5)."""
    version = version_of(model, item_bytes)
    experts = model.experts
    if experts is None or not stacked:
        return version
    kept = [
        replace(t, name=t.name.replace(f".{experts.block}.", ".mlp.")) for t in version if ".experts." not in t.name
    ]
    for layer in set(range(model.num_layers)) - experts.dense_layers:
        name = f"model.layers.{layer}.mlp.experts"
        inner, hidden, count = experts.intermediate_size, model.hidden_size, experts.num_experts
        kept.append(TensorSpec(f"{name}.gate_up_proj", "BF16", item_bytes, (count, 2 * inner, hidden)))
        kept.append(TensorSpec(f"{name}.down_proj", "BF16", item_bytes, (count, hidden, inner)))
    return kept


def gather(model: Model, parameters: Sequence[TensorSpec], world: int, live: Mapping[str, bytearray]):
    """Cuts the live parameters into shards and puts the version together from what each rank sends."""
    pieces = trainer_pieces(model, parameters)
    version = zeroed(piece.target for piece in pieces)
    for rank in range(world):
        shards = {t.name: live[t.name][slice(*shard_range(t, rank, world))] for t in parameters}
        execute(plan_shard(pieces, rank, world).copies, shards, version)
    return [piece.target for piece in pieces], version


@settings(max_examples=60, deadline=None)
@given(
    choice=models(),
    item_bytes=st.sampled_from([1, 2, 4]),
    world=st.integers(1, 9),
    stacked=st.booleans(),
    seed=st.integers(0, 9),
)
def test_shards_to_version_to_ranks_and_back_is_the_same_byte_for_byte(
    choice: tuple[Model, Parallel], item_bytes: int, world: int, stacked: bool, seed: int
) -> None:
    model, parallel = choice
    parameters = live_parameters(model, item_bytes, stacked=stacked)
    live = filled(parameters, seed)
    version, full = gather(model, parameters, world, live)

    plans = plan_engine(model, parallel, version)
    ranks = [zeroed(plan.targets) for plan in plans]
    for plan, memory in zip(plans, ranks, strict=True):
        execute(plan.copies, full, memory)
    again = zeroed(version)
    back = plan_return(plans)
    for copies, memory in zip(back, ranks, strict=True):
        execute(copies, memory, again)
    assert again == full
    assert sum(copy.total_bytes for copies in back for copy in copies) == sum(t.nbytes for t in version)

    # And from the version to the trainer's parameters: no byte of them was left behind.
    whole = zeroed(parameters)
    for piece in trainer_pieces(model, parameters):
        whole[piece.source.name][piece.offset : piece.offset + piece.target.nbytes] = again[piece.target.name]
    assert whole == live
