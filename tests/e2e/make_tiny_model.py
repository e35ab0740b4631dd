"""Writes FOLDER/plain and FOLDER/chat, Hugging Face folders with random weights: `python make_tiny_model.py FOLDER`.

In a process of its own, because it imports torch. A quarter of the token ids end a response, so that responses are
short, most of them end by themselves and a grader sees them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def write(folder: Path, *, chat: bool) -> None:
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=SPECIAL[1:])
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[0, *range(4, len(vocabulary), 4)])
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1], "plain"), chat=False)
    write(Path(sys.argv[1], "chat"), chat=True)
