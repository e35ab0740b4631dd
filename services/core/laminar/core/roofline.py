"""How long decoding, prefill and training take on accelerators, from data sheets: the roofline model.

A decode step reads all weights once and the KV cache of every running response, computes two operations for each
parameter and response, and adds up the tensor-parallel parts twice a layer:

    step = max(weights / bandwidth, 2 * parameters * batch / FLOPS)      matrices
         + KV bytes / bandwidth                                          attention: far below the ridge, always memory
         + 2 * layers * (latency + bytes of the all-reduce / link)       tensor parallel
         + overhead                                                      scheduling, sampling, launches

so for a given batch it is linear in the KV tokens (`DecodeCost`). Efficiencies scale the data sheet to what kernels
reach; every number comes from the caller (benchmarks/paper_params.toml names their sources).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. Rates are of the data sheet; efficiencies, in (0, 1], are what kernels reach of them."""

    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    """To the other GPUs of its machine, in one direction."""
    host_bytes_per_s: float
    """From the host's memory."""
    memory_efficiency: float = 1.0
    compute_efficiency: float = 1.0
    link_efficiency: float = 1.0
    all_reduce_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder, as its config.json describes it."""

    num_parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    bytes_per_value: int = 2

    @property
    def weights_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of each layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.bytes_per_value


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One step of a batch of a fixed size: `base_s + kv_tokens * per_kv_token_s`."""

    base_s: float
    per_kv_token_s: float

    def step_s(self, kv_tokens: float) -> float:
        return self.base_s + kv_tokens * self.per_kv_token_s

    def steps_s(self, num_steps: float, kv_tokens: float, batch: int) -> float:
        """Of so many steps in a row; each makes the context of all `batch` responses one token longer."""
        grown = batch * num_steps * (num_steps - 1) / 2
        return num_steps * self.step_s(kv_tokens) + grown * self.per_kv_token_s

    def num_steps(self, time_s: float, kv_tokens: float, batch: int) -> int:
        """Whole steps that fit into `time_s`: the inverse of `steps_s`."""
        if time_s <= 0:
            return 0
        # steps_s is square * n^2 + linear * n.
        square = batch * self.per_kv_token_s / 2
        linear = self.step_s(kv_tokens) - square
        if square == 0:
            found = int(time_s / linear)
        else:
            # This form of the root loses no digits when square is small.
            found = int(2 * time_s / (linear + math.sqrt(linear * linear + 4 * square * time_s)))
        # The root is rounded: the step that ends exactly at time_s belongs to it.
        while self.steps_s(found + 1, kv_tokens, batch) <= time_s:
            found += 1
        while found > 0 and self.steps_s(found, kv_tokens, batch) > time_s:
            found -= 1
        return found


@dataclass(frozen=True, slots=True)
class Serving:
    """A model on `tensor_parallel` GPUs that generate together."""

    model: ModelShape
    gpu: Gpu
    tensor_parallel: int = 1
    memory_share: float = 0.9
    """Of the GPUs' memory, for weights and KV cache; the rest is for activations."""
    step_overhead_s: float = 0.0

    @property
    def kv_capacity_tokens(self) -> int:
        """Room of the KV cache. Not positive: the weights alone do not fit."""
        room = self.memory_share * self.gpu.memory_bytes * self.tensor_parallel - self.model.weights_bytes
        return math.floor(room / (self.model.kv_bytes_per_token * self.kv_copies))

    @property
    def kv_copies(self) -> int:
        """Above as many GPUs as there are KV heads, heads are held several times."""
        return max(1, self.tensor_parallel // self.model.num_kv_heads)

    @property
    def weights_read_s(self) -> float:
        """All weights once, from the GPUs' memory."""
        return self.model.weights_bytes / (self.tensor_parallel * self._memory_rate)

    @property
    def load_s(self) -> float:
        """New weights from the host's memory, each GPU its part."""
        return self.model.weights_bytes / (self.tensor_parallel * self.gpu.host_bytes_per_s)

    @property
    def batch_bound(self) -> int:
        """The paper's B: the largest batch whose matrices still take no longer than reading the weights."""
        return max(1, math.floor(self.weights_read_s / self._matrices_s(1)))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of short prompts; long contexts are slower (`prefill_s`)."""
        return 1 / (self._matrices_s(1) + self._all_reduces_s(1) - self._all_reduces_s(0))

    def decode_cost(self, batch: int) -> DecodeCost:
        base_s = max(self.weights_read_s, self._matrices_s(batch)) + self._all_reduces_s(batch) + self.step_overhead_s
        kv_bytes_s = self.model.kv_bytes_per_token * self.kv_copies / (self.tensor_parallel * self._memory_rate)
        return DecodeCost(base_s, kv_bytes_s)

    def prefill_s(self, num_tokens: int, after: int = 0) -> float:
        """So many tokens behind `after` whose KV is there: matrices, causal attention, all-reduces."""
        width = self.model.num_heads * self.model.head_size
        num_pairs = num_tokens * (after + num_tokens / 2)
        attention_s = 4 * self.model.num_layers * width * num_pairs / (self.tensor_parallel * self._compute_rate)
        return self._matrices_s(num_tokens) + attention_s + self._all_reduces_s(num_tokens)

    @property
    def _memory_rate(self) -> float:
        return self.gpu.memory_bytes_per_s * self.gpu.memory_efficiency

    @property
    def _compute_rate(self) -> float:
        return self.gpu.flops_per_s * self.gpu.compute_efficiency

    def _matrices_s(self, num_tokens: int) -> float:
        return 2 * self.model.num_parameters * num_tokens / (self.tensor_parallel * self._compute_rate)

    def _all_reduces_s(self, num_tokens: int) -> float:
        """Two a layer, each over a ring: 2 (p - 1) / p of the message through every link."""
        p = self.tensor_parallel
        if p == 1:
            return 0.0
        message_bytes = num_tokens * self.model.hidden_size * self.model.bytes_per_value
        ring_s = 2 * (p - 1) / p * message_bytes / (self.gpu.link_bytes_per_s * self.gpu.link_efficiency)
        return 2 * self.model.num_layers * (self.gpu.all_reduce_latency_s + ring_s)


@dataclass(frozen=True, slots=True)
class Training:
    """A training group: 6 operations for each parameter and token (forward 2, backward 4)."""

    model: ModelShape
    gpu: Gpu
    num_gpus: int
    model_flops_utilisation: float
    """Share of the data sheet's FLOPS that these 6 operations reach, recomputation and communication included."""
    update_overhead_s: float = 0.0
    """Of one optimizer update."""

    def step_s(self, num_tokens: int, num_updates: int = 1) -> float:
        rate = self.num_gpus * self.gpu.flops_per_s * self.model_flops_utilisation
        return 6 * self.model.num_parameters * num_tokens / rate + num_updates * self.update_overhead_s
