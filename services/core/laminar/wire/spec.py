"""The LaminarJob: the one source for YAML files, the custom resource and the services.

A field exists once it works. Field names are camelCase in files and snake_case in Python; unknown fields are
refused (`laminar.wire.job_file` turns a refusal into a sentence that names the nearest right field). Times end in
`Seconds`. Unions are `type` plus one member object.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from laminar.wire.links import HandOff
from laminar.wire.spec_emulation import EmulatedEngine, EmulatedTrainer, Emulation
from laminar.wire.spec_model import SpecModel

API_VERSION = "laminar.dev/v1alpha1"
KIND = "LaminarJob"

Name = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS-1035 label, short enough that every child's name (`<job>-trainer-<attempt>-<rank>`) stays below 63."""
Source = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^(file:|recipe://)")]
"""Where a model or data set comes from: `file:PATH` (relative to the job file) or `recipe://NAME` (made and cached)."""
FieldPath = Annotated[str, Field(min_length=1, max_length=256)]
"""A column of the data file; dots go into nested columns (`reward_model.ground_truth`)."""


class Model(SpecModel):
    source: Source = Field(description="A Hugging Face model folder: config.json, weights, tokenizer.json.")


class TrainData(SpecModel):
    source: Source = Field(description="JSONL or parquet file, one prompt a row.")
    prompt_field: FieldPath = Field(
        default="prompt", description="Column of the prompt: a string, or a list of chat messages."
    )
    answer_field: FieldPath = Field(
        default="answer", description="Column of the reference answer that the rewards compare with."
    )


class Data(SpecModel):
    train: TrainData = Field(description="The prompts to train on.")
    max_prompt_tokens: int = Field(
        default=1024, ge=1, le=1_000_000, description="Longer prompts are left out of training and counted as tooLong."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of the order of prompts and of every sample's randomness."
    )


class Evaluation(SpecModel):
    name: Name = Field(description="Name in tables, metrics and the report; unique in the list.")
    source: Source = Field(description="JSONL or parquet file of prompts that are not trained on.")
    prompt_field: FieldPath = Field(
        default="prompt", description="Column of the prompt: a string, or a list of chat messages."
    )
    answer_field: FieldPath = Field(
        default="answer", description="Column of the reference answer that the rewards compare with."
    )
    samples_per_prompt: int = Field(
        default=1, ge=1, le=64, description="Sampled responses a prompt at temperature 1; one greedy one is added."
    )


class Extract(SpecModel):
    """Where the answer stands inside a response; exactly one of the two."""

    tag: str | None = Field(
        default=None, min_length=1, max_length=64, pattern=r"^[A-Za-z][\w-]*$",
        description="The text between the last <tag> and </tag>.",
    )  # fmt: skip
    regex: str | None = Field(
        default=None, min_length=1, max_length=1024, description="The first group of the last match, else the match."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Extract:
        if (self.tag is None) == (self.regex is None):
            raise ValueError("give exactly one of 'tag' and 'regex'")
        return self


class RewardType(StrEnum):
    EXACT = "exact"
    MATH = "math"
    PYTHON = "python"


class Reward(SpecModel):
    name: Name = Field(description="Name of this part of the reward; unique in the list.")
    type: RewardType = Field(description="exact: equal text; math: equal value (math-verify); python: your function.")
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="The reward is the weighted sum of all entries.")
    extract: Extract | None = Field(default=None, description="Take this part of the response; without it, all of it.")
    function: str | None = Field(
        default=None, max_length=1024, pattern=r"^.+\.py:[A-Za-z_]\w*$",
        description="python only: `file.py:name`, called as name(prompt=, response=, answer=) -> float.",
    )  # fmt: skip
    timeout_seconds: float = Field(
        default=10.0, gt=0, le=600, description="Wall-clock limit of one grading; past it the grader is killed."
    )

    @model_validator(mode="after")
    def _function_belongs_to_python(self) -> Reward:
        if (self.type is RewardType.PYTHON) != (self.function is not None):
            raise ValueError("'function' (file.py:name) belongs to type python, and only to it")
        return self


class Sampling(SpecModel):
    max_response_tokens: int = Field(
        default=1024, ge=1, le=1_000_000, description="A response is cut here; one that was cut gets reward 0."
    )
    temperature: float = Field(
        default=1.0, gt=0, le=10, description="Of training responses; the loss uses log-probs at the same temperature."
    )
    top_p: float = Field(
        default=1.0, ge=1.0, le=1.0,
        description="Only 1.0: a truncated distribution would make the behaviour log-probs wrong.",
    )  # fmt: skip


class Clip(SpecModel):
    low: float = Field(
        default=0.2, gt=0, lt=1, description="The probability ratio counts down to 1 - low, for negative advantages."
    )
    high: float = Field(
        default=0.28, gt=0, le=100, description="The probability ratio counts up to 1 + high, for positive advantages."
    )


class DynamicSampling(SpecModel):
    """Presence turns it on (as in DAPO): groups of equal rewards are dropped, and other prompts take their place."""

    max_refills: int = Field(
        default=4, ge=1, le=1000,
        description="At most this many times promptsPerStep groups are dropped for one step; then such groups are "
        "kept, and stay out of the loss.",
    )  # fmt: skip


class LossType(StrEnum):
    GRPO = "grpo"


class Algorithm(SpecModel):
    loss: LossType = Field(
        default=LossType.GRPO, description="grpo: clipped token ratios, advantages standardised within each group."
    )
    prompts_per_step: int = Field(default=32, ge=1, le=65_536, description="Prompts, and so groups, of one step.")
    samples_per_prompt: int = Field(default=8, ge=2, le=1024, description="Responses of one prompt: its group.")
    mini_batch_trajectories: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Trajectories of one optimizer update; unset: one update a step."
    )
    dynamic_sampling: DynamicSampling | None = Field(
        default=None,
        description="Present, as in {}: groups whose graded responses all have the same reward are dropped and counted "
        "as filtered, and other prompts take their place.",
    )  # fmt: skip
    clip: Clip = Field(default=Clip(), description="Range in which a token's probability ratio counts.")
    learning_rate: float = Field(
        default=1.0e-6, gt=0, le=1, description="Of AdamW; reached over the first 5 steps, constant afterwards."
    )


