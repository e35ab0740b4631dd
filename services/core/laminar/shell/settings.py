"""Settings of a service: environment variables, read once at start into frozen values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from laminar.wire.spec import LaminarJob


class SettingsError(ValueError):
    """A variable is missing or has a value that cannot be used; the text names both."""


def env_optional(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The variable's text; None when it is unset or empty."""
    return (os.environ if environ is None else environ).get(name) or None


def env_str(name: str, default: str | None = None, *, environ: Mapping[str, str] | None = None) -> str:
    """The variable's text, else `default`. Raises SettingsError when neither is there."""
    value = env_optional(name, environ)
    if value is not None:
        return value
    if default is None:
        raise SettingsError(f"the environment variable {name} is not set")
    return default


def env_int(
    name: str, default: int | None = None, *, minimum: int = 0, environ: Mapping[str, str] | None = None
) -> int:
    """A whole number of at least `minimum`, else `default`. Raises SettingsError."""
    value = env_optional_int(name, minimum=minimum, environ=environ)
    if value is not None:
        return value
    if default is None:
        raise SettingsError(f"the environment variable {name} is not set")
    return default


def env_optional_int(name: str, *, minimum: int = 0, environ: Mapping[str, str] | None = None) -> int | None:
    """A whole number of at least `minimum`, or None when the variable is unset. Raises SettingsError."""
    text = env_optional(name, environ)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError as error:
        raise SettingsError(f"{name}={text!r} is not a whole number") from error
    if value < minimum:
        raise SettingsError(f"{name}={text!r} is below {minimum}")
    return value


def env_path(name: str, *, environ: Mapping[str, str] | None = None) -> Path:
    """An absolute path; it need not exist. Raises SettingsError."""
    path = Path(env_str(name, environ=environ))
    if not path.is_absolute():
        raise SettingsError(f"{name}={str(path)!r} is not an absolute path")
    return path


@dataclass(frozen=True, slots=True)
class Common:
    """What every service is told at start. `to_env` and `from_env` are inverses."""

    job: str
    job_uid: str
    token: str
    spec_path: Path
    """The resolved job: JSON of a LaminarJob whose sources are absolute."""
    generation: int
    pool_url: str
    """http://host:port, without a slash at the end."""
    slot: str
    life: int
    listen: str
    """`fd:N` (an inherited listening socket) or `host:port`."""
    dir: Path
    """Private folder of this slot; survives its lives."""
    machine: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Common:
        """Reads LAMINAR_*. Raises SettingsError that names the first wrong variable."""
        pool_url = env_str("LAMINAR_POOL_URL", environ=environ).rstrip("/")
        if not pool_url.startswith("http://"):
            raise SettingsError(f"LAMINAR_POOL_URL={pool_url!r} does not begin with http://")
        return cls(
            job=env_str("LAMINAR_JOB", environ=environ),
            job_uid=env_str("LAMINAR_JOB_UID", environ=environ),
            token=env_str("LAMINAR_TOKEN", environ=environ),
            spec_path=env_path("LAMINAR_SPEC", environ=environ),
            generation=env_int("LAMINAR_GENERATION", environ=environ),
            pool_url=pool_url,
            slot=env_str("LAMINAR_SLOT", environ=environ),
            life=env_int("LAMINAR_LIFE", environ=environ),
            listen=env_str("LAMINAR_LISTEN", environ=environ),
            dir=env_path("LAMINAR_DIR", environ=environ),
            machine=env_str("LAMINAR_MACHINE", "", environ=environ),
        )

    def to_env(self) -> dict[str, str]:
        """The variables that make `from_env` return this value; for whoever starts the service."""
        return {
            "LAMINAR_JOB": self.job,
            "LAMINAR_JOB_UID": self.job_uid,
            "LAMINAR_TOKEN": self.token,
            "LAMINAR_SPEC": str(self.spec_path),
            "LAMINAR_GENERATION": str(self.generation),
            "LAMINAR_POOL_URL": self.pool_url,
            "LAMINAR_SLOT": self.slot,
            "LAMINAR_LIFE": str(self.life),
            "LAMINAR_LISTEN": self.listen,
            "LAMINAR_DIR": str(self.dir),
            "LAMINAR_MACHINE": self.machine,
        }

    def load_job(self) -> LaminarJob:
        """The job of LAMINAR_SPEC. Raises SettingsError when the file cannot be read or is not a LaminarJob."""
        try:
            return LaminarJob.model_validate_json(self.spec_path.read_bytes())
        except OSError as error:
            raise SettingsError(f"LAMINAR_SPEC={str(self.spec_path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"LAMINAR_SPEC={str(self.spec_path)!r} is not a LaminarJob: {error}") from error
