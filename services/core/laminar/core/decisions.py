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
    max_refill_groups: int | None = None
    """Dynamic sampling: groups of equal rewards that are dropped for one step; None: such groups are kept."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may start now."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Load this version. `num_parked`: not the newest one, but kept by a relay for so many partial responses."""

    version: int
    num_parked: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """These samples, all at `version`; each sample names its own term and carries what is durable of it."""

    version: int
    samples: tuple[Sample, ...]


LeaseDecision = Wait | Refresh | Grant


class Outcome(StrEnum):
    """The answer to one write of a replica; the same words on the wire."""

    OK = "ok"
    SUPERSEDED = "superseded"
    """Another term or life holds this sample: stop generating it."""
    ENDED = "ended"
    """The sample has been consumed or discarded: this message is late."""
    GAP = "gap"
    """Send again from `durable`."""
    MISMATCH = "mismatch"
    """An overlap differs from what is durable, or is no part of a response; the sample restarts elsewhere."""
    UNKNOWN = "unknown"
    """No such sample was ever admitted, or no such term issued."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """`durable`: the length the writer may forget up to, once the store has committed."""

    outcome: Outcome
    durable: int = 0


class Loss(StrEnum):
    """How a replica lost its samples."""

    SUSPECT = "suspect"
    """Silent or cut off; it may come back in the same life."""
    DEAD = "dead"
    """This life is over, and not by its own will: the samples it ran are under suspicion too."""
    LEFT = "left"
    """Drained, or it does not run them: says nothing about the samples."""


class Fate(StrEnum):
    """What became of a sample whose replica was lost."""

    MOVED = "moved"
    """Another replica has it, with what is durable of it."""
    PARKED = "parked"
    """Keeps version and tokens, and waits for a replica that runs or loads this version."""
    RESTARTED = "restarted"
    """Starts again from its prompt, with whatever version is granted next."""
    UNGRADED = "ungraded"
    """Generation has ended; the next replica that lives grades it."""
    POISONED = "poisoned"
    """Set aside: too many lives ended while they ran it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A sample that changed hands. `ended_term`: nothing that `source` says under it, or under an earlier one, counts
    any more. `to` is set for MOVED only."""

    sample: Sample
    source: Holder
    ended_term: int
    fate: Fate
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
    parked_samples: int = 0
    poisoned_samples: int = 0
    filtered_groups: int = 0
    """Groups of equal rewards that were dropped, over the whole job."""
    refilled_groups: int = 0
    """Those of them since the last batch was sealed: what the cap on refills counts."""
    repeated: int = 0
    """Writes that said what was known already; answered as the first."""
    refused: Counter[str] = field(default_factory=Counter[str])


class StepConflict(ValueError):
    """A trainer's call for a step that is not due."""
