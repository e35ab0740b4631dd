"""The tables of known architectures against the real ones: live models and the folders that they save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from laminar.core.reshard import TensorSpec, UnknownTensors, shard_range
from laminar.core.reshard_layout import Parallel, plan_engine, plan_rank
from laminar.core.reshard_models import Architecture, UnfitModel, model_from_config, trainer_pieces, version_shapes

SIZES = {
    "vocab_size": 33, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
QWEN3 = {"head_dim": 6}
QWEN3_MOE = {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
REAL: list[tuple[str, type, dict[str, Any]]] = [
    ("llama", transformers.LlamaConfig, {}),
    ("llamaBiased", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    ("qwen2", transformers.Qwen2Config, {}),
    ("qwen2Tied", transformers.Qwen2Config, {"tie_word_embeddings": True}),
    ("qwen3", transformers.Qwen3Config, QWEN3),
    ("qwen3Biased", transformers.Qwen3Config, {**QWEN3, "attention_bias": True}),
    ("qwen3Moe", transformers.Qwen3MoeConfig, QWEN3_MOE),
    ("qwen3MoePartly", transformers.Qwen3MoeConfig, {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    ("qwen3MoeListed", transformers.Qwen3MoeConfig, {**QWEN3_MOE, "mlp_only_layers": [1]}),
    ("mixtral", transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("config_type", "more"), [entry[1:] for entry in REAL], ids=[entry[0] for entry in REAL])
def test_a_live_model_becomes_the_checkpoint_that_it_saves_byte_for_byte(
    config_type: Any, more: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    live: Any = transformers.AutoModelForCausalLM.from_config(config_type(**{**SIZES, **more}))
    live.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    model = model_from_config(json.loads((tmp_path / "config.json").read_text()))
    assert version_shapes(model) == {name: tuple(tensor.shape) for name, tensor in saved.items()}

    parameters = {name: parameter.detach() for name, parameter in live.named_parameters()}
    specs = [TensorSpec(name, "F32", 4, tuple(tensor.shape)) for name, tensor in parameters.items()]
    pieces = trainer_pieces(model, specs)
    for piece in pieces:
        flat = parameters[piece.source.name].flatten()
        mine = flat[piece.offset // 4 : (piece.offset + piece.target.nbytes) // 4]
        assert torch.equal(mine.view(piece.target.shape), saved[piece.target.name]), piece.target.name
    assert sum(piece.target.nbytes for piece in pieces) == sum(spec.nbytes for spec in specs)
    plan_engine(model, Parallel(2), [piece.target for piece in pieces])


@given(st.integers(1, 40), st.integers(1, 9))
def test_shards_are_cut_where_torch_cuts_them(rows: int, world: int) -> None:
    chunks = [list(chunk) for chunk in torch.arange(rows).chunk(world)]
    chunks += [[]] * (world - len(chunks))
    spec = TensorSpec("w", "U8", 1, (rows,))
    assert [list(range(*shard_range(spec, rank, world))) for rank in range(world)] == chunks


def test_a_renamed_parameter_of_the_trainer_is_refused_with_the_nearest_name() -> None:
    model = model_from_config({"architectures": ["Qwen2ForCausalLM"], **SIZES})
    specs = [TensorSpec(name.replace("k_proj", "key_proj"), "F32", 4, s) for name, s in version_shapes(model).items()]
    with pytest.raises(UnknownTensors, match=r"4 tensors have unknown names: .*key_proj\.\w+ \(nearest: .*k_proj"):
        trainer_pieces(model, specs)


def test_a_large_mixture_is_planned_in_seconds_not_minutes() -> None:
    """Qwen3-235B-A22B's sizes, one rank of eight: 36,000 tensors."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
        "num_experts": 128, "moe_intermediate_size": 1536, "tie_word_embeddings": False,
    }  # fmt: skip
    model = model_from_config(config)
    version = [TensorSpec(name, "BF16", 2, shape) for name, shape in version_shapes(model).items()]
    plan = plan_rank(model, Parallel(8, ep=8), 7, version)
    whole = sum(tensor.nbytes for tensor in version)
    assert 440e9 < whole < 480e9
    assert whole / 8 < sum(copy.total_bytes for copy in plan.copies) < whole / 8 * 1.02


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "known: LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "architectures is"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": None}, "num_key_value_heads is None"),
        ({"hidden_size": "12"}, "hidden_size is '12'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": "Qwen2ForCausalLM"}, "not a list"),
    ],
)
def test_a_configuration_that_is_not_certain_is_refused_by_key(change: dict[str, object], told: str) -> None:
    config: dict[str, object] = {"architectures": [Architecture.QWEN2.value], **SIZES}
    with pytest.raises(UnfitModel, match=told):
        model_from_config({**config, **change})
