"""The emulated trainer: how long a step takes, and weights that belong to a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laminar.core.roofline import Training
from laminar.shell.handover import HandedOver
from laminar.shell.transport import connect
from laminar.trainer.emulated import WEIGHTS_BYTES, EmulatedTraining, slowed
from laminar.trainer.failures import InputFailure
from laminar.wire.codec import pack_logprobs, pack_tokens
from laminar.wire.dataplane import BatchGroup, BatchSample, BatchSlice
from laminar.wire.emulated import training_of
from laminar.wire.manifest import layout_bytes
from laminar.wire.spec import JobSpec

SCALE, GRAIN = 10.0, 4
SPEC = JobSpec.model_validate(
    {
        "steps": 3,
        "model": {"source": "file:/m"},
        "data": {"train": {"source": "file:/d.jsonl"}},
        "rewards": [{"name": "r", "type": "exact"}],
        "algorithm": {"samplesPerPrompt": 2, "miniBatchTrajectories": 2},
        "trainer": {
            "type": "emulated",
            "replicas": 2,
            "gpusPerReplica": 4,
            "emulated": {"modelFlopsUtilisation": 0.5, "updateOverheadSeconds": 0.25, "stallSeconds": 2.0},
        },
        "emulation": {
            "timeScale": SCALE,
            "tokenGrain": GRAIN,
            "model": {
                "numParameters": 5e8, "numHiddenLayers": 10, "numAttentionHeads": 1, "numKeyValueHeads": 1,
                "headDim": 100, "hiddenSize": 100,
            },
            "gpu": {
                "memoryBytes": 1e10, "memoryBytesPerSecond": 1e12, "flopsPerSecond": 1e14, "linkBytesPerSecond": 1e11,
                "hostBytesPerSecond": 1e10,
            },
        },
    }
)  # fmt: skip


def batch(step: int, num_groups: int = 2, prompt: int = 100, response: int = 400) -> BatchSlice:
    samples = [
        BatchSample(
            id=f"s{i}", version=0, step=0, tokens=pack_tokens([1] * response), logprobs=pack_logprobs([0.0] * response),
            reward=float(i), finish_reason="stop",
        )
        for i in range(2)
    ]  # fmt: skip
    groups = [
        BatchGroup(group=str(i), prompt_tokens=pack_tokens([2] * prompt), samples=samples) for i in range(num_groups)
    ]
    return BatchSlice(
        step=step, rank=0, world=1, groups=groups, num_groups_total=num_groups, num_samples_total=2 * num_groups
    )


def training(waited: list[float] | None = None, model: Path = Path("/m")) -> EmulatedTraining:
    return EmulatedTraining(SPEC, model, (waited if waited is not None else []).append)


def weights(made: EmulatedTraining) -> bytes:
    buffer = bytearray(layout_bytes(made.entries))
    made.copy_weights(buffer)
    return bytes(buffer)


def test_a_step_takes_as_long_as_the_emulated_group_needs() -> None:
    waited: list[float] = []
    stats = training(waited).step(batch(1))
    # 4 samples of 500 tokens, 4 for each: 8000. 6 * 5e8 * 8000 / (8 GPUs * 0.5e14) = 60 ms, and two updates.
    assert stats["emulated_train_s"] == pytest.approx(0.06 + 0.5)
    assert waited == [pytest.approx(0.056)] and stats["train_s"] == pytest.approx(0.056)
    assert (stats["reward_mean"], stats["tokens"], stats["updates"]) == (0.5, 1600.0, 2.0)


def test_the_whole_group_is_emulated_by_one_process() -> None:
    assert isinstance(training_of(SPEC), Training) and training_of(SPEC).num_gpus == 8


def test_the_hand_off_stops_training_for_the_modelled_time() -> None:
    waited: list[float] = []
    weights(training(waited))
    assert waited == [pytest.approx(0.2)]


def test_each_step_has_its_own_weights_and_always_the_same_ones() -> None:
    made, other = training(), training()
    seen = [weights(made)]
    for step in range(1, 4):
        made.step(batch(step))
        seen.append(weights(made))
    assert len(set(seen)) == 4 and all(len(each) == WEIGHTS_BYTES for each in seen)
    other.step(batch(2))
    assert weights(other) == seen[2]


def test_a_restored_step_has_the_weights_it_had(tmp_path: Path) -> None:
    made = training()
    made.step(batch(5))
    made.begin_save(tmp_path / "step", 5)(1.0)
    resumed = training()
    assert resumed.restore(tmp_path / "step") == 5
    assert weights(resumed) == weights(made)


def test_a_failed_save_shows_when_it_is_waited_for(tmp_path: Path) -> None:
    wait_written = training().begin_save(tmp_path / "gone" / "step", 1)
    with pytest.raises(FileNotFoundError):
        wait_written(1.0)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFailure, match="not one of an emulated trainer"):
        training().restore(tmp_path)


def test_the_model_of_the_run_is_the_one_it_started_from(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for _ in range(2):  # a second attempt replaces it
        training(model=tmp_path / "model").write_model(tmp_path / "out")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["model", "out"]
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_the_broadcast_comes_before_the_hand_over() -> None:
    happened: list[object] = []

    def send(*arguments: object, **keywords: object) -> HandedOver:
        happened.append("sent")
        return HandedOver.SENT

    late = slowed(0.5, happened.append, send)  # type: ignore[arg-type]
    assert late("relay", "t", "u", 1, None, bytearray(), 1.0, dial=connect) is HandedOver.SENT  # type: ignore[arg-type]
    assert happened == [0.5, "sent"]


def test_the_process_loads_no_torch() -> None:
    code = "import sys, laminar.trainer.emulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
