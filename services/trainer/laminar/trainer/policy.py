"""The model that is trained: loading, sharding, log-probs and its full tensors.

With more than one rank the model is sharded by FSDP2 (`fully_shard`) on a CPU mesh. One rank keeps the plain model:
FSDP would gather and scatter with nobody, at a cost that a small model feels (docs/algorithm.md, "One rank").
The model runs in eval mode: training draws no random numbers, so there is no random state to checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from laminar.core.groups import share_prompt
from laminar.trainer.batches import MicroBatch, Row, Trajectory, micro_batch
from laminar.trainer.failures import InputFailure, paragraph
from laminar.trainer.loss import token_logprobs
from laminar.trainer.model_folder import ModelFolder
from laminar.trainer.ranks import Ranks

WIRE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WIRE_NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
MAX_LOGIT_VALUES = 2**26
"""256 MiB of float32 logits in one micro-batch; the backward pass holds about three tensors of that size."""
MAX_MICRO_BATCH_TOKENS = 2048
"""More is slower on a CPU: the activations leave its caches (256 short responses: 0.62 s at 2048, 0.77 at 4096)."""
MIN_MICRO_BATCH_TOKENS = 256
EVEN_COLUMNS_PER_WIDTH = 6
"""A decoder layer of width h has about 12 h^2 weights, 24 h^2 operations a token; its attention has 4 h for each column
that the token sees. The two are even at 6 h columns."""
PROBE_TOKENS = 300
PROBE_TOLERANCE = 1e-3
"""Of log-probs in float32; the two ways differ by some 1e-6."""

log = logging.getLogger(__name__)


def wire_dtype(tensor: Tensor, folder: ModelFolder) -> torch.dtype:
    """In which a tensor leaves the trainer: the folder's dtype for floating-point ones, others as they are."""
    return WIRE_DTYPES[folder.wire_dtype] if tensor.is_floating_point() else tensor.dtype


class CausalModel(Protocol):
    """The part of a transformers causal LM that is used."""

    config: Any

    def __call__(self, *, input_ids: Tensor, use_cache: bool, logits_to_keep: int, **layout: Tensor) -> Any: ...


class Policy:
    """The trained model. Invariant: weights, gradients and optimizer state are float32 on the CPU."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.module = module.eval()
        self.ranks = ranks
        self._width = int(getattr(cast("CausalModel", module).config.get_text_config(), "hidden_size", 0))
        self._shares_prompts = self._shared_rows_agree()
        log.info("responses of a group %s one copy of the prompt", "share" if self._shares_prompts else "do not share")
        if ranks.size > 1:
            shard(module, ranks)  # after the question above: FSDP would leave parameters gathered after a lone forward

    @classmethod
    def load(cls, folder: ModelFolder, ranks: Ranks) -> Policy:
        """Any causal LM that transformers knows. Raises InputFailure for a folder that it cannot load whole."""
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        try:
            loaded: object = transformers.AutoModelForCausalLM.from_pretrained(
                folder.path, dtype=torch.float32, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the shapes
            )  # fmt: skip
        except (ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError) as error:
            # transformers raises all of these for an architecture it does not know or files it cannot read.
            raise InputFailure(
                f"transformers {transformers.__version__} cannot load {folder.path} as a causal language model: "
                f"{paragraph(error)}"
            ) from error
        module, info = cast("tuple[nn.Module, dict[str, set[Any]]]", loaded)
        if mismatched := sorted(info["mismatched_keys"], key=str):
            name, found, expected = mismatched[0]
            raise InputFailure(
                f"The weights in {folder.path} do not fit its config.json: {len(mismatched)} tensor(s) have other "
                f"shapes, e.g. {name} is {tuple(found)} instead of {tuple(expected)}."
            )
        missing = sorted(info["missing_keys"])
        if missing:
            raise InputFailure(
                f"The weights in {folder.path} lack {len(missing)} tensor(s) that the architecture needs, "
                f"e.g. {missing[0]}; training would start from random values there."
            )
        return cls(module, ranks)

    @property
    def vocabulary_size(self) -> int:
        return int(cast("CausalModel", self.module).config.get_text_config().vocab_size)

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens of one micro-batch: bounded by the memory of the logits."""
        fitting = MAX_LOGIT_VALUES // self.vocabulary_size
        return max(MIN_MICRO_BATCH_TOKENS, min(MAX_MICRO_BATCH_TOKENS, fitting))

    def rows(self, group: Row) -> list[Row]:
        """The group's trajectories in rows that may share the prompt; one each if the model cannot do that."""
        if not self._shares_prompts:
            return [[pair] for pair in group]
        lengths = [len(item.response) for item, _ in group]
        cut = share_prompt(len(group[0][0].prompt), lengths, EVEN_COLUMNS_PER_WIDTH * self._width)
        return [[group[i] for i in indexes] for indexes in cut]

    def logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """[n] log-probs of `batch.targets`."""
        model = cast("CausalModel", self.module)
        layout: dict[str, Tensor] = {}
        if batch.visible is not None and batch.positions is not None:
            mask = torch.zeros(batch.visible.shape).masked_fill_(~batch.visible, float("-inf"))
            layout = {"attention_mask": mask, "position_ids": batch.positions}
        keep = batch.tokens.shape[1] - batch.first
        logits = model(input_ids=batch.tokens, use_cache=False, logits_to_keep=keep, **layout).logits
        return token_logprobs(logits, batch.sources, batch.targets, temperature)

    def _shared_rows_agree(self) -> bool:
        """Whether two responses in one row get the log-probs that each has in a row of its own.

        Asked of the model itself: architectures differ in whether they follow a mask of ours (windows, ALiBi, state
        spaces), and a wrong gradient would look like bad learning.
        """
        config = cast("CausalModel", self.module).config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ["full_attention"])
        if layers != {"full_attention"} or (
            getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        ):
            return False
        length = min(PROBE_TOKENS, (getattr(config, "max_position_embeddings", None) or 2 * PROBE_TOKENS) // 2)
        ids = (np.arange(length * 3 + 8) * 7919 % self.vocabulary_size).astype(np.int32)
        pair = [
            (Trajectory(ids[:8], ids[8 + k :: 3][:length], np.zeros(length, np.float32), 0.0), 0.0) for k in range(2)
        ]
        try:
            with torch.no_grad():
                shared = self.logprobs(micro_batch([pair]), 1.0)
                alone = self.logprobs(micro_batch([[item] for item in pair]), 1.0)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            log.info("prompts are not shared: the model takes no mask of ours: %s", paragraph(error))
            return False
        return bool((shared - alone).abs().max() < PROBE_TOLERANCE)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers under their Hugging Face names, tied ones once; DTensors when sharded."""
        yield from self.module.named_parameters()
        persistent = self.module.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.module.named_buffers() if name in persistent)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank. A collective if it is sharded."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def shard(module: nn.Module, ranks: Ranks) -> None:
    """FSDP2 on a CPU mesh: one unit for each decoder layer, one for the rest. Gradients are summed over ranks.

    Summed, not averaged: the loss of each rank is already divided by the totals over all ranks.
    """
    # With a CUDA build of torch the default mesh would be a CUDA one even on a host without any device.
    mesh = init_device_mesh("cpu", (ranks.size,))
    layer_types = set(cast("list[str] | None", getattr(module, "_no_split_modules", None)) or [])
    for layer in [child for child in module.modules() if type(child).__name__ in layer_types]:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    log.info("model sharded over %d ranks", ranks.size)
