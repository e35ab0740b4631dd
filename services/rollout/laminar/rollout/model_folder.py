"""What the rollout's processes read from a model folder without torch."""

from __future__ import annotations

import json
from pathlib import Path


class ModelFolderError(ValueError):
    """The folder lacks something, or says something impossible; the text names it."""


def eos_ids(folder: Path) -> frozenset[int]:
    """Where generation stops: generation_config.json if it says so, else config.json. Raises ModelFolderError."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value: int | list[int] | None = json.loads(path.read_text()).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
    raise ModelFolderError(f"{folder}: neither generation_config.json nor config.json names eos_token_id")


def tokenizer_path(folder: Path) -> Path:
    """tokenizer.json. Raises ModelFolderError if it is not there."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFolderError(f"{folder} has no tokenizer.json")
    return path
