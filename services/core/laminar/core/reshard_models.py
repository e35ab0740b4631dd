"""The tensors of the known architectures: how they are stored, and which of them an engine stacks together.

`engine_tensors` is the one description: from it follow the names and shapes of a version (`version_shapes`) and, in
`reshard_layout`, what each rank of an engine needs. Names on the engine's side are those that SGLang and vLLM share.
`trainer_pieces` maps the parameters of a live `transformers` model (version 5 stacks the experts of a layer in one
parameter) to the tensors of a version, which are those of a Hugging Face checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast

from laminar.core.reshard import Piece, TensorSpec, match_names

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
QWEN3_HEAD_DIM = 128
"""Qwen3's own default; the others divide the hidden size by the number of heads."""
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


class UnfitModel(ValueError):
    """A configuration whose weights can't be planned; the message names the key."""


class Architecture(Enum):
    """First entry of `architectures` in config.json."""

    LLAMA = "LlamaForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"
    MIXTRAL = "MixtralForCausalLM"


@dataclass(frozen=True, slots=True)
class Attention:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    """Norms over each head's query and key, one weight for all heads."""


@dataclass(frozen=True, slots=True)
class Experts:
    num_experts: int
    intermediate_size: int
    block: str
    """Name of the module in a layer, as checkpoints and engines have it."""
    gate: str
    up: str
    down: str
    dense_layers: frozenset[int] = frozenset()
    """Layers with an ordinary feed-forward instead."""


@dataclass(frozen=True, slots=True)
class Model:
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    attention: Attention
    intermediate_size: int
    """Of the ordinary feed-forward."""
    mlp_bias: bool = False
    experts: Experts | None = None

    @property
    def tied(self) -> dict[str, str]:
        """Names that a version may list besides, and the parameter that carries them."""
        return {HEAD: EMBEDDING} if self.tied_embeddings else {}


class Split(Enum):
    """What a rank of several takes of a stored tensor."""

    WHOLE = "whole"
    ROWS = "rows"
    KV_HEADS = "kvHeads"
    """Rows by head; with fewer heads than ranks, neighbours hold the same head."""
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"
    """Rows of a table padded to a round number; the last ranks may hold padding only."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the version and how ranks share it."""

    name: str
    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    num_units: int = 1
    """What is split (heads, rows, columns) is never cut inside one of these units."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """A parameter of an engine: parts stacked along dimension 0; an expert tensor has one stack an expert."""

    name: str
    stacks: tuple[tuple[Part, ...], ...]
    per_expert: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for stack in self.stacks for part in stack)


def engine_tensors(model: Model) -> Iterator[EngineTensor]:
    """In the order of the forward pass; each stored tensor is part of exactly one."""
    table = (model.vocab_size, model.hidden_size)
    yield _alone(Part(EMBEDDING, table, Split.VOCABULARY))
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        norm = (model.hidden_size,)
        yield _alone(Part(f"{prefix}.input_layernorm.weight", norm))
        yield from _attention(f"{prefix}.self_attn", model.attention, model.hidden_size)
        yield _alone(Part(f"{prefix}.post_attention_layernorm.weight", norm))
        if model.experts is None or layer in model.experts.dense_layers:
            yield from _feed_forward(f"{prefix}.mlp", model)
        else:
            yield from _experts(f"{prefix}.{model.experts.block}", model.experts, model.hidden_size)
    yield _alone(Part("model.norm.weight", (model.hidden_size,)))
    if not model.tied_embeddings:
        yield _alone(Part(HEAD, table, Split.VOCABULARY))


def version_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor of a version, by its name in a Hugging Face checkpoint."""
    return {part.name: part.shape for tensor in engine_tensors(model) for part in tensor.parts}


def exempt_names(offered: Sequence[TensorSpec]) -> dict[str, str]:
    """Names that old checkpoints carry and no engine loads."""
    return {t.name: "computed from the configuration" for t in offered if _COMPUTED.search(t.name)}


