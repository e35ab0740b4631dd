"""Training that only takes time: as long as the job's emulated GPUs would need, at the job's time scale.

Batches, commits, publications and checkpoints are real; the weights are a few bytes that differ from step to step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from laminar.core.groups import num_updates
from laminar.shell.handover import HandedOver, hand_over
from laminar.shell.logs import fields
from laminar.shell.transport import Dial
from laminar.trainer import checkpoint_folder, loop
from laminar.trainer.attempt import Attempt
from laminar.trainer.failures import InputFailure
from laminar.trainer.model_folder import put_in_place
from laminar.trainer.publish import HandOver
from laminar.trainer.pulse import Pulse
from laminar.trainer.saving import WaitWritten
from laminar.trainer.settings import TrainerSettings
from laminar.wire.codec import num_items
from laminar.wire.dataplane import BatchSlice
from laminar.wire.emulated import training_of
from laminar.wire.manifest import Manifest, TensorEntry, layout
from laminar.wire.sources import local_path
from laminar.wire.spec import JobSpec, LaminarJob

log = logging.getLogger(__name__)

WEIGHTS_BYTES = 2**18
"""Enough to be cut into chunks once relays measure small links; nothing beside what a real model weighs."""
STATE = "state.json"

T = TypeVar("T")

Wait = Callable[[float], object]
"""Seconds of this machine. They are the emulated work itself, not a guess of when something is ready."""


class OneRank:
    """One process stands for the whole group."""

    rank = 0
    size = 1
    is_first = True

    def broadcast(self, value: T | None) -> T:
        assert value is not None
        return value

    def meet(self) -> None:
        return


class EmulatedTraining:
    """What is trained and who trains it. Invariant: equal steps have equal weights, in every attempt."""

    def __init__(self, spec: JobSpec, model: Path, wait: Wait) -> None:
        emulation, section = spec.emulation, spec.trainer.emulated
        assert emulation is not None and section is not None, "checked with the job"
        self._training = training_of(spec)
        self._scale, self._grain = emulation.time_scale, emulation.token_grain
        self._stall_s = section.stall_seconds / self._scale
        self._mini_batch = spec.algorithm.mini_batch_trajectories
        self._model = model
        self._wait = wait
        self._step = 0

    @property
    def entries(self) -> list[TensorEntry]:
        return layout([("emulated.weights", "U8", (WEIGHTS_BYTES,))])

    def step(self, batch: BatchSlice) -> dict[str, float]:
        """Waits as long as the group would compute; `train_s` is real time, `emulated_train_s` that of the group."""
        samples = [sample for group in batch.groups for sample in group.samples]
        num_prompt = sum(num_items(group.prompt_tokens) * len(group.samples) for group in batch.groups)
        num_response = sum(num_items(sample.tokens) for sample in samples)
        updates = num_updates(batch.num_samples_total, self._mini_batch)
        emulated_s = self._training.step_s((num_prompt + num_response) * self._grain, updates)
        self._wait(emulated_s / self._scale)
        self._step = batch.step
        return {
            "updates": float(updates),
            "reward_mean": sum(sample.reward for sample in samples) / max(1, len(samples)),
            "tokens": float(num_response),
            "emulated_train_s": emulated_s,
            "train_s": emulated_s / self._scale,
        }

    def copy_weights(self, buffer: bytearray | None) -> None:
        """The hand-off that stops training."""
        assert buffer is not None, "one rank publishes"
        self._wait(self._stall_s)
        buffer[:] = hashlib.shake_128(str(self._step).encode()).digest(WEIGHTS_BYTES)

    def begin_save(self, folder: Path, step: int) -> WaitWritten:
        failed: OSError | None = None
        try:
            folder.mkdir()
            checkpoint_folder.write_synced(folder / STATE, json.dumps({"step": step}).encode())
        except OSError as error:
            failed = error

        def wait_written(limit_s: float) -> None:
            if failed is not None:
                raise failed

        return wait_written

    def restore(self, folder: Path) -> int:
        try:
            self._step = int(json.loads((folder / STATE).read_bytes())["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputFailure(f"The checkpoint {folder} is not one of an emulated trainer: {error}.") from error
        return self._step

    def write_model(self, out: Path) -> None:
        """The model that the job started from: nothing was learned."""
        unfinished = out.with_name(f"{out.name}{checkpoint_folder.UNFINISHED}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(self._model, unfinished)
        put_in_place(unfinished, out)


def slowed(broadcast_s: float, wait: Wait, send: HandOver = hand_over) -> HandOver:
    """A hand-over that begins only when the emulated broadcast would be through."""

    def hand_over_late(
        address: str, token: str, job_uid: str, attempt: int, manifest: Manifest, chunks: bytearray, deadline_s: float,
        *, dial: Dial,
    ) -> HandedOver:  # fmt: skip
        wait(broadcast_s)
        return send(address, token, job_uid, attempt, manifest, chunks, deadline_s, dial=dial)

    return hand_over_late


def run(settings: TrainerSettings, job: LaminarJob, stop_asked: Callable[[], bool]) -> None:
    """The whole group, from its first call to its last."""
    emulation, section = job.spec.emulation, job.spec.trainer.emulated
    assert emulation is not None and section is not None, "checked with the job"
    pulse = Pulse.from_env()
    wait: Wait = threading.Event().wait  # of an event that nobody sets
    training = EmulatedTraining(job.spec, local_path(job.spec.model.source), wait)
    attempt = Attempt(
        settings, OneRank(), training, training.begin_save, job.spec.trainer.checkpoint.keep, pulse, stop_asked,
        slowed(section.broadcast_seconds / emulation.time_scale, wait),
    )  # fmt: skip
    loop.train(job.spec, attempt, training)
    attempt.close()
    pulse.close()
    log.info("training ends", extra=fields(attempt=settings.attempt))
