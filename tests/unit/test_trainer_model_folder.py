"""What the trainer says to a model folder that it cannot train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from laminar.shell.memory import available_memory_bytes
from laminar.trainer.exit_note import ExitNote
from laminar.trainer.failures import InputFailure
from laminar.trainer.model_folder import inspect, require_memory
from laminar.trainer.policy import Policy
from laminar.trainer.ranks import Ranks

MODEL = Path(__file__).parent.parent / "data" / "grpo_reference" / "reference_model"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_parameters_and_dtype_are_read_without_loading() -> None:
    folder = inspect(MODEL)
    assert 600_000 < folder.num_parameters < 700_000
    assert folder.wire_dtype == "F32"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("folder", "does not exist"),
        ("config.json", "no config.json"),
        ("model.safetensors", "no \\*.safetensors weights"),
    ],
)
def test_what_is_missing_is_named(copy: Path, damage: str, words: str) -> None:
    if damage == "folder":
        shutil.rmtree(copy)
    else:
        (copy / damage).unlink()
    with pytest.raises(InputFailure, match=words):
        inspect(copy)


def test_damaged_weights_are_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InputFailure, match=r"model\.safetensors is damaged"):
        inspect(copy)


def test_a_dtype_that_cannot_be_published_is_refused(copy: Path) -> None:
    edit_config(copy, dtype="float8_e4m3fn")
    with pytest.raises(InputFailure, match="float8_e4m3fn"):
        inspect(copy)


def test_a_model_that_does_not_fit_the_memory_is_refused_before_it_is_loaded() -> None:
    folder = inspect(MODEL)
    require_memory(folder, 1, folder.training_bytes(1))
    with pytest.raises(InputFailure, match="needs about"):
        require_memory(folder, 2, folder.training_bytes(1))


def test_the_free_memory_is_that_of_a_running_machine() -> None:
    assert available_memory_bytes() > 2**20


def test_an_unknown_architecture_is_one_paragraph(copy: Path) -> None:
    edit_config(copy, model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    with pytest.raises(InputFailure, match="cannot load .* as a causal language model") as caught:
        Policy.load(inspect(copy), Ranks())
    assert "\n" not in str(caught.value)


def test_weights_that_lack_a_tensor_are_refused(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=4, layer_types=["full_attention"] * 4, max_window_layers=4)
    with pytest.raises(InputFailure, match="lack .* tensor"):
        Policy.load(inspect(copy), Ranks())


def test_the_first_failing_rank_gives_the_reason(tmp_path: Path) -> None:
    ExitNote(2, "the reason").write(tmp_path, 3)
    ExitNote(1, "a consequence").write(tmp_path, 3)
    assert ExitNote.read(tmp_path, 3) == ExitNote(2, "the reason")
    assert ExitNote.read(tmp_path, 4) is None
    ExitNote.clear(tmp_path, 3)
    assert ExitNote.read(tmp_path, 3) is None
