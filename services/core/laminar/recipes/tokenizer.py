"""The tiny model's tokenizer: byte-level BPE with single digits, trained on the task's own text.

The answer tags are special tokens, so a reward must read responses decoded *with* special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS, ANSWER_OPEN, ANSWER_CLOSE = "<pad>", "<eos>", "<answer>", "</answer>"

_MERGES_MAX = 80  # the instruction's few words become a token each; every other byte is one by itself
_BYTES = 256
# A digit, a word with its leading space, or any other single character: arithmetic is never merged.
_PIECE = r"\d| ?[A-Za-z]+:?|[^A-Za-z0-9]"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer whose every id sequence decodes to the text it came from. Adds no token of its own to a text."""
    special = [PAD, EOS, ANSWER_OPEN, ANSWER_CLOSE]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + _BYTES + _MERGES_MAX,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, from which every loader gets the same ids."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The generic class: a class of a model family would put its own pre-tokenizer in place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "extra_special_tokens": {"answer_open": ANSWER_OPEN, "answer_close": ANSWER_CLOSE},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
