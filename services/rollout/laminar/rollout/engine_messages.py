"""What an agent and its engine say to each other. The engine speaks no HTTP and knows no pool.

A request is named by (sample id, term): a late event of an old term names nothing that the agent still has.
Tokens and log-probs are packed as in `laminar.wire.codec`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from laminar.core.lengths import Lengths, Lognormal, Recorded
from laminar.core.roofline import Serving
from laminar.wire.links import HandOff


class Tagged(msgspec.Struct, frozen=True, tag=True):
    """Base: frozen, named on the wire by its class."""


class RequestKey(msgspec.Struct, frozen=True, order=True):
    sample: str
    term: int


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One response to generate, or to continue behind `response`."""

    key: RequestKey
    prompt: bytes
    response: bytes = b""
    max_new_tokens: int
    """Budget of the whole response, `response` included."""
    seed: int
    temperature: float
    greedy: bool = False


class LoadState(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine carries."""

    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    generated_tokens: int = 0
    """Since the engine's start."""
    late_s: float = 0.0
    """Emulated engines: by how much the latest event since the last message was handled too late."""


class EmulatedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What an emulated engine stands for. Lengths and rates count its own tokens, `token_grain` for each of ours."""

    serving: Serving
    time_scale: float
    token_grain: int
    lognormal: Lognormal | None = None
    """Exactly one of the two is there."""
    recorded: Recorded | None = None

    @property
    def lengths(self) -> Lengths:
        lengths = self.lognormal or self.recorded
        assert lengths is not None, "an emulated engine without lengths"
        return lengths


# Agent to engine.


class Begin(Tagged, frozen=True, kw_only=True):
    """First message: build the model and answer EngineReady or EngineRefused."""

    model_folder: str
    max_running: int
    max_length: int
    """Prompt and response together, in tokens."""
    emulated: EmulatedMachine | None = None
    """For the emulated engine."""


class Load(Tagged, frozen=True, kw_only=True):
    """Replace the weights; answered by LoadResult. Refused while requests are running."""

    version: int
    digest: str
    """What the pool said of the version; empty: not known."""
    handoff: str
    """Unix socket of the machine's relay."""
    handoff_kind: HandOff
    relays: list[str]
    """Chain listeners to copy from: the machine's relay, then neighbours."""
    token: str
    job_uid: str
    deadline_s: float


class Add(Tagged, frozen=True, kw_only=True):
    requests: list[EngineRequest]


class Abort(Tagged, frozen=True, kw_only=True):
    """Forget these requests; unknown ones are no error (they may just have ended)."""

    keys: list[RequestKey]


class Pause(Tagged, frozen=True, kw_only=True):
    """Decode nothing until Resume; all tokens so far are sent first, in a Progress with `paused`."""


class Resume(Tagged, frozen=True, kw_only=True):
    pass


EngineCommand = Begin | Load | Add | Abort | Pause | Resume


# Engine to agent.


class EngineReady(Tagged, frozen=True, kw_only=True):
    """The model is built, its weights are random: nothing can be added before a Load."""

    kv_capacity_tokens: int
    max_length: int
    """At most what was asked for; less if the model's context is shorter."""
    start_s: float


class EngineRefused(Tagged, frozen=True, kw_only=True):
    """This model cannot be served; the engine exits. A restart will not help."""

    detail: str


class LoadStatus(StrEnum):
    LOADED = "loaded"
    UNAVAILABLE = "unavailable"
    """The relay has not this version, or went away; the old weights are live. Ask again."""
    REFUSED = "refused"
    """The version does not fit this model; the old weights are live."""
    STALE = "stale"
    """Failed after the first overwritten tensor: nothing may run until a whole version is loaded."""


class LoadResult(Tagged, frozen=True, kw_only=True):
    version: int
    status: LoadStatus
    digest: str = ""
    detail: str = ""
    load_s: float = 0.0
    """From the command to the end of the copy."""
    copy_s: float = 0.0
    weights_bytes: int = 0


class TokenBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `[offset, offset + n)` of a response."""

    key: RequestKey
    offset: int
    tokens: bytes
    logprobs: bytes


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """reason: stop | length | error (cannot be generated here: `detail`)."""

    key: RequestKey
    length: int
    reason: str
    detail: str = ""


class Progress(Tagged, frozen=True, kw_only=True):
    """At most every `PROGRESS_INTERVAL_S` unless something ended; blocks come before the ends they belong to."""

    blocks: list[TokenBlock] = []
    ended: list[Ended] = []
    load: LoadState
    paused: bool = False


EngineEvent = EngineReady | EngineRefused | LoadResult | Progress

PROGRESS_INTERVAL_S = 0.1
"""What an engine's death may cost at most; ten frames a second cost the agent nothing."""
