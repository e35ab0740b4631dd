"""Token ids to text, with the job's own tokenizer. Special tokens are shown: a missing end is worth seeing."""

from __future__ import annotations

from typing import Protocol

from laminar.wire.codec import unpack_tokens
from laminar.wire.sources import is_file, local_path
from laminar.wire.spec import LaminarJob


class _Tokenizer(Protocol):
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Decoder:
    """Without a tokenizer it shows the ids."""

    def __init__(self, tokenizer: _Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_job(cls, job: LaminarJob) -> Decoder:
        """The tokenizer.json of a job whose model is a folder. The folder may be gone by now, and a machine that only
        reads runs need not have `tokenizers`: then ids are shown."""
        source = job.spec.model.source
        file = local_path(source) / "tokenizer.json" if is_file(source) else None
        if file is None or not file.is_file():
            return cls(None)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return cls(None)
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception:  # noqa: BLE001 - the library raises bare Exception for a file that it cannot read
            return cls(None)

    def text(self, tokens: bytes) -> str:
        """`tokens`: packed as in `laminar.wire.codec`."""
        ids = unpack_tokens(tokens)
        if self._tokenizer is None:
            return " ".join(str(number) for number in ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False)
