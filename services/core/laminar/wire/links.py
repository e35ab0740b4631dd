"""Messages of the relays' data connections (after the HMAC proof of `laminar.shell.transport`).

Chain link, from the upstream:    Hello -> Welcome, then per version  Announce -> Answer -> chunk frames -> Stored.
                                  Beats come back all the while; Replaced instead of anything ends the link in peace.
Hand-over, from the trainer:      the same, with one version.
Hand-off, from an engine (unix):  OpenVersion -> Opened + the slot's descriptor; the open connection is the hold.
Pull, from an engine (TCP):       Hello -> Welcome, OpenVersion -> Opened, then all chunk frames.
Each message is a uint32 little-endian length and MessagePack. A chunk frame is `CHUNK_HEADER` and the bytes.
"""

from __future__ import annotations

import struct
from enum import StrEnum

from laminar.wire.dataplane import Struct
from laminar.wire.manifest import Manifest

SMALL_MESSAGE_BYTES = 64 << 10
MANIFEST_MESSAGE_BYTES = 64 << 20
"""A million chunk hashes and a hundred thousand tensors fit."""

CHUNK_HEADER = struct.Struct("<II")
"""(index, bytes that follow)."""
FRAME_PING = 0xFFFFFFFF
"""Index of an empty frame: the sender lives and waits for its own upstream."""
FRAME_ABORT = 0xFFFFFFFE
"""Index of an empty frame: the sender lost this version; forget it and wait for the next announcement."""


class LinkKind(StrEnum):
    CHAIN = "chain"
    HANDOVER = "handover"
    PULL = "pull"


class Held(Struct, frozen=True, kw_only=True):
    version: int
    digest: str


class Hello(Struct, frozen=True, kw_only=True):
    """First message of a data connection."""

    kind: LinkKind
    slot: str
    epoch: int = -1
    """Chain: the epoch that the upstream acts on."""
    bypass: int = 0
    """Chain: members of that epoch's list between the two ends, passed by because they are lost."""
    attempt: int = -1
    """Hand-over: the trainer's attempt."""
    weights_bytes: int = 0
    """Hand-over: size of the version to come; asks for the chunk size to cut it into."""


class LinkVerdict(StrEnum):
    ACCEPTED = "accepted"
    LOWER_EPOCH = "lowerEpoch"
    NOT_UPSTREAM = "notUpstream"
    BYPASSED = "bypassed"


class Welcome(Struct, frozen=True, kw_only=True):
    """`current`: the epoch in force here. `held`: complete versions, newest last."""

    verdict: LinkVerdict
    current: int
    held: list[Held]
    chunk_bytes: int = 0
    """For a trainer that named its size: the best chunk size for this chain's links; 0: not measured yet."""


class Announce(Struct, frozen=True, kw_only=True):
    """A version comes next; without a manifest: an orderly goodbye."""

    manifest: Manifest | None = None


class OfferVerdict(StrEnum):
    SEND = "send"
    HELD = "held"
    """This very version is here, whole."""
    SUPERSEDED = "superseded"
    """A newer version is here, whole; this one is not needed any more."""
    LOWER_ATTEMPT = "lowerAttempt"
    NOT_MASTER = "notMaster"
    TOO_LARGE = "tooLarge"
    CONFLICT = "conflict"
    """The same version number with another digest, or another job."""


class Answer(Struct, frozen=True, kw_only=True, tag="answer"):
    verdict: OfferVerdict
    current: int = -1
    """The attempt, epoch or newest version in force, as the verdict says."""
    detail: str = ""
    have: int = 0
    """SEND: chunks that are here already, from an earlier link; sending starts after them."""


class Beat(Struct, frozen=True, kw_only=True, tag="beat"):
    """The receiver lives and waits for bytes, or takes them. `have`: chunks of this version that are here."""

    have: int


class Stored(Struct, frozen=True, kw_only=True, tag="stored"):
    """All bytes of the version are here and have the announced hashes."""

    version: int
    digest: str
    byte_s: float = 0.0
    message_s: float = 0.0
    """The slowest link further down, as measured: seconds per byte and per message; 0: none."""


class Replaced(Struct, frozen=True, kw_only=True, tag="replaced"):
    """Another upstream of a higher standing sends now; the receiver is well, and must not be taken for lost."""


Reply = Answer | Beat | Stored | Replaced
"""Everything that a receiver says after its Welcome."""


class HandOff(StrEnum):
    """How engines get at a version: `relay.handoff` of the job."""

    AUTO = "auto"
    """Mapped; copied where mapping does not work or the machine's relay is dead."""
    MEMFD = "memfd"
    """Mapped, or not at all."""
    TCP = "tcp"
    """Copied."""


class OpenVersion(Struct, frozen=True, kw_only=True):
    """`version` None: the newest. Waits up to `wait_s` for a version that has not come yet."""

    version: int | None = None
    wait_s: float = 0.0


class Opened(Struct, frozen=True, kw_only=True):
    """With a manifest, the slot's descriptor comes with the next byte. `generation` is that of the slot's contents."""

    manifest: Manifest | None = None
    generation: int = -1
    newest: int = -1
    """Newest complete version here; -1: none."""
