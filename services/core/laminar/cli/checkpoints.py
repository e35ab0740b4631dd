"""The pool's register of checkpoints, as its ledger has it: which ones count, and whether their files are there.

What lies in RUN/checkpoints decides nothing: a folder may be of a save that was never registered, of a branch that was
rolled back, or on its way out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from laminar.cli.errors import BadInput
from laminar.cli.run_folder import RunFolder
from laminar.shell.ledger_file import LedgerFileError, open_ledger

KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Registered:
    """One row of the register. `folder` and its `files` are what the trainer wrote."""

    step: int
    folder: Path
    is_kept: bool
    """False: a later checkpoint took its place, or the run went back to before it."""
    files: tuple[str, ...]

    @property
    def damage(self) -> str:
        """What is missing, as a clause; empty: nothing. What the files hold is checked when they are restored."""
        if not self.folder.is_dir():
            return f"its folder {self.folder} is gone"
        missing = [name for name in self.files if not (self.folder / name).is_file()]
        return f"{', '.join(missing)} is missing in {self.folder}" if missing else ""


def register(run: RunFolder) -> list[Registered]:
    """Every checkpoint that was ever registered, in order of steps and attempts. Raises BadInput."""
    try:
        with open_ledger(run.store) as ledger:
            rows = ledger.execute("SELECT step, path, manifest, state FROM checkpoints ORDER BY step, attempt")
            return [
                Registered(
                    step=int(row["step"]),
                    folder=run.checkpoints / str(row["path"]),
                    is_kept=row["state"] == KEPT,
                    files=tuple(sorted(json.loads(row["manifest"]))),
                )
                for row in rows
            ]
    except LedgerFileError as error:
        raise BadInput(f"{run.path} has no ledger that can be read: {error}.") from error


def whole_steps(run: RunFolder) -> list[int]:
    """Steps of the checkpoints that are kept and whole."""
    return sorted({row.step for row in register(run) if row.is_kept and not row.damage})


def find(run: RunFolder, step: int) -> Path:
    """The kept checkpoint of `step`. Raises BadInput, saying why there is none and which steps there are."""
    rows = [row for row in register(run) if row.step == step]
    kept = [row for row in rows if row.is_kept]
    if kept and not kept[-1].damage:
        return kept[-1].folder
    known = ", ".join(map(str, whole_steps(run))) or "none"
    raise BadInput(f"{run.path} keeps no checkpoint of step {step}{_why_not(run, step, rows, kept)}. Kept: {known}.")


def _why_not(run: RunFolder, step: int, rows: list[Registered], kept: list[Registered]) -> str:
    if kept:
        return f": it was registered, but {kept[-1].damage}"
    if rows:
        return ": a later one has taken its place, or the run has gone back to before it since"
    strays = sorted(path.name for path in run.checkpoints.glob(f"step-{step}-attempt-*"))
    if strays:
        return f": {', '.join(strays)} is there, but its save did not come to the end, so it was never registered"
    return ""