class ScheduleType(StrEnum):
    LAMINAR = "laminar"
    SYNCHRONOUS = "synchronous"


class ScheduleSpec(SpecModel):
    type: ScheduleType = Field(
        default=ScheduleType.LAMINAR,
        description="laminar: each replica loads the newest weights when its own batch ends; synchronous: all "
        "trajectories of a step come from the weights that the step starts from.",
    )
    max_ahead_steps: int = Field(
        default=2, ge=1, le=64,
        description="laminar: new groups start only while fewer than this many steps' worth are started and not yet "
        "trained on.",
    )  # fmt: skip


class Checkpoint(SpecModel):
    every_steps: int = Field(
        default=10, ge=1, le=1_000_000, description="Steps between checkpoints; there is always one at the end."
    )
    keep: int = Field(default=3, ge=1, le=1000, description="Newest checkpoints kept; older ones are removed.")


class TrainerType(StrEnum):
    TORCH = "torch"
    EMULATED = "emulated"


class Trainer(SpecModel):
    type: TrainerType = Field(
        default=TrainerType.TORCH,
        description="torch: trains. emulated: takes, commits and publishes as one, and waits as long as the emulated "
        "GPUs would take; nothing is learned.",
    )  # fmt: skip
    emulated: EmulatedTrainer | None = Field(default=None, description="How long a step takes. For type emulated.")
    replicas: int = Field(default=1, ge=1, le=4096, description="Ranks (embedded), or pods (cluster).")
    gpus_per_replica: int = Field(
        default=0, ge=0, le=16, description="GPUs of one rank; the local driver uses the number for type emulated only."
    )
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When to save, and how much to keep.")
    backoff_limit: int = Field(
        default=5, ge=0, le=1000, description="Failed attempts without a newer checkpoint before the job fails."
    )


class EngineType(StrEnum):
    TORCH = "torch"
    EMULATED = "emulated"


class Engine(SpecModel):
    type: EngineType = Field(
        default=EngineType.TORCH,
        description="torch: transformers with a plain KV cache, on the CPU. emulated: no model, random tokens at the "
        "pace of the emulated GPUs.",
    )  # fmt: skip
    emulated: EmulatedEngine | None = Field(default=None, description="What the pace rests on. For type emulated.")
    max_running: int = Field(default=64, ge=1, le=4096, description="Trajectories that one engine decodes together.")


class Rollout(SpecModel):
    replicas: int = Field(default=2, ge=1, le=4096, description="Rollout replicas; each has one engine.")
    gpus_per_replica: int = Field(
        default=0,
        ge=0,
        le=16,
        description="GPUs of one replica; the local driver uses the number for type emulated only.",
    )
    prompts_per_lease: int | None = Field(
        default=None, ge=1, le=65_536, description="Groups of one lease; unset: promptsPerStep / replicas, rounded up."
    )
    stall_seconds: float = Field(
        default=60.0, ge=5, le=3600,
        description="A replica that has responses to generate and no token for so long gets a new engine; its "
        "responses go on elsewhere.",
    )  # fmt: skip
    engine: Engine = Field(default=Engine(), description="What generates the responses.")


