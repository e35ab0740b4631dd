"""From a job's fields to the emulated machines of `laminar.core`."""

from __future__ import annotations

from laminar.core.lengths import Lognormal, Recorded
from laminar.core.roofline import Gpu, ModelShape, Serving, Training
from laminar.wire.spec import JobSpec
from laminar.wire.spec_emulation import EmulatedEngine, EmulatedTrainer, Emulation, ResponseLengths


def serving_of(spec: JobSpec) -> Serving:
    """One replica. The job's engine must be emulated."""
    engine = _engine(spec)
    emulation = _emulation(spec)
    return Serving(
        model=_model(emulation), gpu=_gpu(emulation), tensor_parallel=spec.rollout.gpus_per_replica,
        memory_share=engine.memory_share, step_overhead_s=engine.step_overhead_seconds,
    )  # fmt: skip


def lengths_of(lengths: ResponseLengths) -> Lognormal | Recorded:
    if lengths.recorded_tokens is not None:
        return Recorded(tuple(lengths.recorded_tokens))
    assert lengths.median_tokens is not None, "checked with the job"
    return Lognormal(lengths.median_tokens, lengths.p99_over_median)


def training_of(spec: JobSpec) -> Training:
    """The whole group. The job's trainer must be emulated."""
    trainer = _trainer(spec)
    emulation = _emulation(spec)
    return Training(
        model=_model(emulation), gpu=_gpu(emulation), num_gpus=spec.trainer.replicas * spec.trainer.gpus_per_replica,
        model_flops_utilisation=trainer.model_flops_utilisation, update_overhead_s=trainer.update_overhead_seconds,
    )  # fmt: skip


def _emulation(spec: JobSpec) -> Emulation:
    assert spec.emulation is not None, "checked with the job"
    return spec.emulation


def _engine(spec: JobSpec) -> EmulatedEngine:
    assert spec.rollout.engine.emulated is not None, "the job's engine is not emulated"
    return spec.rollout.engine.emulated


def _trainer(spec: JobSpec) -> EmulatedTrainer:
    assert spec.trainer.emulated is not None, "the job's trainer is not emulated"
    return spec.trainer.emulated


def _model(emulation: Emulation) -> ModelShape:
    model = emulation.model
    return ModelShape(
        num_parameters=model.num_parameters, num_layers=model.num_hidden_layers, num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads, head_size=model.head_dim, hidden_size=model.hidden_size,
        bytes_per_value=model.bytes_per_value,
    )  # fmt: skip


def _gpu(emulation: Emulation) -> Gpu:
    gpu = emulation.gpu
    return Gpu(
        memory_bytes=gpu.memory_bytes, memory_bytes_per_s=gpu.memory_bytes_per_second,
        flops_per_s=gpu.flops_per_second, link_bytes_per_s=gpu.link_bytes_per_second,
        host_bytes_per_s=gpu.host_bytes_per_second, memory_efficiency=gpu.memory_efficiency,
        compute_efficiency=gpu.compute_efficiency, link_efficiency=gpu.link_efficiency,
        all_reduce_latency_s=gpu.all_reduce_latency_seconds,
    )  # fmt: skip
