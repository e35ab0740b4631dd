"""Settings of a rollout's agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laminar.core.lengths import Lognormal, Recorded
from laminar.rollout.engine_messages import EmulatedMachine
from laminar.rollout.model_folder import eos_ids, tokenizer_path
from laminar.rollout.rewards import RewardRule, rule_of
from laminar.shell.settings import Common, env_int, env_path
from laminar.wire.emulated import lengths_of, serving_of
from laminar.wire.links import HandOff
from laminar.wire.sources import local_path
from laminar.wire.spec import EngineType, JobSpec, RewardType


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What this replica is, and what of the job it needs."""

    common: Common
    index: int
    handoff: Path
    """Unix socket of its machine's relay."""
    handoff_kind: HandOff
    model_folder: Path
    max_running: int
    max_length: int
    """Prompt and response, in tokens."""
    temperature: float
    """The job's; a grant names its own."""
    rules: tuple[RewardRule, ...]
    engine: EngineType = EngineType.TORCH
    emulated: EmulatedMachine | None = None
    """For the emulated engine."""

    @classmethod
    def from_env(cls, common: Common) -> RolloutSettings:
        """Raises SettingsError, ModelFolderError or NotResolved."""
        spec: JobSpec = common.load_job().spec
        return cls(
            common=common,
            index=env_int("LAMINAR_INDEX"),
            handoff=env_path("LAMINAR_HANDOFF"),
            handoff_kind=spec.relay.handoff,
            model_folder=local_path(spec.model.source),
            max_running=spec.rollout.engine.max_running,
            max_length=spec.data.max_prompt_tokens + spec.sampling.max_response_tokens,
            temperature=spec.sampling.temperature,
            rules=tuple(rule_of(reward) for reward in spec.rewards),
            engine=spec.rollout.engine.type,
            emulated=_machine(spec),
        )

    @property
    def num_graders(self) -> int:
        """A second worker goes on while a reward hangs in the first; comparing text cannot hang."""
        quick = all(rule.type is RewardType.EXACT and not rule.regex for rule in self.rules)
        return 1 if quick else 2

    @property
    def tokenizer(self) -> Path:
        return tokenizer_path(self.model_folder)

    @property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids(self.model_folder)


def _machine(spec: JobSpec) -> EmulatedMachine | None:
    section = spec.rollout.engine.emulated
    if section is None or spec.emulation is None:
        return None
    lengths = lengths_of(section.lengths)
    return EmulatedMachine(
        serving=serving_of(spec), time_scale=spec.emulation.time_scale, token_grain=spec.emulation.token_grain,
        lognormal=lengths if isinstance(lengths, Lognormal) else None,
        recorded=lengths if isinstance(lengths, Recorded) else None,
    )  # fmt: skip