def trainer_pieces(model: Model, parameters: Sequence[TensorSpec]) -> list[Piece]:
    """Every tensor of a version, as a range of bytes of one of the trainer's whole parameters (in the wire dtype).

    Raises what `match_names` does. Experts may be stacked (transformers 5) or apart.
    """
    stacked = any(parameter.name.endswith(".mlp.experts.gate_up_proj") for parameter in parameters)
    origins = list(_origins(model, stacked=stacked))
    shapes = {origin.parameter: origin.shape for origin in origins}
    found = match_names(shapes, parameters, tied=model.tied, exempt=exempt_names(parameters))
    pieces: list[Piece] = []
    for origin in origins:
        source = found[origin.parameter]
        target = replace(source, name=origin.name, shape=origin.piece_shape)
        pieces.append(Piece(source, origin.index * target.nbytes + origin.rest * source.row_bytes, target))
    return pieces


@dataclass(frozen=True, slots=True)
class _Origin:
    """`name` is the piece that starts `rest` rows and `index` pieces into `parameter`."""

    name: str
    piece_shape: tuple[int, ...]
    parameter: str
    shape: tuple[int, ...]
    rest: int = 0
    index: int = 0


def _origins(model: Model, *, stacked: bool) -> Iterator[_Origin]:
    for tensor in engine_tensors(model):
        for part in tensor.parts:
            if not stacked or model.experts is None:
                yield _Origin(part.name, part.shape, part.name, part.shape)
            elif not tensor.per_expert:
                live = part.name.replace(f".{model.experts.block}.", ".mlp.")
                yield _Origin(part.name, part.shape, live, part.shape)
        if stacked and tensor.per_expert:
            yield from _stacked_origins(tensor)


def _stacked_origins(tensor: EngineTensor) -> Iterator[_Origin]:
    """transformers 5: `mlp.experts.gate_up_proj` [experts, 2 x intermediate, hidden], gate first, and `down_proj`."""
    layer = ".".join(tensor.name.split(".")[:3])
    kind = "down_proj" if len(tensor.stacks[0]) == 1 else "gate_up_proj"
    first = tensor.stacks[0][0]
    whole = (len(tensor.stacks), first.shape[0] * len(tensor.stacks[0]), first.shape[1])
    for expert, stack in enumerate(tensor.stacks):
        for index, part in enumerate(stack):
            yield _Origin(part.name, part.shape, f"{layer}.mlp.experts.{kind}", whole, rest=expert, index=index)


def _alone(part: Part) -> EngineTensor:
    return EngineTensor(part.name, ((part,),))


def _attention(prefix: str, attention: Attention, hidden: int) -> Iterator[EngineTensor]:
    sizes = {
        "q": (attention.num_heads, Split.ROWS),
        "k": (attention.num_kv_heads, Split.KV_HEADS),
        "v": (attention.num_kv_heads, Split.KV_HEADS),
    }
    for kind, rest in [("weight", (hidden,))] + ([("bias", ())] if attention.qkv_bias else []):
        stack = tuple(
            Part(f"{prefix}.{letter}_proj.{kind}", (heads * attention.head_dim, *rest), split, heads)
            for letter, (heads, split) in sizes.items()
        )
        yield EngineTensor(f"{prefix}.qkv_proj.{kind}", (stack,))
    if attention.head_norms:
        yield _alone(Part(f"{prefix}.q_norm.weight", (attention.head_dim,)))
        yield _alone(Part(f"{prefix}.k_norm.weight", (attention.head_dim,)))
    shape = (hidden, attention.num_heads * attention.head_dim)
    yield _alone(Part(f"{prefix}.o_proj.weight", shape, Split.COLUMNS, attention.num_heads))
    if attention.output_bias:
        # Each rank holds all of it; the engine adds it once, after the sum over ranks.
        yield _alone(Part(f"{prefix}.o_proj.bias", (hidden,)))


def _feed_forward(prefix: str, model: Model) -> Iterator[EngineTensor]:
    inner, hidden = model.intermediate_size, model.hidden_size
    for kind, rest in [("weight", (hidden,))] + ([("bias", ())] if model.mlp_bias else []):
        stack = tuple(Part(f"{prefix}.{n}_proj.{kind}", (inner, *rest), Split.ROWS, inner) for n in ("gate", "up"))
        yield EngineTensor(f"{prefix}.gate_up_proj.{kind}", (stack,))
    yield _alone(Part(f"{prefix}.down_proj.weight", (hidden, inner), Split.COLUMNS, inner))
    if model.mlp_bias:
        yield _alone(Part(f"{prefix}.down_proj.bias", (hidden,)))


