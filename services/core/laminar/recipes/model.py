"""The tiny model: a 0.6 M-parameter Qwen3, saved as an ordinary Hugging Face folder.

Qwen3 and not Qwen2: beside `model_type: qwen2` transformers puts Qwen2's own pre-tokenizer in place of ours, and the
same text gets other ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from laminar.recipes.tokenizer import EOS, PAD, save_tokenizer

CONTEXT_TOKENS = 512
# transformers' default of 0.02 suits wide models. Here it costs two thirds of the warm-up: seeds 1 and 2 need 760 and
# 1,110 steps with it, and 410 and 360 with this.
_INITIAL_SCALE = 0.06


class CausalLM(Protocol):
    """What the recipes use of a transformers model, whose own types say less."""

    config: Any
    generation_config: Any
    base_model: Any

    def __call__(self, **inputs: object) -> Any: ...
    def parameters(self) -> Iterable[torch.nn.Parameter]: ...
    def get_output_embeddings(self) -> Any: ...
    def save_pretrained(self, folder: Path) -> None: ...


def new_model(tokenizer: Tokenizer, seed: int) -> CausalLM:
    """Fresh fp32 weights; equal seeds give equal weights. Seeds torch's default generator."""
    torch.default_generator.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=_INITIAL_SCALE,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PAD),
        eos_token_id=tokenizer.token_to_id(EOS),
        bos_token_id=None,
    )
    return cast(CausalLM, Qwen3ForCausalLM(config))


def save_model(model: CausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes what any engine needs to load the model by its folder; generation ends at the end-of-sequence token."""
    ids: dict[str, Any] = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
