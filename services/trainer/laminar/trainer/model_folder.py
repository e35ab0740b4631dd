"""What can be said of a Hugging Face model folder without torch: is it whole, how large, does it fit the machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from laminar.trainer import checkpoint_folder
from laminar.trainer.failures import InputFailure
from laminar.wire.manifest import DTYPE_BYTES

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
WIRE_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TRAINING_BYTES_PER_PARAMETER = 16
"""float32 weights, gradient and AdamW's two moments."""
NUM_WIRE_BUFFERS = 2
"""Rank 0 keeps the bytes of one publication while it fills those of the next."""
PROCESS_BYTES = 400 * 2**20
"""Private memory of one rank after its imports (measured 290 MiB) with room for a small micro-batch."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    num_parameters: int
    wire_dtype: str
    """Dtype in which weights are published and exported: the folder's own ("F32", "BF16", "F16")."""

    @property
    def wire_bytes(self) -> int:
        return self.num_parameters * DTYPE_BYTES[self.wire_dtype]

    def training_bytes(self, ranks: int) -> int:
        """Host memory of the whole group; while loading, each rank holds the full weights before it keeps its shard."""
        loading = 4 * self.num_parameters * (ranks - 1)
        return (
            TRAINING_BYTES_PER_PARAMETER * self.num_parameters
            + NUM_WIRE_BUFFERS * self.wire_bytes
            + loading
            + PROCESS_BYTES * ranks
        )


def inspect(path: Path) -> ModelFolder:
    """Raises InputFailure with what is missing."""
    if not path.is_dir():
        raise InputFailure(f"The model folder {path} does not exist. Set spec.model.source to a Hugging Face folder.")
    config_path = path / "config.json"
    if not config_path.is_file():
        raise InputFailure(f"The model folder {path} has no config.json, so it is not a Hugging Face model folder.")
    try:
        parsed: object = json.loads(config_path.read_text())
    except ValueError as error:
        raise InputFailure(f"{config_path} is not valid JSON: {error}.") from error
    config = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise InputFailure(
            f"The model folder {path} has no *.safetensors weights; convert other formats with save_pretrained first."
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in WIRE_DTYPES:
        raise InputFailure(f"{config_path} has dtype {dtype!r}; the trainer publishes {', '.join(WIRE_DTYPES)}.")
    return ModelFolder(path, sum(_num_parameters(file) for file in weights), WIRE_DTYPES[dtype])


def put_in_place(unfinished: Path, out: Path) -> None:
    """A written folder becomes `out`, durably; an older `out` is replaced. Raises OSError."""
    for file in unfinished.iterdir():
        checkpoint_folder.sync(file)
    if out.exists():
        old = unfinished.with_suffix(".old")
        out.rename(old)
        unfinished.rename(out)
        shutil.rmtree(old)
    else:
        unfinished.rename(out)
    checkpoint_folder.sync(out.parent)


def require_memory(folder: ModelFolder, ranks: int, available_bytes: int) -> None:
    """Raises InputFailure if training would not fit into the memory that is free now."""
    needed = folder.training_bytes(ranks)
    if needed > available_bytes:
        raise InputFailure(
            f"Training {folder.path} ({folder.num_parameters / 1e6:.1f} M parameters) on {ranks} rank(s) needs about "
            f"{needed / 2**30:.1f} GiB of memory, but only {available_bytes / 2**30:.1f} GiB are free on this machine. "
            f"Use a smaller model or a machine with more memory."
        )


def _num_parameters(file: Path) -> int:
    """From the header: uint64 little-endian length, then JSON with the shape of each tensor."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= file.stat().st_size - 8:
                raise ValueError("its header is longer than the file")
            header = cast("dict[str, dict[str, Any]]", json.loads(stream.read(length)))
        return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError) as error:
        raise InputFailure(f"{file} is damaged: {error}.") from error
