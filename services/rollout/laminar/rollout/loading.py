"""A load as every engine does it: fetch the version, see that it is the right one, copy it, say how it went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from laminar.rollout.engine_messages import Ended, EngineRequest, Load, LoadResult, LoadStatus
from laminar.shell.fetching import Sources, fetch_version
from laminar.shell.handoff import SlotReused, VersionGone
from laminar.shell.transport import PeerLost
from laminar.wire.codec import num_items
from laminar.wire.manifest import ManifestError, TensorEntry


class WeightsSource(Protocol):
    """A version in the relay's memory (`laminar.shell.handoff.WeightsMap`)."""

    def tensor(self, name: str) -> memoryview: ...
    def check(self) -> None: ...


class UnfitVersion(ValueError):
    """The version does not fit the model; nothing was overwritten."""


class TornLoad(RuntimeError):
    """The copy failed after the first overwritten tensor: the weights are a mixture."""


class CopyWeights(Protocol):
    def __call__(self, entries: Sequence[TensorEntry], source: WeightsSource) -> int:
        """The bytes copied. Raises UnfitVersion or SlotReused before anything is overwritten, TornLoad after."""
        ...


def load_version(command: Load, copy: CopyWeights) -> LoadResult:
    """The outcome says which weights are live: the new ones, the old ones, or none (STALE)."""
    begin_s = time.monotonic()
    try:
        sources = Sources(command.handoff_kind, command.handoff, tuple(command.relays))
        with fetch_version(sources, command.token, command.job_uid, command.version, command.deadline_s) as source:
            digest = source.manifest.digest
            if command.digest not in ("", digest):
                detail = f"the relay holds digest {digest}, the pool knows {command.digest}"
                return failed(command, LoadStatus.REFUSED, detail)
            copy_begin_s = time.monotonic()
            weights_bytes = copy(source.manifest.tensors, source)
    except (VersionGone, PeerLost, SlotReused, OSError) as error:
        return failed(command, LoadStatus.UNAVAILABLE, str(error))
    except (UnfitVersion, ManifestError) as error:
        return failed(command, LoadStatus.REFUSED, str(error))
    except TornLoad as error:
        return failed(command, LoadStatus.STALE, str(error))
    now_s = time.monotonic()
    return LoadResult(
        version=command.version, status=LoadStatus.LOADED, digest=digest, load_s=now_s - begin_s,
        copy_s=now_s - copy_begin_s, weights_bytes=weights_bytes,
    )  # fmt: skip


def failed(command: Load, status: LoadStatus, detail: str) -> LoadResult:
    return LoadResult(version=command.version, status=status, detail=detail)


def without_weights(requests: Sequence[EngineRequest]) -> list[Ended]:
    """What an engine answers as long as no version is live."""
    return [
        Ended(key=request.key, length=num_items(request.response), reason="error", detail="no weights are loaded")
        for request in requests
    ]
