"""Why a rank ended, for the agent: torchrun reports that a rank failed, but does not pass its exit code on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast


@dataclass(frozen=True, slots=True)
class ExitNote:
    code: int
    text: str

    def write(self, folder: Path, attempt: int) -> None:
        """The first rank to fail has the reason; the others fail because of it, so their notes are dropped."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(_path(folder, attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return
        with os.fdopen(descriptor, "w") as stream:
            json.dump({"code": self.code, "text": self.text}, stream)

    @classmethod
    def read(cls, folder: Path, attempt: int) -> ExitNote | None:
        """None: no rank left one, or it died while it wrote."""
        try:
            parsed: object = json.loads(_path(folder, attempt).read_text())
        except (FileNotFoundError, ValueError):
            return None
        note = cast("dict[str, object]", parsed)
        return cls(int(str(note["code"])), str(note["text"]))

    @staticmethod
    def clear(folder: Path, attempt: int) -> None:
        _path(folder, attempt).unlink(missing_ok=True)


def _path(folder: Path, attempt: int) -> Path:
    return folder / f"exit-{attempt}.json"
