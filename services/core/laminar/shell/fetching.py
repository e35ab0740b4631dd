"""How an engine gets at a version: mapped from its machine's relay, or copied over TCP from that one or a neighbour."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.shell.handoff import SlotReused, VersionGone, WeightsMap, open_version
from laminar.shell.logs import fields
from laminar.shell.pulling import PulledWeights, pull_version
from laminar.shell.transport import SILENCE_S, PeerLost
from laminar.wire.links import HandOff

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a version may come from. `addresses`: chain listeners, this machine's relay first, then neighbours."""

    handoff: HandOff
    socket_path: str
    addresses: tuple[str, ...]


def fetch_version(
    sources: Sources, token: str, job_uid: str, version: int, deadline_s: float = SILENCE_S
) -> WeightsMap | PulledWeights:
    """Tries one source after the other within `deadline_s`. The probe of `auto` is the real thing: opening the version.

    The machine's own relay has half of the time, if there are others: it may be cut off from the chain.
    Raises what the most trusted source said, the machine's own relay: VersionGone, PeerLost, SlotReused or OSError.
    """
    until = time.monotonic() + deadline_s
    first: Exception | None = None
    if sources.handoff is not HandOff.TCP:
        others = sources.handoff is HandOff.AUTO and len(sources.addresses) > 1
        try:
            return open_version(sources.socket_path, token, job_uid, version, deadline_s / 2 if others else deadline_s)
        except (VersionGone, PeerLost, OSError) as error:
            if sources.handoff is HandOff.MEMFD:
                raise
            first = error
    for address in _by_hope(sources.addresses, own_relay_failed=first is not None):
        left_s = max(0.1, until - time.monotonic())
        try:
            pulled = pull_version(address, token, job_uid, version, left_s)
        except (PeerLost, VersionGone, SlotReused, OSError) as error:
            first = first or error
            continue
        if sources.handoff is HandOff.AUTO:
            what = fields(version=version, relay=address, why=first)
            log.warning("copied over TCP: the machine's relay cannot be mapped, or lacks the version", extra=what)
        return pulled
    raise first or PeerLost("the pool names no relay to copy from")


def _by_hope(addresses: Sequence[str], *, own_relay_failed: bool) -> list[str]:
    """A relay that could not be mapped is more often dead, or behind, than walled off; then neighbours come first."""
    return [*addresses[1:], *addresses[:1]] if own_relay_failed else list(addresses)