def _experts(prefix: str, experts: Experts, hidden: int) -> Iterator[EngineTensor]:
    inner = experts.intermediate_size
    names = [f"{prefix}.experts.{index}" for index in range(experts.num_experts)]
    w13 = tuple(
        tuple(Part(f"{n}.{w}.weight", (inner, hidden), Split.ROWS, inner) for w in (experts.gate, experts.up))
        for n in names
    )
    w2 = tuple((Part(f"{n}.{experts.down}.weight", (hidden, inner), Split.COLUMNS, inner),) for n in names)
    yield _alone(Part(f"{prefix}.gate.weight", (experts.num_experts, hidden)))
    yield EngineTensor(f"{prefix}.experts.w13_weight", w13, per_expert=True)
    yield EngineTensor(f"{prefix}.experts.w2_weight", w2, per_expert=True)


# ------------------------------------------------------------------------------------------------ config.json


def model_from_config(config: Mapping[str, object]) -> Model:
    """From the keys of a Hugging Face config.json. Raises UnfitModel for anything that is not known for certain."""
    architecture = _architecture(config)
    if config.get("quantization_config") is not None:
        raise UnfitModel("quantization_config: quantized weights have scales and packings that are not planned")
    hidden = _int(config, "hidden_size")
    moe = architecture in (Architecture.QWEN3_MOE, Architecture.MIXTRAL)
    return Model(
        num_layers=_int(config, "num_hidden_layers"),
        hidden_size=hidden,
        vocab_size=_int(config, "vocab_size"),
        tied_embeddings=_bool(config, "tie_word_embeddings"),
        attention=_attention_of(config, architecture, hidden),
        intermediate_size=_int(config, "intermediate_size"),
        mlp_bias=architecture is Architecture.LLAMA and _bool(config, "mlp_bias"),
        experts=_experts_of(config, architecture) if moe else None,
    )


def _architecture(config: Mapping[str, object]) -> Architecture:
    names = _list(config, "architectures")
    known = {item.value: item for item in Architecture}
    if not names or str(names[0]) not in known:
        raise UnfitModel(f"architectures is {names!r}; known: {', '.join(known)}")
    return known[str(names[0])]


def _attention_of(config: Mapping[str, object], architecture: Architecture, hidden: int) -> Attention:
    num_heads = _int(config, "num_attention_heads")
    qwen3 = architecture in (Architecture.QWEN3, Architecture.QWEN3_MOE)
    optional_bias = (qwen3 or architecture is Architecture.LLAMA) and _bool(config, "attention_bias")
    return Attention(
        num_heads=num_heads,
        num_kv_heads=_int(config, "num_key_value_heads", num_heads if architecture is Architecture.LLAMA else None),
        head_dim=_int(config, "head_dim", QWEN3_HEAD_DIM if qwen3 else hidden // num_heads),
        qkv_bias=optional_bias or architecture is Architecture.QWEN2,
        output_bias=optional_bias,
        head_norms=qwen3,
    )


def _experts_of(config: Mapping[str, object], architecture: Architecture) -> Experts:
    # transformers 5 knows both models' key by both names.
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count = _int(config, key)
    if architecture is Architecture.MIXTRAL:
        return Experts(count, _int(config, "intermediate_size"), "block_sparse_moe", "w1", "w3", "w2")
    step = _int(config, "decoder_sparse_step", 1)
    listed = _list(config, "mlp_only_layers")
    layers = range(_int(config, "num_hidden_layers"))
    dense = frozenset(layer for layer in layers if layer in listed or (layer + 1) % step)
    inner = _int(config, "moe_intermediate_size")
    return Experts(count, inner, "mlp", "gate_proj", "up_proj", "down_proj", dense)


def _int(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnfitModel(f"{key} is {value!r}, not a positive number")
    return value


def _list(config: Mapping[str, object], key: str) -> list[object]:
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise UnfitModel(f"{key} is {value!r}, not a list")
    return list(cast("list[object]", value or []))


def _bool(config: Mapping[str, object], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise UnfitModel(f"{key} is {value!r}, not true or false")
    return bool(value)
