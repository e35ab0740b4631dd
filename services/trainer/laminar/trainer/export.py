"""A Hugging Face model folder out of trained weights: at the end of a run, or later from a checkpoint.

python -m laminar.trainer.export --checkpoint DIR --model SRC --out DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]

from laminar.trainer import checkpoint_folder
from laminar.trainer.checkpoint import MODEL_PREFIX
from laminar.trainer.failures import InputFailure, TrainerFailure, paragraph
from laminar.trainer.model_folder import WEIGHT_SUFFIXES, ModelFolder, inspect, put_in_place
from laminar.trainer.policy import wire_dtype

WEIGHTS = "model.safetensors"
INDEX_SUFFIX = ".index.json"


def write_model(out: Path, source: ModelFolder, tensors: Mapping[str, Tensor]) -> None:
    """Writes `out` as a whole or not at all: config and tokenizer files of `source`, the weights in its dtype.

    An older `out` is replaced. Raises OSError.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.{os.getpid()}{checkpoint_folder.UNFINISHED}")
    unfinished.mkdir()
    try:
        for file in sorted(source.path.iterdir()):
            if file.is_file() and not file.name.endswith((*WEIGHT_SUFFIXES, INDEX_SUFFIX)):
                shutil.copyfile(file, unfinished / file.name)
        contents = {name: tensor.to(wire_dtype(tensor, source)).contiguous() for name, tensor in tensors.items()}
        save_file(contents, unfinished / WEIGHTS, metadata={"format": "pt"})
        put_in_place(unfinished, out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The full weights of a sealed checkpoint, whatever number of ranks wrote it. Raises InputFailure."""
    problem = checkpoint_folder.verify(checkpoint)
    if problem:
        raise InputFailure(f"The checkpoint {checkpoint} cannot be used: {problem}.")
    reader = FileSystemReader(checkpoint)
    stored = cast("dict[str, object]", reader.read_metadata().state_dict_metadata)
    state: dict[str, Any] = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in state.items()}


def export(checkpoint: Path, source: Path, out: Path) -> None:
    """Raises InputFailure, OSError."""
    write_model(out, inspect(source), read_weights(checkpoint))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laminar.trainer.export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a step-N-attempt-M folder")
    parser.add_argument("--model", type=Path, required=True, help="the model folder that training started from")
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.model, args.out)
    except TrainerFailure as error:
        print(f"error: {paragraph(error)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {args.out} cannot be written: {error}.", file=sys.stderr)
        return TrainerFailure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
