"""Data-plane messages: token streams, leases and batches, as MessagePack (msgspec).

Tokens travel as little-endian int32 bytes, log-probs as little-endian float32 bytes (`laminar.wire.codec` packs
and unpacks them without numpy). Samples and groups are named by opaque strings that the pool issues.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from laminar.core.decisions import Outcome as Outcome
from laminar.core.samples import ToolSpan as ToolSpan


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base: frozen, unknown fields ignored, defaults left out on the wire."""


class SegmentKind(StrEnum):
    """Whose tokens these are. A tool's are part of the context, never of the loss."""

    MODEL = "model"
    TOOL = "tool"


class SampleGrant(Struct, frozen=True, kw_only=True):
    """The right to write one sample under `term`. With `tokens`, the response so far is continued, not restarted."""

    id: str
    index: int
    term: int
    seed: int
    max_new_tokens: int
    """Budget of the whole response, the tokens already there and those of tools included."""
    greedy: bool = False
    tokens: bytes = b""
    logprobs: bytes = b""
    finish_reason: str = ""
    """Not empty: generation has ended ("stop" or "length"); only grading is left."""
    tools: list[ToolSpan] = []
    """Which of `tokens` are results of tools."""


class GroupGrant(Struct, frozen=True, kw_only=True):
    """Samples of one prompt for one replica, all at one version."""

    group: str
    prompt_tokens: bytes
    prompt_text: str
    answer: str
    samples: list[SampleGrant]


class LeaseCall(Struct, frozen=True, kw_only=True):
    slot: str
    incarnation: int
    version: int | None
    """The version that the engine has loaded and verified; None: none yet."""
    max_running: int
    wait_s: float = 20.0


class LeaseKind(StrEnum):
    GRANT = "grant"
    REFRESH = "refresh"
    WAIT = "wait"
    """Nothing to do yet; call again."""
    END = "end"
    """The job needs no more samples."""


class LeaseReply(Struct, frozen=True, kw_only=True):
    kind: LeaseKind
    version: int = -1
    """GRANT: the version bound to the groups. REFRESH: the version to load."""
    digest: str = ""
    groups: list[GroupGrant] = []
    temperature: float = 1.0
    relays: list[str] = []
    """REFRESH: chain listeners (host:port) to copy from where mapping does not work, this machine's relay first."""


class AppendItem(Struct, frozen=True, kw_only=True):
    """Tokens `[offset, offset + n)` of a response, all of one kind. An overlap with durable tokens must be equal; a gap
    is refused. Tokens of tools have no log-probs: zeros stand in for them."""

    id: str
    term: int
    offset: int
    tokens: bytes
    logprobs: bytes
    kind: SegmentKind = SegmentKind.MODEL
    call: int = 0
    """TOOL: number of the call in this response, from 0 on."""


class FinishItem(Struct, frozen=True, kw_only=True):
    """Generation ended at `length` tokens. reason: stop | length | error (an infrastructure failure, retried) |
    declined (the replica has other weights; the sample goes on elsewhere, nothing failed)."""

    id: str
    term: int
    length: int
    reason: str
    detail: str = ""


class GradeItem(Struct, frozen=True, kw_only=True):
    """The verdict on a finished sample. status: ok | ungraded (the grader failed twice; never a reward of 0)."""

    id: str
    term: int
    status: str
    reward: float = 0.0
    parts: dict[str, float] = {}
    detail: str = ""


class ProgressCall(Struct, frozen=True, kw_only=True):
    """One call of a replica: appends first, then finishes, then grades. At most one call in flight a replica."""

    slot: str
    incarnation: int
    appends: list[AppendItem] = []
    finishes: list[FinishItem] = []
    grades: list[GradeItem] = []


class ItemReply(Struct, frozen=True, kw_only=True):
    id: str
    verdict: Outcome
    durable: int = 0


class ProgressReply(Struct, frozen=True, kw_only=True):
    appends: list[ItemReply] = []
    finishes: list[ItemReply] = []
    grades: list[ItemReply] = []


class CommandKind(StrEnum):
    HELLO = "hello"
    """First frame of the stream: the pool has this connection."""
    ADOPT = "adopt"
    CANCEL = "cancel"
    """Stop these sample ids (terms in `terms`): they moved or are not needed."""
    FENCE = "fence"
    """You are superseded: kill the engine and register anew."""
    PING = "ping"


class Command(Struct, frozen=True, kw_only=True):
    kind: CommandKind
    version: int = -1
    groups: list[GroupGrant] = []
    ids: list[str] = []
    terms: list[int] = []
    reason: str = ""


class BatchSample(Struct, frozen=True, kw_only=True):
    id: str
    version: int
    step: int
    """Step of the version that generated it."""
    tokens: bytes
    logprobs: bytes
    reward: float
    finish_reason: str
    versions: bytes = b""
    """Per-token versions (int32) for schedules that mix; empty: `version` for all."""
    tools: list[ToolSpan] = []
    """Tokens that are results of tools: in the context, out of loss and denominator."""


class BatchGroup(Struct, frozen=True, kw_only=True):
    group: str
    prompt_tokens: bytes
    samples: list[BatchSample]


class BatchSlice(Struct, frozen=True, kw_only=True):
    """The whole groups of batch `step` that belong to one rank, in the sealed order."""

    step: int
    rank: int
    world: int
    groups: list[BatchGroup]
    num_groups_total: int
    num_samples_total: int
