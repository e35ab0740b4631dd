"""Checkpoints: bit-exact resume, damage, failed saves, export."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from laminar.trainer import checkpoint_folder
from laminar.trainer.books import Books
from laminar.trainer.checkpoint import restore, save
from laminar.trainer.export import export
from laminar.trainer.failures import InputFailure, StorageFailure
from laminar.trainer.learner import Learner, TrainingPlan
from laminar.trainer.loss import LossRule
from laminar.trainer.model_folder import inspect
from laminar.trainer.policy import Policy
from laminar.trainer.ranks import Ranks
from laminar.trainer.saving import Checkpointer, choose
from laminar.wire.codec import pack_logprobs, pack_tokens
from laminar.wire.dataplane import BatchGroup, BatchSample, BatchSlice
from laminar.wire.messages import CheckpointDurableReply, CheckpointInfo, ResumePoint

FOLDER = Path(__file__).parent.parent / "data" / "grpo_reference"
MODEL = FOLDER / "reference_model"

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable).*:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)


class PaperBooks(Books):
    """The pool's side of checkpoints, in memory."""

    def __init__(self, keep: int = 3) -> None:
        self.keep = keep
        self.registered: list[CheckpointInfo] = []
        self.failed: list[tuple[int, str]] = []

    def __enter__(self) -> PaperBooks:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def ledger(self, step: int) -> bytes:
        return f"ledger of {step}".encode()

    def checkpoint_durable(self, checkpoint: CheckpointInfo) -> CheckpointDurableReply:
        self.registered.append(checkpoint)
        return CheckpointDurableReply(
            kept=self.registered[-self.keep :], removable=self.registered[: max(0, len(self.registered) - self.keep)]
        )

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self.failed.append((step, reason))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def make_learner() -> Learner:
    return Learner(Policy.load(inspect(MODEL), Ranks()), TrainingPlan(LossRule(), 2e-3, mini_batch_trajectories=16))


def recorded_batch(step: int) -> BatchSlice:
    """Four of the recorded groups, others at each step."""
    stored = np.load(FOLDER / "reference_batch.npz")
    groups: list[BatchGroup] = []
    for number in range(4 * (step % 4), 4 * (step % 4) + 4):
        rows = np.flatnonzero(stored["group"] == number)
        samples: list[BatchSample] = []
        for row in rows:
            tokens = stored["completion_ids"][row][stored["completion_mask"][row] == 1].tolist()
            samples.append(
                BatchSample(
                    id=f"0/{number}/{row}", version=0, step=0, tokens=pack_tokens(tokens), finish_reason="stop",
                    logprobs=pack_logprobs(stored["old_logprobs"][row][: len(tokens)].tolist()),
                    reward=float(stored["rewards"][row]),
                )
            )  # fmt: skip
        prompt = stored["prompt_ids"][rows[0]][stored["prompt_mask"][rows[0]] == 1].tolist()
        groups.append(BatchGroup(group=f"0/{number}", prompt_tokens=pack_tokens(prompt), samples=samples))
    return BatchSlice(step=step, rank=0, world=1, groups=groups, num_groups_total=4, num_samples_total=32)


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.policy.named_tensors()}


def make_checkpointer(root: Path, learner: Learner, books: PaperBooks, keep: int = 3) -> Checkpointer:
    return Checkpointer(root, 1, keep, lambda folder, step: save(learner, folder, step, None), lambda: books)


def saved(root: Path, learner: Learner, *steps: int, keep: int = 3) -> PaperBooks:
    books = PaperBooks(keep)
    checkpointer = make_checkpointer(root, learner, books)
    for step in steps:
        checkpointer.save(step)
    checkpointer.finish()
    return books


def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = make_learner()
    for step in range(1, 7):
        undisturbed.step(recorded_batch(step))

    first = make_learner()
    for step in range(1, 4):
        first.step(recorded_batch(step))
    (info,) = saved(tmp_path, first, 3).registered
    resumed = make_learner()
    assert restore(resumed, tmp_path / info.path) == 3
    for step in range(4, 7):
        resumed.step(recorded_batch(step))

    expected = weights(undisturbed)
    assert not torch.equal(expected["model.embed_tokens.weight"], weights(first)["model.embed_tokens.weight"])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    learner = make_learner()
    books = PaperBooks()
    checkpointer = make_checkpointer(tmp_path, learner, books)
    before = weights(learner)
    checkpointer.save(0)
    learner.step(recorded_batch(1))
    checkpointer.finish()
    restored = make_learner()
    restore(restored, tmp_path / books.registered[0].path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(restored).items())


