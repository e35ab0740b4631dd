"""Sealed checkpoint folders, as everybody may read them: `step-N-attempt-M/` with the hash of each file in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import xxhash

MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d+)-attempt-(\d+)")
READ_BYTES = 1 << 20


def newest_sealed(root: Path) -> Path | None:
    """The whole one of the highest attempt, then step: what a new generation of the pool begins from.

    Only for a ledger that is lost: as long as there is one, its register says which checkpoints count.
    """
    found: list[tuple[int, int, Path]] = []
    for path in root.glob("step-*"):
        name = NAME.fullmatch(path.name)
        if name is not None:
            found.append((int(name[2]), int(name[1]), path))
    return next((path for _, _, path in sorted(found, reverse=True) if not verify(path)), None)


def hash_file(path: Path) -> str:
    """xxh3-128 of the file's bytes, hex. Raises OSError."""
    state = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            state.update(piece)
    return state.hexdigest()


def verify(folder: Path, hashes: Mapping[str, str] | None = None) -> str:
    """What is wrong with a sealed checkpoint, naming the file; "" if nothing. No `hashes`: the folder's own."""
    if not folder.is_dir():
        return f"the folder {folder} is gone"
    try:
        expected = dict(hashes) if hashes else _read_manifest(folder / MANIFEST)
        for name, digest in sorted(expected.items()):
            if hash_file(folder / name) != digest:
                return f"the file {folder / name} has changed since it was written"
    except FileNotFoundError as error:
        return f"the file {error.filename} is missing"
    except (OSError, ValueError) as error:
        return f"{folder / MANIFEST} or a file it names cannot be read: {error}"
    return ""


def _read_manifest(path: Path) -> dict[str, str]:
    parsed: object = json.loads(path.read_text())
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} is not a JSON object")
    return cast("dict[str, str]", parsed)