class Relay(SpecModel):
    keep_versions: int = Field(default=2, ge=2, le=64, description="Complete versions that each relay keeps.")
    retain_slots: int = Field(
        default=0, ge=0, le=64,
        description="Slots more, for older versions that unfinished trajectories still need. Each costs one version "
        "of memory on every rollout machine.",
    )  # fmt: skip
    handoff: HandOff = Field(
        default=HandOff.AUTO,
        description="How engines get weights: memfd maps the relay's memory, tcp copies it; auto maps, and copies "
        "where that does not work or the machine's relay is dead.",
    )
    read_deadline_seconds: float = Field(
        default=30.0, gt=0, le=3600,
        description="For how long an engine that reads a version keeps its slot from being taken for a newer one.",
    )  # fmt: skip


class TensorBoard(SpecModel):
    """Presence turns it on: event files in RUN/tensorboard."""


class Loggers(SpecModel):
    tensorboard: TensorBoard | None = Field(
        default=None, description="Present, as in {}: event files in RUN/tensorboard."
    )


class JobSpec(SpecModel):
    steps: int = Field(ge=1, le=10_000_000, description="Training steps; may only grow while a job runs.")
    model: Model = Field(description="The model to train.")
    data: Data = Field(description="Prompts, and the order in which they come.")
    evaluations: list[Evaluation] = Field(
        default=[], max_length=16,
        description="Held-out data, scored at the first and at the last version, sampled and greedy; training waits.",
    )  # fmt: skip
    rewards: list[Reward] = Field(
        min_length=1, max_length=16, description="How a response is graded: the sum of these."
    )
    sampling: Sampling = Field(default=Sampling(), description="How training responses are generated.")
    algorithm: Algorithm = Field(default=Algorithm(), description="What one training step computes.")
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="When responses start, and with which weights.")
    trainer: Trainer = Field(default=Trainer(), description="The processes that train.")
    rollout: Rollout = Field(default=Rollout(), description="The processes that generate and grade.")
    relay: Relay = Field(default=Relay(), description="The processes that carry weights to the rollouts.")
    emulation: Emulation | None = Field(
        default=None, description="What engines and trainers of type emulated stand for. For them only."
    )
    loggers: Loggers = Field(default=Loggers(), description="Records beside RUN/metrics.jsonl.")

    @field_validator("evaluations", "rewards")
    @classmethod
    def _names_are_unique(cls, items: list[Evaluation] | list[Reward]) -> list[Evaluation] | list[Reward]:
        names = [item.name for item in items]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name '{name}' is used twice")
        return items

    @model_validator(mode="after")
    def _whole_updates(self) -> JobSpec:
        mini = self.algorithm.mini_batch_trajectories
        if mini is not None and mini < self.algorithm.samples_per_prompt:
            raise ValueError("algorithm.miniBatchTrajectories must hold at least one group (samplesPerPrompt)")
        return self

    @model_validator(mode="after")
    def _emulated_parts(self) -> JobSpec:
        engine, trainer = self.rollout.engine, self.trainer
        parts = {
            "rollout.engine": (engine.type is EngineType.EMULATED, engine.emulated, self.rollout.gpus_per_replica),
            "trainer": (trainer.type is TrainerType.EMULATED, trainer.emulated, trainer.gpus_per_replica),
        }
        for path, (emulated, section, num_gpus) in parts.items():
            if emulated != (section is not None):
                raise ValueError(f"'{path}.emulated' belongs to {path}.type emulated, and only to it")
            if emulated and not num_gpus:
                raise ValueError(f"{path}.type emulated needs gpusPerReplica of at least 1: the GPUs to emulate")
        if any(emulated for emulated, _, _ in parts.values()) != (self.emulation is not None):
            raise ValueError("'emulation' belongs to jobs with an engine or trainer of type emulated, and only to them")
        return self

    @property
    def prompts_per_lease(self) -> int:
        """Groups granted in one lease."""
        return self.rollout.prompts_per_lease or math.ceil(self.algorithm.prompts_per_step / self.rollout.replicas)


class Metadata(SpecModel):
    name: Name = Field(description="The job's name, and that of its run folder.")


class LaminarJob(SpecModel):
    """One training job: `kubectl apply -f` or `laminar run`."""

    api_version: Literal["laminar.dev/v1alpha1"] = Field(default=API_VERSION, description="Version of these fields.")
    kind: Literal["LaminarJob"] = Field(default=KIND, description="What this document describes.")
    metadata: Metadata = Field(description="What names the job.")
    spec: JobSpec = Field(description="What the job is to do.")
