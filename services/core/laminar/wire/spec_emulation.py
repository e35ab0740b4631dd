"""The fields of a job whose engines or trainer are emulated.

One emulated machine for both: `spec.emulation` says what GPUs and model they stand for, and how fast their time goes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from laminar.wire.spec_model import SpecModel


class EmulatedModel(SpecModel):
    """A dense decoder; the names are those of config.json, but for the first."""

    num_parameters: float = Field(gt=0, le=1e14, description="Parameters, embeddings included.")
    num_hidden_layers: int = Field(ge=1, le=10_000, description="Layers.")
    num_attention_heads: int = Field(ge=1, le=10_000, description="Query heads of a layer.")
    num_key_value_heads: int = Field(ge=1, le=10_000, description="Key and value heads of a layer.")
    head_dim: int = Field(ge=1, le=10_000, description="Width of a head.")
    hidden_size: int = Field(ge=1, le=1_000_000, description="Width of a layer.")
    bytes_per_value: int = Field(default=2, ge=1, le=8, description="Of weights and KV cache.")


class EmulatedGpu(SpecModel):
    """Rates are of the data sheet; efficiencies are what kernels reach of them."""

    memory_bytes: float = Field(gt=0, le=1e15, description="Memory of one GPU.")
    memory_bytes_per_second: float = Field(gt=0, le=1e18, description="Bandwidth of that memory.")
    flops_per_second: float = Field(gt=0, le=1e20, description="Dense operations in the model's precision.")
    link_bytes_per_second: float = Field(gt=0, le=1e18, description="To the machine's other GPUs, one direction.")
    host_bytes_per_second: float = Field(gt=0, le=1e18, description="From the host's memory: how fast weights load.")
    memory_efficiency: float = Field(default=1.0, gt=0, le=1, description="Reached share of the memory's bandwidth.")
    compute_efficiency: float = Field(default=1.0, gt=0, le=1, description="Reached share of the operations.")
    link_efficiency: float = Field(default=1.0, gt=0, le=1, description="Reached share of the link's bandwidth.")
    all_reduce_latency_seconds: float = Field(default=0.0, ge=0, le=1, description="Of an all-reduce without data.")


class Emulation(SpecModel):
    """The machines that emulated engines and an emulated trainer stand for."""

    time_scale: float = Field(
        default=1.0, gt=0, le=10_000, description="Seconds of the emulated machines that pass in one second."
    )
    token_grain: int = Field(
        default=1, ge=1, le=65_536,
        description="Tokens of the emulated machines for each token of the run, so that many can be emulated on few "
        "cores. maxResponseTokens and the prompts count in tokens of the run.",
    )  # fmt: skip
    model: EmulatedModel = Field(description="The model that is generated with and trained.")
    gpu: EmulatedGpu = Field(description="The GPUs, gpusPerReplica of them for each replica and rank.")


class ResponseLengths(SpecModel):
    """Lognormal, by two numbers that papers publish, or recorded ones. In tokens of the emulated machines."""

    median_tokens: float | None = Field(default=None, ge=1, le=1e7, description="Half of the responses are longer.")
    p99_over_median: float = Field(
        default=10.0, ge=1, le=1000, description="How many times the median one response in a hundred exceeds."
    )
    recorded_tokens: list[Annotated[int, Field(ge=1, le=10_000_000)]] | None = Field(
        default=None, min_length=1, max_length=65_536,
        description="Lengths of real responses instead: each response gets one of them.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _exactly_one(self) -> ResponseLengths:
        if (self.median_tokens is None) == (self.recorded_tokens is None):
            raise ValueError("give exactly one of 'medianTokens' and 'recordedTokens'")
        return self


class EmulatedEngine(SpecModel):
    lengths: ResponseLengths = Field(description="How long responses are, before maxResponseTokens cuts them.")
    memory_share: float = Field(
        default=0.9, gt=0, le=1, description="Of the GPUs' memory, for weights and KV cache together."
    )
    step_overhead_seconds: float = Field(
        default=0.0, ge=0, le=10, description="Of one decode step, beside memory and arithmetic: scheduling, sampling."
    )


class EmulatedTrainer(SpecModel):
    """Times are of the emulated machines."""

    model_flops_utilisation: float = Field(
        default=0.4, gt=0, le=1,
        description="Share of the GPUs' FLOPS that 6 operations a parameter and token reach, all else included.",
    )  # fmt: skip
    update_overhead_seconds: float = Field(
        default=0.0, ge=0, le=3600, description="Of one optimizer update, beside its operations."
    )
    stall_seconds: float = Field(
        default=0.0, ge=0, le=3600, description="How long a publication stops training: the hand-over's copy."
    )
    broadcast_seconds: float = Field(
        default=0.0, ge=0, le=3600, description="How long a version is on its way before the first replica can load it."
    )
