"""Prompts as token ids, made once, here, from the model's own files; without torch and transformers.

row -> (chat template, if the model has one) -> text -> tokenizer.json -> ids
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from laminar.pool.data import DataError, Message, PromptRow, PromptTable
from laminar.wire.codec import pack_tokens

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
EMPTY_PROMPT, TOO_LONG = "emptyPrompt", "tooLong"


class TokenizerError(ValueError):
    """The model's folder cannot tokenise these prompts; the text is one paragraph for people."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it is granted: packed int32 ids, the text they stand for, and the reference answer."""

    tokens: bytes
    text: str
    answer: str

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class PromptTokenizer:
    """The tokenizer and chat template of one model folder. `now`: what a template that asks for the date is told;
    fixed for the job's life, so that a restarted pool makes the same ids."""

    def __init__(self, folder: Path, now: datetime) -> None:
        """Raises TokenizerError."""
        self._folder = folder
        self._tokenizer = _load_tokenizer(folder)
        config = _load_config(folder)
        self._special = {name: text for name in _TOKEN_NAMES if (text := _token_text(config.get(name)))}
        self._template = _compile_template(folder, config, now)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render(self, row: PromptRow, path: Path) -> str:
        """The text that is tokenised. A string is one user message if the model chats, else as it is."""
        if self._template is None:
            if isinstance(row.prompt, str):
                return row.prompt
            raise TokenizerError(
                f"{path}, row {row.row}: the prompt is a list of chat messages, but the model in {self._folder} has "
                "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)."
            )
        messages = (Message("user", row.prompt),) if isinstance(row.prompt, str) else row.prompt
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, tools=None, **self._special)
        except (TemplateError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{path}, row {row.row}: the chat template of the model in {self._folder} refuses it: {error}."
            ) from error

    def tokenize(self, table: PromptTable) -> list[Prompt]:
        """All rows, in order. Rows that become no token at all are left out and counted in `table.skipped`."""
        texts = [self.render(row, table.path) for row in table.rows]
        prompts: list[Prompt] = []
        for row, text, ids in zip(table.rows, texts, self._encode(texts), strict=True):
            if ids:
                prompts.append(Prompt(pack_tokens(ids), text, row.answer))
            else:
                table.skipped[EMPTY_PROMPT] += 1
        return prompts

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """A template writes the special tokens itself; raw text gets those of the tokenizer, unless it begins with
        them already."""
        if self.has_chat_template:
            return _ids(self._tokenizer, texts, special=False)
        plain = [bool(bos := self._special.get("bos_token")) and text.startswith(bos) for text in texts]
        if not any(plain):
            return _ids(self._tokenizer, texts, special=True)
        with_special, without = (_ids(self._tokenizer, texts, special=special) for special in (True, False))
        return [without[i] if plain[i] else with_special[i] for i in range(len(texts))]


def too_long(prompts: Sequence[Prompt], limit: int, table: PromptTable) -> frozenset[int]:
    """Indexes of prompts above the limit. Raises DataError if that is all of them."""
    long = frozenset(index for index, prompt in enumerate(prompts) if prompt.num_tokens > limit)
    if len(long) == len(prompts):
        shortest = min((prompt.num_tokens for prompt in prompts), default=0)
        raise DataError(
            f"all {len(prompts)} prompts of {table.path} are longer than data.maxPromptTokens = {limit}; the shortest "
            f"has {shortest} tokens."
        )
    return long


def _ids(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
    return [encoding.ids for encoding in encodings]


def _load_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not folder.is_dir():
        raise TokenizerError(f"the model folder {folder} does not exist.")
    if not file.is_file():
        raise TokenizerError(
            f"the model folder {folder} has no tokenizer.json. Save it with a fast tokenizer "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)."
        )
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file that it cannot read
        raise TokenizerError(f"{file} cannot be read as a tokenizer: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{file} holds a {type(config).__name__}, not an object.")
    return cast(dict[str, Any], config)


def _token_text(value: object) -> str:
    """A special token is a string, or an object with its text in `content`."""
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else ""


# --- chat templates ---------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training masks; for a prompt it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile_template(folder: Path, config: dict[str, Any], now: datetime) -> Template | None:
    source = _template_source(folder, config)
    if source is None:
        return None
    # Templates come with the model, from anywhere: the sandbox keeps them from touching more than their arguments.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(
            source, globals={"raise_exception": _raise_exception, "strftime_now": now.strftime}
        )
    except TemplateError as error:
        raise TokenizerError(f"the chat template of the model in {folder} cannot be compiled: {error}.") from error


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in cast(list[dict[str, Any]], found)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:  # noqa: FBT001 - called by templates
    """As models expect it: without the HTML escapes of jinja2's own."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
