"""The cache: finished entries only, named by what made them.

    CACHE/<name>-<fingerprint>/     a finished entry; appears by one rename, is never changed afterwards
    CACHE/.building/<entry>/        the entry under construction; belongs to the holder of the lock
    CACHE/.locks/<entry>            flock of the one builder of this entry; the kernel frees it when the builder dies

Invariant: a folder outside the two dotted ones is complete. A builder that is killed leaves a folder in `.building`,
which the next builder of the same entry removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Parameter = int | float | str

_FINGERPRINT_CHARS = 16  # 64 bits: far beyond the few entries that a cache ever holds


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished entry. `cached` means that this call found it; `seconds` is what this call took, waiting included."""

    path: Path
    cached: bool
    seconds: float


def default_cache() -> Path:
    """`LAMINAR_CACHE` if it is set, else `~/.cache/laminar/recipes`."""
    configured = os.environ.get("LAMINAR_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "laminar" / "recipes"


def entry_name(name: str, version: int, parameters: Mapping[str, Parameter]) -> str:
    """The folder of the entry: equal exactly for equal name, recipe version and parameters."""
    made_from = json.dumps([name, version, dict(parameters)], sort_keys=True)
    return f"{name}-{hashlib.sha256(made_from.encode()).hexdigest()[:_FINGERPRINT_CHARS]}"


def obtain(cache: Path, entry: str, build: Callable[[Path], None], report: Callable[[str], None]) -> Entry:
    """Returns the entry, built by `build(empty folder)` if nobody has built it yet.

    Of several processes that ask at once, one builds and the others wait for it: the wait has no deadline of its own,
    because it ends with the life of the builder. If `build` raises, nothing of the entry stays.
    """
    started_s = time.monotonic()
    final = cache / entry
    if final.is_dir():
        return Entry(final, cached=True, seconds=time.monotonic() - started_s)
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".locks" / entry, lambda: report(f"waiting for another process that builds {entry}")):
        if final.is_dir():
            return Entry(final, cached=True, seconds=time.monotonic() - started_s)
        unfinished = cache / ".building" / entry
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            build(unfinished)
            _flush_to_disk(unfinished)
            unfinished.rename(final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _fsync(cache)
    return Entry(final, cached=False, seconds=time.monotonic() - started_s)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Generator[None]:
    """Holds an exclusive lock on `path`. The file stays: removing it would let two holders in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush_to_disk(folder: Path) -> None:
    """A rename may reach the disk before the data it names; a machine that loses power must not keep an empty file."""
    for path in sorted(folder.rglob("*")):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
