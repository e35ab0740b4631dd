"""A model folder and prompts for emulated jobs: the tokenizer is real, the model is not.

The folder has what the services look at (config.json, tokenizer.json, a file of weights); no engine could generate
with it. Every prompt has the same number of tokens, so that a job knows how long the prompts of its emulated machines
are: that number times the token grain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from laminar.recipes.tokenizer import EOS, save_tokenizer, train_tokenizer

NUM_PROMPTS = 10_000
PROMPT_TOKENS = 4
"""Digits are tokens of their own."""


def build(folder: Path) -> None:
    """Writes the model folder."""
    tokenizer = train_tokenizer(["0123456789"])
    save_tokenizer(tokenizer, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "model.safetensors").write_bytes(_weights())


def rows() -> Iterator[dict[str, str]]:
    """Four digits each; no random response answers them."""
    for number in range(NUM_PROMPTS):
        yield {"prompt": f"{number:0{PROMPT_TOKENS}d}", "answer": "none"}


def _weights() -> bytes:
    """One tensor of one number, as safetensors writes it: the header's length, the header, the data."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"placeholder": entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(4)
