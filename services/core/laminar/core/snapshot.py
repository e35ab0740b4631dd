"""What is observed of a job, as `laminar.core.reconcile` sees it: one shape for processes and for pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from laminar.core.chain import Apart, ChainNode
from laminar.core.identity import Role
from laminar.core.liveness import Brake, Evidence
from laminar.core.restarts import Restarts


class MemberPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    """It can never act again: its process is reaped, or it is fenced and its node is lost."""


class JobPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.COMPLETE, JobPhase.STOPPED, JobPhase.FAILED)


class PoolStage(StrEnum):
    """What the reconciler needs of the pool's books."""

    BUSY = "busy"
    FINISHING = "finishing"
    """All steps are done; the last evaluation still runs."""
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Spec:
    """`nodes`: the machines that carry this job's rollouts, each with one relay (index = position)."""

    num_rollouts: int
    nodes: tuple[str, ...]
    backoff_limit: int


@dataclass(frozen=True, slots=True)
class Exit:
    """`code` None: unknown (a lost node). `last_words`: the end of its log, for people."""

    at_s: float
    code: int | None
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """One life of one slot. `evidence` is judged by `laminar.core.liveness`."""

    slot: str
    role: Role
    index: int
    life: int
    """Counts the processes of a slot; the trainer's is its attempt."""
    node: str
    phase: MemberPhase
    started_s: float = 0.0
    evidence: Evidence = Evidence()
    incarnation: int | None = None
    """As the pool last knew it; None: this life never registered."""
    fenced: bool = False
    ready: bool = False
    """Registered and connected, and not suspect."""
    address: str = ""
    """Relays: of the chain listener."""
    newest_version: int | None = None
    """Relays: the newest complete version they hold."""
    stopping_since_s: float | None = None
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class ChainState:
    """`epoch` and `members` as stored; `highest_reported` by any relay or the pool (a lost store must not go back)."""

    epoch: int = 0
    members: tuple[ChainNode, ...] = ()
    highest_reported: int = 0
    acknowledged: frozenset[tuple[str, int]] = frozenset()
    """(slot, life) of the relays and the pool that have `epoch`."""
    apart: Apart = frozenset()


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool's own view. `reachable`: its stream is open and not stale."""

    reachable: bool = False
    stage: PoolStage = PoolStage.BUSY
    reason: str = ""
    attempt: int = 0
    newest_version: int | None = None
    """The newest visible one: what replicas load next."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    now_s: float
    started_s: float
    """When this driver took the job over."""
    spec: Spec
    phase: JobPhase
    members: tuple[Member, ...]
    """Every life that has not been replaced yet, and exited ones until their slot lives again."""
    chain: ChainState
    pool: Pool
    attempt: int
    """Highest attempt ever stored."""
    lives: Mapping[str, int] = field(default_factory=dict[str, int])
    """Highest life ever stored, by slot."""
    restarts: Mapping[str, Restarts] = field(default_factory=dict[str, Restarts])
    brake: Brake | None = None
    conditions: Mapping[str, str] = field(default_factory=dict[str, str])
    stop_requested: bool = False
    stop_acknowledged: bool = False
    """By the pool's present life."""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot that the spec wants filled."""

    role: Role
    index: int
    node: str

    @property
    def slot(self) -> str:
        return f"{self.role}-{self.index}"


def places(spec: Spec) -> tuple[Place, ...]:
    """All slots of a job: the pool first, since all others wait for it; rollouts round-robin over the nodes."""
    first = spec.nodes[0]
    return (
        Place(Role.POOL, 0, first),
        *(Place(Role.RELAY, i, node) for i, node in enumerate(spec.nodes)),
        Place(Role.TRAINER, 0, first),
        *(Place(Role.ROLLOUT, i, spec.nodes[i % len(spec.nodes)]) for i in range(spec.num_rollouts)),
    )
