"""Messages of the relays' data connections (after the HMAC proof of `laminar.shell.transport`).

Chain link, from the upstream:    Hello -> Welcome, then per version  Announce -> Answer -> chunk frames -> Stored.
Hand-over, from the trainer:      the same, with one version.
Hand-off, from an engine (unix):  OpenVersion -> Opened + the slot's descriptor; the open connection is the hold.
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


class Held(Struct, frozen=True, kw_only=True):
    version: int
    digest: str


class Hello(Struct, frozen=True, kw_only=True):
    """First message of a data connection."""

    kind: LinkKind
    slot: str
    epoch: int = -1
    """Chain: the epoch that the upstream acts on."""
    attempt: int = -1
    """Hand-over: the trainer's attempt."""


class LinkVerdict(StrEnum):
    ACCEPTED = "accepted"
    LOWER_EPOCH = "lowerEpoch"
    NOT_UPSTREAM = "notUpstream"


class Welcome(Struct, frozen=True, kw_only=True):
    """`current`: the epoch in force here. `held`: complete versions, newest last."""

    verdict: LinkVerdict
    current: int
    held: list[Held]


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


class Answer(Struct, frozen=True, kw_only=True):
    verdict: OfferVerdict
    current: int = -1
    """The attempt, epoch or newest version in force, as the verdict says."""
    detail: str = ""


class Stored(Struct, frozen=True, kw_only=True):
    """All bytes of the version are here and have the announced hashes."""

    version: int
    digest: str


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
