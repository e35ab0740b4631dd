"""Settings of one trainer attempt, from the environment; the agent and its ranks read the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laminar.shell.settings import Common, env_int, env_optional_int, env_path, env_str


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    common: Common
    attempt: int
    checkpoints: Path
    """Folder of `step-N-attempt-M` folders; survives attempts."""
    restore_step: int | None
    """Restore the newest checkpoint at or below this step; None: the newest."""
    model_out: Path | None
    """Where the final Hugging Face folder goes; None: nowhere."""

    @classmethod
    def from_env(cls) -> TrainerSettings:
        """Raises SettingsError (a ValueError) with the variable's name and value."""
        model_out = env_str("LAMINAR_MODEL_OUT", "")
        return cls(
            common=Common.from_env(),
            attempt=env_int("LAMINAR_ATTEMPT"),
            checkpoints=env_path("LAMINAR_CHECKPOINTS"),
            restore_step=env_optional_int("LAMINAR_RESTORE_STEP"),
            model_out=Path(model_out) if model_out else None,
        )
