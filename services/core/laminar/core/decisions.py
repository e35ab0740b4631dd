"""What goes into the ledger and comes out of it: the plan of a job, decisions, and what the store has to write."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from laminar.core.identity import SampleKey
from laminar.core.samples import Group, Holder, Sample


@dataclass(frozen=True, slots=True)
class LedgerPlan:
    """The numbers of the job that the ledger needs. `too_long`: prompts over the limit, discarded when drawn."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    groups_per_lease: int
    max_ahead_steps: int
    num_prompts: int
    seed: int
    max_response_tokens: int
    too_long: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may start now."""


@dataclass(frozen=True, slots=True)
class Refresh:
    version: int


@dataclass(frozen=True, slots=True)
class Grant:
    """These samples, all at `version`; each sample names its own term and carries what is durable of it."""

    version: int
    samples: tuple[Sample, ...]


LeaseDecision = Wait | Refresh | Grant


class Outcome(StrEnum):
    OK = "ok"
    SUPERSEDED = "superseded"
    GAP = "gap"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WriteResult:
    """`durable`: the length the writer may forget up to, once the store has committed."""

    outcome: Outcome
    durable: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """A sample that changed hands. `to` None: it restarts, or waits for a grader."""

    sample: Sample
    source: Holder
    to: Holder | None
    restarted_tokens: int
    reason: str


@dataclass(slots=True)
class Changes:
    """What the store has to write, in one transaction. `appended`: (sample, offset, tokens, log-probs)."""

    groups: list[Group] = field(default_factory=list[Group])
    samples: list[Sample] = field(default_factory=list[Sample])
    appended: list[tuple[SampleKey, int, bytes, bytes]] = field(
        default_factory=list[tuple[SampleKey, int, bytes, bytes]]
    )
    cleared: list[SampleKey] = field(default_factory=list[SampleKey])

    def __bool__(self) -> bool:
        return bool(self.groups or self.samples or self.appended or self.cleared)


@dataclass(slots=True)
class Counters:
    """Totals of the surviving lineage; written with every change."""

    admitted: int = 0
    consumed: int = 0
    discarded: Counter[str] = field(default_factory=Counter[str])
    restarted_samples: int = 0
    restarted_tokens: int = 0
    moved_samples: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])


class StepConflict(ValueError):
    """A trainer's call for a step that is not due."""
