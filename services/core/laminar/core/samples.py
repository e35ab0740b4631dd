"""Samples and groups: what they hold, and the table of what may happen to a sample.

    pending -> leased -> finished -> graded -> batched -> consumed(step)
       \\________\\__________\\_________\\______-> discarded(reason)

Every admitted sample ends in exactly one of the two terminal states. Going back is possible in two places only:
a lost or failed response waits again (leased -> pending; *parked* with its version and tokens, or *restarted* without),
and a trainer that recovers from an older checkpoint gets the same batches again (consumed -> batched).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from laminar.core.identity import GroupKey, SampleKey


class SampleState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    FINISHED = "finished"
    GRADED = "graded"
    BATCHED = "batched"
    CONSUMED = "consumed"
    DISCARDED = "discarded"


class SampleEvent(StrEnum):
    GRANT = "grant"
    MOVE = "move"
    PARK = "park"
    """Keeps its version and tokens; waits for a replica that runs or loads this version."""
    RESTART = "restart"
    FINISH = "finish"
    ORPHAN = "orphan"
    """Finished, but its grader's replica is gone and nobody grades it yet."""
    GRADE = "grade"
    SEAL = "seal"
    COMMIT = "commit"
    ROLL_BACK = "rollBack"
    DISCARD = "discard"


class DiscardReason(StrEnum):
    UNGRADED = "ungraded"
    FAILED = "failed"
    FILTERED = "filtered"
    TOO_LONG = "tooLong"
    SURPLUS = "surplus"


class IllegalTransition(AssertionError):
    """Our own mistake: the table has no such move."""


_S, _E = SampleState, SampleEvent
TRANSITIONS: dict[tuple[SampleState, SampleEvent], SampleState] = {
    (_S.PENDING, _E.GRANT): _S.LEASED,
    (_S.PENDING, _E.RESTART): _S.PENDING,
    (_S.PENDING, _E.DISCARD): _S.DISCARDED,
    (_S.LEASED, _E.MOVE): _S.LEASED,
    (_S.LEASED, _E.PARK): _S.PENDING,
    (_S.LEASED, _E.RESTART): _S.PENDING,
    (_S.LEASED, _E.FINISH): _S.FINISHED,
    (_S.LEASED, _E.DISCARD): _S.DISCARDED,
    (_S.FINISHED, _E.MOVE): _S.FINISHED,
    (_S.FINISHED, _E.ORPHAN): _S.FINISHED,
    (_S.FINISHED, _E.GRANT): _S.FINISHED,
    (_S.FINISHED, _E.GRADE): _S.GRADED,
    (_S.FINISHED, _E.DISCARD): _S.DISCARDED,
    (_S.GRADED, _E.SEAL): _S.BATCHED,
    (_S.GRADED, _E.DISCARD): _S.DISCARDED,
    (_S.BATCHED, _E.COMMIT): _S.CONSUMED,
    (_S.CONSUMED, _E.ROLL_BACK): _S.BATCHED,
}
TERMINAL = frozenset({SampleState.CONSUMED, SampleState.DISCARDED})
RUNNING = frozenset({SampleState.LEASED, SampleState.FINISHED})
"""States in which a replica may hold the sample."""


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """The life of a replica that may write a sample."""

    slot: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ToolSpan:
    """Tokens [start, start + length) of a response are the result of tool call `call` (from 0 on), not the model's:
    they have no log-probs (zeros stand in for them) and are never trained on."""

    start: int
    length: int
    call: int


@dataclass(slots=True)
class Sample:
    """One response. `tokens` (int32) and `logprobs` (float32) are packed little-endian and only grow within a term's
    chain; a restart empties them and is counted. `tools` lies in the tokens, ascending, without overlaps."""

    key: SampleKey
    state: SampleState = SampleState.PENDING
    term: int = 0
    holder: Holder | None = None
    version: int | None = None
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    finish_reason: str = ""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])
    failures: int = 0
    restarts: int = 0
    moves: int = 0
    inherent: int | None = None
    across_rollback: bool = False
    reason: DiscardReason | None = None
    detail: str = ""
    leased_wall_s: float = 0.0
    finished_wall_s: float = 0.0
    tools: list[ToolSpan] = field(default_factory=list[ToolSpan])
    lost_lives: dict[Holder, bool] = field(default_factory=dict[Holder, bool])
    """Lives that ran it when they were lost; True: known to be dead. More than one dead, and it is poison."""

    @property
    def length(self) -> int:
        """Durable tokens of the response."""
        return len(self.tokens) // 4

    @property
    def is_parked(self) -> bool:
        """Waits for a replica of its version."""
        return self.state is SampleState.PENDING and self.version is not None

    @property
    def is_orphan(self) -> bool:
        """Waits for somebody to grade it."""
        return self.state is SampleState.FINISHED and self.holder is None

    def move_to(self, event: SampleEvent) -> None:
        """Apply the table. Raises IllegalTransition."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise IllegalTransition(f"sample {self.key}: no {event} in state {self.state}")
        self.state = after


class GroupState(StrEnum):
    OPEN = "open"
    READY = "ready"
    """All its samples have ended and enough are graded."""
    BATCHED = "batched"
    CONSUMED = "consumed"
    DISCARDED = "discarded"


@dataclass(slots=True)
class Group:
    """All samples of one prompt. `ready_seq` orders groups by when they became ready: oldest first into batches."""

    key: GroupKey
    samples: list[Sample]
    state: GroupState = GroupState.OPEN
    ready_seq: int = 0
    step: int | None = None

    @property
    def graded(self) -> list[Sample]:
        """The samples that count in the group's statistics, in index order."""
        kept = (SampleState.GRADED, SampleState.BATCHED, SampleState.CONSUMED)
        return [sample for sample in self.samples if sample.state in kept]

    @property
    def has_equal_rewards(self) -> bool:
        """Its graded samples say nothing about which of them was better."""
        return len({sample.reward for sample in self.graded}) == 1

    @property
    def num_needed(self) -> int:
        """Fewest graded samples with which a group is worth training on."""
        return max(2, (len(self.samples) + 1) // 2)

    @property
    def has_ended(self) -> bool:
        """No sample of it can still change."""
        return all(s.state in (SampleState.GRADED, SampleState.DISCARDED) for s in self.samples)


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """Batch k for step k: ordered groups, immutable."""

    step: int
    groups: tuple[GroupKey, ...]
