"""Prompts as ids: chat templates, special tokens, limits, and what a damaged model folder says."""

from __future__ import annotations

import json
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from laminar.pool.data import DataError, Message, PromptRow, PromptTable
from laminar.pool.prompts import load_prompts
from laminar.pool.tokenize import PromptTokenizer, TokenizerError, too_long
from laminar.wire.codec import unpack_tokens
from laminar.wire.spec import LaminarJob

MODEL = Path(__file__).parents[1] / "data" / "grpo_reference" / "reference_model"
NOW = datetime(2026, 1, 2)
WORDS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "hello", "world", "2026"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% generation %} {{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %} <|assistant|>{% endif %}"
)


def folder(tmp_path: Path, template: str | None = None) -> Path:
    """A model folder whose tokenizer puts <s> before every text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(2)  # as some published files have it
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return tmp_path


def ids(tokenizer: PromptTokenizer, *prompts: str | tuple[Message, ...]) -> list[list[int]]:
    table = PromptTable(Path("x.jsonl"), [PromptRow(i + 1, prompt, "a") for i, prompt in enumerate(prompts)])
    return [unpack_tokens(prompt.tokens) for prompt in tokenizer.tokenize(table)]


def test_raw_text_gets_the_tokenizers_special_tokens_once(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(folder(tmp_path), NOW)
    assert ids(tokenizer, "hello world", "<s> hello world") == [[0, 4, 5], [0, 4, 5]]


def test_a_chat_template_wraps_a_string_as_a_user_message_and_writes_its_own_special_tokens(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(folder(tmp_path, TEMPLATE), NOW)
    expected = [0, 2, 4, 3]
    assert ids(tokenizer, "hello", (Message("user", "hello"),)) == [expected, expected]


def test_a_template_beside_the_config_wins_and_dates_are_those_of_the_jobs_start(tmp_path: Path) -> None:
    (folder(tmp_path, "{{ 1 / 0 }}") / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    assert ids(PromptTokenizer(tmp_path, NOW), "hello") == [[6]]


def test_a_list_of_named_templates_uses_the_default_one(tmp_path: Path) -> None:
    folder(tmp_path)
    named = [{"name": "tool_use", "template": "world"}, {"name": "default", "template": "hello"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ids(PromptTokenizer(tmp_path, NOW), "x") == [[4]]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ raise_exception('no system message') }}", "x.jsonl, row 1: the chat template"),
        ("{{ messages.__class__.__mro__ }}", "row 1: the chat template"),
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_one_sentence(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(TokenizerError) as error:
        ids(PromptTokenizer(folder(tmp_path, template), NOW), "hello")
    assert words in str(error.value)


def test_chat_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"row 1: the prompt is a list of chat messages.*no chat template"):
        ids(PromptTokenizer(folder(tmp_path), NOW), (Message("user", "hello"),))


def test_a_folder_without_tokenizer_or_with_a_damaged_one_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        PromptTokenizer(tmp_path, NOW)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        PromptTokenizer(tmp_path, NOW)
    with pytest.raises(TokenizerError, match="does not exist"):
        PromptTokenizer(tmp_path / "no", NOW)


def test_long_prompts_are_named_and_all_of_them_too_long_is_an_error(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(folder(tmp_path), NOW)
    table = PromptTable(tmp_path / "x.jsonl", [PromptRow(1, "hello", "a"), PromptRow(2, "hello hello world", "a")])
    prompts = tokenizer.tokenize(table)
    assert too_long(prompts, 2, table) == {1}
    with pytest.raises(DataError, match="all 2 prompts .* the shortest has 2 tokens"):
        too_long(prompts, 1, table)


def test_a_changed_answer_changes_the_digest_and_skips_are_counted(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    data, digests = tmp_path / "data.jsonl", set[str]()
    for answer in ("1", "1", "2"):
        rows = [
            {"prompt": "1+0=?", "answer": answer},
            {"prompt": "", "answer": "1"},
            {"prompt": "1" * 999, "answer": "1"},
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        book = load_prompts(a_job(tmp_path, data), NOW)
        digests.add(book.digest)
    assert len(digests) == 2
    assert book.skipped == {"missingPrompt": 1, "tooLong": 1, "held/missingPrompt": 1, "held/tooLong": 1}
    assert (len(book.train), book.too_long, len(book.evaluations["held"])) == (2, {1}, 1)


def a_job(tmp_path: Path, data: Path) -> LaminarJob:
    spec = {
        "steps": 1, "model": {"source": f"file:{tmp_path}/model"}, "rewards": [{"name": "r", "type": "exact"}],
        "data": {"train": {"source": f"file:{data}"}, "maxPromptTokens": 100},
        "evaluations": [{"name": "held", "source": f"file:{data}"}],
    }  # fmt: skip
    return LaminarJob.model_validate({"metadata": {"name": "toy"}, "spec": spec})


@pytest.mark.slow
def test_seventeen_thousand_prompts_are_tokenised_in_seconds() -> None:
    tokenizer = PromptTokenizer(MODEL, NOW)
    table = PromptTable(Path("x"), [PromptRow(i, f"Compute {i} + {i} and explain. " * 10, "1") for i in range(17_000)])
    started_s = time.process_time()
    assert len(tokenizer.tokenize(table)) == 17_000
    assert time.process_time() - started_s < 20, "CPU seconds of all threads"
