"""Is there enough memory and disk for a job? Asked before anything big starts.

The estimate is a floor: it counts weights, optimizer state, kept versions and the libraries themselves, not
activations or caches of keys and values. What it refuses would be killed by the kernel half-way.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from laminar.cli.errors import BadInput
from laminar.cli.sources import weight_files
from laminar.shell.memory import available_memory_bytes
from laminar.wire.manifest import DTYPE_BYTES
from laminar.wire.spec import EngineType, JobSpec, TrainerType

TORCH_BYTES = 300 * 2**20
"""Private memory of a process that has imported torch (the rest of its 0.6 GB is shared)."""
SERVICE_BYTES = 80 * 2**20
"""A service without torch."""
SLACK_BYTES = 200 * 2**20
"""Disk for the ledger, logs and metrics of a small run."""
BYTES_PER_PARAMETER = 4
"""Training and publishing are in fp32 on a CPU."""
MOST_COMPRESSED = 8
"""Weights may be packed (two 4-bit values a byte) or shared between layers; a wrong file is off by far more."""
MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Need:
    memory_bytes: int
    disk_bytes: int


def need(spec: JobSpec, num_parameters: int, num_machines: int) -> Need:
    """What the job takes at least on one host."""
    weights_bytes = BYTES_PER_PARAMETER * num_parameters
    # Weights, gradients, two moments; rank 0 also keeps the bytes it has handed over.
    trainer_bytes = spec.trainer.replicas * (4 * weights_bytes + TORCH_BYTES) + weights_bytes
    if spec.trainer.type is TrainerType.EMULATED:
        trainer_bytes = SERVICE_BYTES  # one process, whatever it stands for
    engine_bytes = SERVICE_BYTES if spec.rollout.engine.type is EngineType.EMULATED else weights_bytes + TORCH_BYTES
    rollout_bytes = spec.rollout.replicas * (engine_bytes + SERVICE_BYTES)
    relay_bytes = num_machines * (
        (spec.relay.keep_versions + 1 + spec.relay.retain_slots) * weights_bytes + SERVICE_BYTES
    )
    checkpoint_bytes = 3 * weights_bytes
    return Need(
        memory_bytes=trainer_bytes + rollout_bytes + relay_bytes + SERVICE_BYTES,
        # One more than are kept, while the newest is written; and the model at the end.
        disk_bytes=(spec.trainer.checkpoint.keep + 1) * checkpoint_bytes + weights_bytes + SLACK_BYTES,
    )


def check(spec: JobSpec, model: Path, run: Path, num_machines: int) -> None:
    """Raises BadInput when this host has less free memory or disk than the job takes at least."""
    num_parameters = count_parameters(model)
    claimed = claimed_parameters(model)
    if claimed > MOST_COMPRESSED * num_parameters:
        raise BadInput(
            f"spec.model.source: {model / 'config.json'} describes a model of about {claimed:,} parameters, but the "
            f"weights beside it hold {num_parameters:,}: they are not of the same model, or some files are missing."
        )
    needed = need(spec, num_parameters, num_machines)
    memory_bytes = available_memory_bytes()
    if needed.memory_bytes > memory_bytes:
        raise BadInput(
            f"The model {model} needs about {_gb(needed.memory_bytes)} of memory with {spec.rollout.replicas} rollout "
            f"replicas and {spec.trainer.replicas} trainer ranks, and {_gb(memory_bytes)} are free. "
            "Use fewer replicas, a smaller model, or a larger machine."
        )
    disk_bytes = shutil.disk_usage(run).free
    if needed.disk_bytes > disk_bytes:
        raise BadInput(
            f"The run needs about {_gb(needed.disk_bytes)} of disk for checkpoints and the model, and {run} has "
            f"{_gb(disk_bytes)} free. Choose another folder with --run, or keep fewer checkpoints "
            "(spec.trainer.checkpoint.keep)."
        )


def count_parameters(model: Path) -> int:
    """Parameters of the folder's weights: exact for safetensors, by size (2 bytes each) otherwise."""
    total = 0
    for path in weight_files(model):
        total += _safetensors_parameters(path) if path.suffix == ".safetensors" else path.stat().st_size // 2
    return total


def claimed_parameters(model: Path) -> int:
    """What config.json describes, roughly: embeddings, and attention and feed-forward of a dense decoder; 0 where it
    does not say. Enough to see that weights belong to another model before somebody builds this one."""
    config = cast(dict[str, object], json.loads((model / "config.json").read_bytes()))
    sizes = [config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")]
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes):
        return 0
    vocabulary, hidden, layers, inner = numbers
    return vocabulary * hidden + layers * 2 * hidden * (hidden + inner)


def _safetensors_parameters(path: Path) -> int:
    """By the sizes in the file's header. Raises BadInput if it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= MAX_HEADER_BYTES:
                raise ValueError("no header")
            header = cast(dict[str, dict[str, Any]], json.loads(file.read(size)))
    except ValueError as error:
        raise BadInput(f"spec.model.source: {path} is not a safetensors file, or is cut off ({error}).") from error
    total = data_bytes = 0
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            total += (int(end) - int(start)) // DTYPE_BYTES.get(str(entry["dtype"]), 1)
            data_bytes = max(data_bytes, int(end))
    expected_bytes = 8 + size + data_bytes
    if path.stat().st_size < expected_bytes:
        raise BadInput(
            f"spec.model.source: {path} is cut off: it has {path.stat().st_size:,} of {expected_bytes:,} bytes. "
            "Copy or download it again."
        )
    return total


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