def test_a_sealed_checkpoint_holds_the_ledger_and_a_hash_of_each_file(tmp_path: Path) -> None:
    (info,) = saved(tmp_path, make_learner(), 2).registered
    folder = tmp_path / "step-2-attempt-1"
    assert (folder / checkpoint_folder.LEDGER).read_bytes() == b"ledger of 2"
    assert json.loads((folder / checkpoint_folder.MANIFEST).read_text()) == info.manifest
    assert set(info.manifest) == {path.name for path in folder.iterdir()} - {checkpoint_folder.MANIFEST}
    assert [path.name for path in tmp_path.iterdir()] == ["step-2-attempt-1"]


def test_checkpoints_that_the_pool_no_longer_keeps_are_deleted(tmp_path: Path) -> None:
    saved(tmp_path, make_learner(), 1, 2, 3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2-attempt-1", "step-3-attempt-1"]


def test_a_damaged_checkpoint_gives_way_to_an_older_kept_one(tmp_path: Path) -> None:
    kept = saved(tmp_path, make_learner(), 1, 2).registered
    flip_a_byte(tmp_path / kept[1].path / next(name for name in kept[1].manifest if name.endswith(".distcp")))
    choice = choose(tmp_path, ResumePoint(checkpoint=kept[1], kept=kept))
    assert choice.checkpoint == kept[0] and choice.num_damaged == 1


@pytest.mark.parametrize("damage", ["flip", "missing", "gone"])
def test_a_damaged_only_checkpoint_is_named_in_one_paragraph(tmp_path: Path, damage: str) -> None:
    (info,) = saved(tmp_path, make_learner(), 1).registered
    shard = tmp_path / info.path / next(name for name in info.manifest if name.endswith(".distcp"))
    actions: dict[str, Callable[[], object]] = {
        "flip": lambda: flip_a_byte(shard),
        "missing": shard.unlink,
        "gone": lambda: shard.parent.rename(tmp_path / "elsewhere"),
    }
    actions[damage]()
    with pytest.raises(InputFailure) as caught:
        choose(tmp_path, ResumePoint(checkpoint=info, kept=[info]))
    assert str(shard if damage != "gone" else shard.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_above_the_chosen_one_is_never_restored(tmp_path: Path) -> None:
    kept = saved(tmp_path, make_learner(), 1, 2, 3).registered
    assert [info.step for info in checkpoint_folder.candidates(ResumePoint(checkpoint=kept[1], kept=kept))] == [2, 1]


def test_no_checkpoint_means_the_model_itself(tmp_path: Path) -> None:
    assert choose(tmp_path, ResumePoint(checkpoint=None, kept=[])).checkpoint is None


def test_a_gone_folder_is_reported_and_training_stops_after_keep_missed_saves(tmp_path: Path) -> None:
    learner, books = make_learner(), PaperBooks()
    checkpointer = make_checkpointer(tmp_path / "unmounted", learner, books, keep=2)
    checkpointer.save(1)
    checkpointer.finish()
    checkpointer.check()
    checkpointer.save(2)
    checkpointer.finish()
    assert [step for step, _ in books.failed] == [1, 2]
    assert "is gone" in books.failed[0][1]
    with pytest.raises(StorageFailure, match="last 2 checkpoints could not be written"):
        checkpointer.check()


def test_a_good_save_forgives_the_missed_ones(tmp_path: Path) -> None:
    learner, books, root = make_learner(), PaperBooks(), tmp_path / "volume"
    checkpointer = make_checkpointer(root, learner, books, keep=2)
    checkpointer.save(1)
    checkpointer.finish()
    root.mkdir()
    checkpointer.save(2)
    checkpointer.finish()
    root.rename(tmp_path / "unmounted")
    checkpointer.save(3)
    checkpointer.finish()
    checkpointer.check()
    assert [step for step, _ in books.failed] == [1, 3]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_a_missed_save_and_leaves_nothing_behind(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(volume)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mount: {mounted.stderr.decode().strip()}")
    try:
        books = saved(volume, make_learner(), 1)
        assert [step for step, _ in books.failed] == [1] and not books.registered
        assert list(volume.iterdir()) == []
    finally:
        subprocess.run(["umount", str(volume)], check=True)


def test_leftovers_of_a_dead_attempt_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step-1-attempt-1.tmp", "step-1-attempt-1", "notes.tmp"):
        (tmp_path / name).mkdir()
    checkpoint_folder.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.tmp", "step-1-attempt-1"]


def test_an_exported_checkpoint_is_a_model_folder_with_the_trained_weights(tmp_path: Path) -> None:
    learner = make_learner()
    learner.step(recorded_batch(1))
    (info,) = saved(tmp_path, learner, 1).registered
    out = tmp_path / "model"
    export(tmp_path / info.path, MODEL, out)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    expected = weights(learner)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
    assert (out / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()


def test_export_of_a_damaged_checkpoint_names_the_file(tmp_path: Path) -> None:
    (info,) = saved(tmp_path, make_learner(), 1).registered
    flip_a_byte(tmp_path / info.path / ".metadata")
    with pytest.raises(InputFailure, match=r"\.metadata has changed"):
        export(tmp_path / info.path, MODEL, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
