"""A transformers model as the engine needs it: built from config.json alone, checked, without weights of its own.

Weights come by relay (`laminar.rollout.weights`); the model folder only says what the model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from laminar.rollout.model_folder import ModelFolderError, eos_ids, tokenizer_path
from laminar.rollout.slots import CacheShape, DecodePlan, PrefillPlan, SlotCache, decode_mask, prefill_mask

_PROBE_TOLERANCE = 1e-3
"""Of the largest logit: fp32 noise is 1e-6 of it, a model that ignores the cache is off by about 1."""


class UnfitModel(ModelFolderError):
    """This model folder cannot be served by the torch engine; the text says why."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    model: PreTrainedModel
    cache: SlotCache
    eos_ids: frozenset[int]
    vocabulary: int


def build_model(folder: Path, *, slots: int, max_length: int) -> ServedModel:
    """The model with random fp32 weights and an empty cache. Raises ModelFolderError."""
    if not (folder / "config.json").is_file():
        raise UnfitModel(f"{folder} has no config.json")
    try:
        config = cast(PreTrainedConfig, AutoConfig.from_pretrained(folder, local_files_only=True))
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    except (ValueError, KeyError, OSError) as error:
        raise UnfitModel(f"{folder}: {error}") from error
    model = model.eval().requires_grad_(requires_grad=False)
    vocabulary = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
    check_tokenizer(folder, vocabulary)
    shape = _cache_shape(config, slots, _usable_length(config, max_length))
    cache = SlotCache(shape, torch.float32)
    _probe(model, cache, vocabulary)
    return ServedModel(model, cache, eos_ids(folder), vocabulary)


def check_tokenizer(folder: Path, vocabulary: int) -> None:
    """Every id that the folder's tokenizer can make must have a row of embeddings. Raises ModelFolderError."""
    path = tokenizer_path(folder)
    highest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocabulary:
        raise UnfitModel(f"{path} makes ids up to {highest}, the model has {vocabulary} rows of embeddings")


def _usable_length(config: PreTrainedConfig, max_length: int) -> int:
    """At most the model's context. Raises UnfitModel where a plain cache would compute something else."""
    usable = min(max_length, int(getattr(config, "max_position_embeddings", None) or max_length))
    window = getattr(config, "sliding_window", None)
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    other = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if other:
        raise UnfitModel(f"layers of type {', '.join(other)} have no plain KV cache")
    if window is not None and usable > window and (not layer_types or "sliding_attention" in layer_types):
        raise UnfitModel(f"sliding attention over {window} tokens is shorter than the responses asked for ({usable})")
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = int(rope.get("original_max_position_embeddings") or usable)
        if usable > original:
            raise UnfitModel(f"rope type {rope['rope_type']} changes beyond {original} tokens, asked for {usable}")
    return usable


def _cache_shape(config: PreTrainedConfig, slots: int, max_length: int) -> CacheShape:
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return CacheShape(
        layers=int(text.num_hidden_layers),
        slots=slots,
        kv_heads=kv_heads,
        max_length=max_length,
        key_width=width,
        value_width=width,
    )


@torch.inference_mode()
def _probe(model: PreTrainedModel, cache: SlotCache, vocabulary: int) -> None:
    """Proves that the model reads and writes the cache as `SlotCache` means it: two prefilled tokens and a decoded
    one against one full pass. Raises UnfitModel."""
    tokens = torch.arange(1, 4)[None] % vocabulary
    position, start = torch.arange(2), torch.zeros(1, dtype=torch.long)
    try:
        whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
        first = torch.zeros_like(position)
        cache.plan = PrefillPlan(source=first, column=position, slot=first, position=position)
        model(
            input_ids=tokens[:, :2], position_ids=position[None], attention_mask=prefill_mask(start, 2, torch.float32),
            cache=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        at = torch.tensor([2])
        length = min(3, cache.shape.max_length)
        cache.plan = DecodePlan(start, at, length)
        stepped = model(
            input_ids=tokens[:, 2:], position_ids=at[None], attention_mask=decode_mask(at, length, torch.float32),
            cache=cache, use_cache=True, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
    except (TypeError, RuntimeError, IndexError, AttributeError, ValueError) as error:
        raise UnfitModel(f"{type(model).__name__} does not run on a plain KV cache: {error}") from error
    if float((whole - stepped).abs().max()) > _PROBE_TOLERANCE * float(whole.abs().max()):
        raise UnfitModel(f"{type(model).__name__} gives other logits with a plain KV cache than without one")
