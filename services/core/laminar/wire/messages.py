"""Control messages between the services: JSON bodies by pydantic (data-plane messages: `laminar.wire.dataplane`).

Every call carries the headers of `laminar.wire.headers`; every call may be repeated and is answered as the first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from laminar.core.identity import Role as Role


class Message(BaseModel):
    """Frozen; unknown fields are ignored so that a newer peer can talk to an older one."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class MemberState(StrEnum):
    """What a member says of itself; the pool adds `suspect` from its own clock."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    LOADING = "loading"
    STALE = "stale"
    DRAINING = "draining"
    STOPPED = "stopped"


class Register(Message):
    """A member's first call. `slot`: its place (rollout-1); `life`: the number of its process; `nonce`: makes it
    idempotent."""

    slot: str
    role: Role
    index: int
    life: int
    nonce: str
    machine: str = ""
    pid: int = 0
    http_address: str = Field(default="", description="host:port of its own HTTP server")
    data_address: str = Field(default="", description="relays: host:port of the chain listener")
    attempt: int = Field(default=0, description="trainer agents: their attempt; a lower one is refused with 409")


class Registered(Message):
    incarnation: int
    generation: int


class EngineLoad(Message):
    """What a rollout's engine carries now."""

    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    generated_tokens: int = Field(default=0, description="since the agent's start; only grows within a life")


class HeldVersion(Message):
    version: int
    digest: str


class Heartbeat(Message):
    """1 Hz from every member's agent process. Answered 410 when the incarnation is superseded."""

    slot: str
    incarnation: int
    state: MemberState
    version: int | None = None
    load: EngineLoad | None = None
    epoch: int | None = Field(default=None, description="relays: the epoch they act on")
    held: list[HeldVersion] = Field(default=[], description="relays: complete versions, newest last")
    lost_neighbours: list[str] = Field(default=[], description="relays: slots of neighbours that went away")
    note: str = Field(default="", description="one line for people, e.g. why a member waits")


class HeartbeatReply(Message):
    newest: int | None = None
    retain: list[int] = Field(
        default=[], description="relays: versions with unfinished trajectories, those with most of them first"
    )


class Fence(Message):
    """Driver -> pool: nothing that this incarnation says counts any more; its samples move."""

    slot: str
    incarnation: int
    reason: str


class MemberView(Message):
    """What the pool tells the driver of one member."""

    slot: str
    role: Role
    index: int
    life: int
    incarnation: int
    machine: str
    pid: int
    http_address: str
    data_address: str
    state: MemberState
    connected: bool
    silent_s: float = Field(description="since the last heartbeat, by the pool's monotonic clock")
    suspect: bool
    fenced: bool = False
    version: int | None = None
    epoch: int | None = None
    stalled: bool = Field(default=False, description="rollouts: running samples, but no token for stallSeconds")
    lost_neighbours: list[str] = []


class PoolPhase(StrEnum):
    """Where the job stands by the pool's books."""

    STARTING = "starting"
    EVALUATING_FIRST = "evaluatingFirst"
    TRAINING = "training"
    EVALUATING_LAST = "evaluatingLast"
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


class PoolView(Message):
    """One line of the pool's stream to the driver (`GET /v1/members/stream`, newline-delimited JSON)."""

    generation: int
    phase: PoolPhase
    members: list[MemberView]
    highest_epoch: int = 0
    attempt: int = 0
    durable_step: int | None = Field(default=None, description="step of the newest registered checkpoint")
    newest: int | None = Field(default=None, description="newest visible version; null: none yet")
    reason: str = Field(default="", description="why the phase is failed")


class ChainMember(Message):
    slot: str
    address: str
    machine: str = ""


class ChainEpoch(Message):
    """Driver -> every relay and the pool: the membership list, master first. A lower epoch gets 409."""

    epoch: int
    members: list[ChainMember]
    attempt: int = Field(default=-1, description="of the trainer, as the driver knows it: lower ones are fenced off")


class VersionComplete(Message):
    """Relay -> pool: I hold this version whole and verified."""

    slot: str
    incarnation: int
    epoch: int
    version: int
    digest: str


class BeginAttempt(Message):
    """Rank 0 -> pool, before anything else: this attempt trains from here on, restored from this step."""

    attempt: int
    restored_step: int
    num_damaged: int = Field(default=0, ge=0, description="newer checkpoints that were passed over, being damaged")


class BeginAttemptReply(Message):
    restored_version: int | None = Field(description="newest version of the restored step along the lineage, if any")
    steps: int
    evaluations_pending: bool = False


class CheckpointInfo(Message):
    """A checkpoint the pool knows of. `path` is relative to the checkpoint folder: step-N-attempt-M."""

    step: int
    attempt: int
    path: str
    manifest: dict[str, str] = Field(default={}, description="file name -> xxh3-128 hex of its bytes")


