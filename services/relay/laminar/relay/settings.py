"""Settings of the relay beside those that all services have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laminar.relay.store import StoreSizes
from laminar.shell.settings import Common, SettingsError, env_path, env_str


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Read once, at start."""

    index: int
    """N of the slot relay-N."""
    data_listen: str
    """`fd:N` or host:port of the chain listener."""
    handoff: Path
    """Unix socket that this machine's engines connect to."""
    sizes: StoreSizes

    @classmethod
    def from_env(cls, common: Common) -> RelaySettings:
        """Raises SettingsError that names the wrong variable."""
        role, _, index = common.slot.rpartition("-")
        if role != "relay" or not index.isdigit():
            raise SettingsError(f"LAMINAR_SLOT={common.slot!r} is not relay-N")
        relay = common.load_job().spec.relay
        return cls(
            index=int(index),
            data_listen=env_str("LAMINAR_DATA_LISTEN"),
            handoff=env_path("LAMINAR_HANDOFF"),
            sizes=StoreSizes(relay.keep_versions, relay.retain_slots, relay.read_deadline_seconds),
        )
