"""Which checkpoint a person may go back to: the pool's register says, and the reason stands in the refusal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.cli import checkpoints
from laminar.cli.errors import BadInput
from laminar.cli.run_folder import RunFolder
from laminar.shell.ledger_file import FILE_NAME, SCHEMA_VERSION, schema

FILES = {"__0_0.distcp": "aa", ".metadata": "bb", "ledger.msgpack": "cc"}


class Register:
    """A run folder with a ledger and checkpoint folders, as pool and trainer leave them."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        self.run.store.mkdir(parents=True)
        self._ledger = sqlite3.connect(self.run.store / FILE_NAME)
        with self._ledger:
            for statement in schema():
                self._ledger.execute(statement)
            self._ledger.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))

    def close(self) -> None:
        self._ledger.close()

    def add(self, step: int, attempt: int = 1, state: str = "kept") -> Path:
        path = self.folder(step, attempt)
        row = (path.name, step, attempt, json.dumps(FILES), state)
        with self._ledger:
            self._ledger.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", row)
        return path

    def folder(self, step: int, attempt: int = 1, suffix: str = "") -> Path:
        path = self.run.checkpoints / f"step-{step}-attempt-{attempt}{suffix}"
        path.mkdir(parents=True)
        for name in FILES:
            (path / name).write_text("x")
        return path


@pytest.fixture
def register(tmp_path: Path) -> Iterator[Register]:
    made = Register(tmp_path / "run")
    yield made
    made.close()


def refusal(register: Register, step: int) -> str:
    with pytest.raises(BadInput) as caught:
        checkpoints.find(register.run, step)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_kept_checkpoint_is_found_under_the_attempt_that_the_register_names(register: Register) -> None:
    register.add(4, attempt=1, state="removable")
    wanted = register.add(4, attempt=2)
    register.add(8, attempt=2)
    assert checkpoints.find(register.run, 4) == wanted
    assert checkpoints.whole_steps(register.run) == [4, 8]


def test_a_folder_that_the_register_does_not_know_is_no_checkpoint(register: Register) -> None:
    register.add(4)
    register.folder(6)
    register.folder(8, suffix=".tmp")
    assert "step-6-attempt-1 is there, but its save did not come to the end" in refusal(register, 6)
    assert "step-8-attempt-1.tmp is there" in refusal(register, 8)
    assert refusal(register, 6).endswith("Kept: 4.")


def test_a_checkpoint_of_a_branch_that_was_rolled_back_is_refused(register: Register) -> None:
    register.add(4)
    register.add(8, state="removable")
    assert "taken its place, or the run has gone back to before it" in refusal(register, 8)


def test_a_registered_checkpoint_whose_files_are_gone_is_refused_and_not_offered(register: Register) -> None:
    whole, cut, gone = register.add(4), register.add(8), register.add(12)
    (cut / "__0_0.distcp").unlink()
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    assert f"__0_0.distcp is missing in {cut}" in refusal(register, 8)
    assert f"its folder {gone} is gone" in refusal(register, 12)
    assert refusal(register, 12).endswith("Kept: 4.") and whole.is_dir()


def test_a_step_that_was_never_saved_is_answered_with_those_that_were(register: Register) -> None:
    assert refusal(register, 3).endswith("keeps no checkpoint of step 3. Kept: none.")
    register.add(4)
    register.add(8)
    assert refusal(register, 3).endswith("keeps no checkpoint of step 3. Kept: 4, 8.")


def test_a_run_without_a_ledger_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no ledger that can be read"):
        checkpoints.find(RunFolder(tmp_path), 4)