class CheckpointDurable(Message):
    attempt: int
    checkpoint: CheckpointInfo


class CheckpointDurableReply(Message):
    kept: list[CheckpointInfo]
    removable: list[CheckpointInfo] = Field(description="the trainer may delete these folders now")


class CheckpointFailed(Message):
    """Trains on; the job shows CheckpointStale; stops after `keep` missed saves."""

    attempt: int
    step: int
    reason: str


class ResumePoint(Message):
    """What a new attempt restores: the newest registered checkpoint at or below the asked step; None: the model."""

    checkpoint: CheckpointInfo | None
    kept: list[CheckpointInfo]


class ReserveVersion(Message):
    attempt: int
    step: int
    parent: int | None


class ReservedVersion(Message):
    version: int
    epoch: int
    master: str = Field(default="", description="host:port of the master relay's chain listener; empty: none yet")


class PublicationView(Message):
    """State of one publication, for the trainer's publisher (long poll)."""

    version: int
    visible: bool
    complete_on: list[str]
    needed: int
    epoch: int
    master: str


class Visible(Message):
    version: int
    step: int
    digest: str


class Take(Message):
    attempt: int
    step: int
    wait_s: float = 20.0


class TakeStatus(StrEnum):
    BATCH = "batch"
    WAIT = "wait"
    STOP = "stop"
    """Checkpoint what is committed and leave with exit code 0: the user asked to stop."""
    DONE = "done"
    """No step is left."""


class TakeReply(Message):
    status: TakeStatus
    step: int = 0
    num_groups: int = 0
    num_samples: int = 0
    num_tokens: int = 0


class CommitStep(Message):
    """Marks batch `step` consumed by this attempt. `stats`: what the trainer measured, finite numbers only."""

    attempt: int
    step: int
    stats: dict[str, float] = {}


class Ack(Message):
    ok: Literal[True] = True


class StopRequest(Message):
    """Driver -> pool: finish the current step, checkpoint, stop."""

    reason: str


class Problem(Message):
    """Body of every error answer. `error` is a stable word, `detail` a sentence for people."""

    error: str
    detail: str
    current: int | None = Field(default=None, description="the incarnation, attempt, generation or epoch in force")


class Event(Message):
    """Something people want to know, in order."""

    seq: int
    wall_s: float
    kind: str
    text: str


class Histogram(Message):
    """counts[value] = how many."""

    counts: dict[int, int] = {}


class StepRow(Message):
    """One training step as `status`, metrics.jsonl and the report show it."""

    step: int
    attempt: int
    version: int | None
    wall_s: float
    reward_mean: float
    num_samples: int
    response_tokens: int
    inherent: dict[int, int] = {}
    consumed: dict[int, int] = {}
    stats: dict[str, float] = {}


class Steps(RootModel[list[StepRow]]):
    """Answer of `GET /v1/steps`: at most a fixed number of rows a call, in step order; the caller asks on."""


class Events(RootModel[list[Event]]):
    """Answer of `GET /v1/events`."""


class EvaluationRow(Message):
    name: str
    point: Literal["first", "last"]
    mode: Literal["sampled", "greedy"]
    version: int
    step: int
    num_items: int
    num_graded: int
    mean: float
    stderr: float


class LedgerCounts(Message):
    """The audit's numbers. admitted = consumed + sum(discarded) + open."""

    admitted: int = 0
    consumed: int = 0
    discarded: dict[str, int] = {}
    open: int = 0
    started_unconsumed_groups: int = 0
    restarted_samples: int = 0
    restarted_tokens: int = 0
    moved_samples: int = 0
    parked_samples: int = Field(default=0, description="kept partial responses until a replica had their version")
    poisoned_samples: int = Field(default=0, description="set aside because replicas died while they ran; in `failed`")
    filtered_groups: int = Field(default=0, description="groups of equal rewards that dynamic sampling dropped")
    repeated: int = Field(default=0, description="writes that said again what was known, answered as the first")
    refused: dict[str, int] = {}


class JobStatus(Message):
    """`GET /v1/status`: everything that `laminar status` and the live view show."""

    job: str
    uid: str
    generation: int
    phase: PoolPhase
    reason: str = ""
    steps: int
    committed_step: int
    attempt: int
    newest: Visible | None
    epoch: int
    chain: list[str]
    members: list[MemberView]
    loads: dict[str, EngineLoad]
    counts: LedgerCounts
    inherent: Histogram
    consumed: Histogram
    last_step: StepRow | None
    reward_curve: list[float] = []
    evaluations: list[EvaluationRow]
    checkpoints: list[CheckpointInfo]
    conditions: dict[str, str] = {}
    first_lease_wall_s: float | None = None
    wall_s: float
    skipped_prompts: dict[str, int] = {}
    last_event_seq: int = 0
