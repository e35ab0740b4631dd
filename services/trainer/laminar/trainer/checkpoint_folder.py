"""A checkpoint on disk: `step-N-attempt-M/`, sealed by a manifest with the hash of each file.

    step-N-attempt-M.tmp/   shards, .metadata, ledger.sqlite   being written
      -> every file fsynced, manifest.json written, fsynced -> renamed -> the parent folder fsynced

A folder without `.tmp` is therefore whole; `verify` finds what the disk has done to it since. Which checkpoint is
restored is the pool's word (what it registered), never a directory listing.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from laminar.shell.sealed_folder import MANIFEST, NAME, hash_file, verify
from laminar.wire.messages import CheckpointInfo, ResumePoint

__all__ = ["MANIFEST", "NAME", "hash_file", "verify"]

LEDGER = "ledger.sqlite"
UNFINISHED = ".tmp"


def name_of(step: int, attempt: int) -> str:
    return f"step-{step}-attempt-{attempt}"


def write_synced(path: Path, data: bytes) -> None:
    """Raises OSError."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """fsync of a file or folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(unfinished: Path, step: int, attempt: int) -> CheckpointInfo:
    """Makes a written folder durable and gives it its final name. Raises OSError, and then there is no final name."""
    hashes: dict[str, str] = {}
    for file in sorted(path for path in unfinished.iterdir() if path.name != MANIFEST):
        sync(file)
        hashes[file.name] = hash_file(file)
    write_synced(unfinished / MANIFEST, json.dumps(hashes, indent=1, sort_keys=True).encode())
    sync(unfinished)
    final = unfinished.with_name(name_of(step, attempt))
    unfinished.rename(final)
    sync(final.parent)
    return CheckpointInfo(step=step, attempt=attempt, path=final.name, manifest=hashes)


def remove_unfinished(root: Path) -> None:
    """Deletes what dead attempts were writing. The folder may not exist yet."""
    for path in sorted(root.glob(f"step-*{UNFINISHED}")):
        if NAME.fullmatch(path.name.removesuffix(UNFINISHED)):
            shutil.rmtree(path)


def remove(root: Path, info: CheckpointInfo) -> None:
    """Deletes a checkpoint that the pool no longer keeps; gone already is fine. Raises OSError."""
    assert NAME.fullmatch(info.path), f"{info.path!r} is no checkpoint's name"
    folder = root / info.path
    if folder.exists():
        # Renamed first: a half-deleted folder must not look like a whole one.
        doomed = folder.with_name(info.path + UNFINISHED)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def candidates(resume: ResumePoint) -> list[CheckpointInfo]:
    """What may be restored, best first: the pool's choice, then older kept ones."""
    if resume.checkpoint is None:
        return []
    first = resume.checkpoint
    older = [info for info in resume.kept if info.step < first.step]
    return [first, *sorted(older, key=lambda info: (-info.step, -info.attempt))]
