"""What goes wrong before or during a run by somebody's mistake, or because the machine is full: one clear paragraph and
the right exit code, or a counted skip; never a traceback, a lost sample or a process that stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

Laminar = Callable[..., subprocess.CompletedProcess[str]]
JOB = """
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {{name: {name}}}
spec:
  steps: {steps}
  model: {{source: "file:{model}"}}
  data: {{train: {{source: "file:{data}"}}}}
  rewards: [{{name: length, type: python, function: "{reward}", timeoutSeconds: {timeout_s}}}]
  sampling: {{maxResponseTokens: 16}}
  algorithm: {{promptsPerStep: 4, samplesPerPrompt: 4}}
  trainer: {{checkpoint: {{everySteps: 1, keep: 2}}}}
  rollout: {{replicas: 1}}
"""
REWARD = "def score(prompt, response, answer):\n    return float(len(response) % 3)\n"
EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


class Desk:
    """A user's folder: a model, data, a reward and a job file, each of which a test may spoil."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(models / "plain", self.model)
        self.data = self.write("data.jsonl", rows(range(40)))
        self.reward = self.write("reward.py", REWARD)
        self.run = folder / "run"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def job(
        self, *, name: str = "tiny", steps: int = 2, function: str = "score", timeout_s: float = 10.0, **paths: Path
    ) -> str:
        return JOB.format(
            name=name,
            steps=steps,
            timeout_s=timeout_s,
            model=paths.get("model", self.model),
            data=paths.get("data", self.data),
            reward=f"{paths.get('reward', self.reward)}:{function}",
        )

    def job_file(self, **changes: Any) -> Path:
        return self.write("job.yaml", self.job(**changes))

    def change_config(self, **changes: Any) -> None:
        file = self.model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rows(numbers: range) -> str:
    return "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in numbers)


@pytest.fixture
def desk(tmp_path: Path, tiny_models: Path) -> Desk:
    return Desk(tmp_path, tiny_models)


@pytest.fixture
def refused(laminar: Laminar, desk: Desk) -> Callable[..., str]:
    """Runs the desk's job; it must be refused with exit code 2 before anything is made. Returns the paragraph."""

    def refuse(*arguments: object, **changes: Any) -> str:
        done = laminar("run", desk.job_file(**changes), "--run", desk.run, *arguments)
        assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
        assert not (desk.run / "job.json").exists(), "a run was begun"
        return one_paragraph(done.stderr)

    return refuse


def one_paragraph(text: str) -> str:
    assert text.strip() and "\n" not in text.strip(), text
    return text.strip()


# --- refused before anything starts -----------------------------------------------------------------------------


def test_a_model_folder_that_is_not_there_is_named(refused: Any, desk: Desk) -> None:
    paragraph = refused(model=desk.folder / "modle")
    assert f"no folder {desk.folder / 'modle'}" in paragraph and "config.json" in paragraph


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_folder_without_a_needed_file_is_refused_with_its_name(refused: Any, desk: Desk, name: str) -> None:
    (desk.model / name).unlink()
    paragraph = refused()
    assert str(desk.model) in paragraph and name.replace("model", "*") in paragraph


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_of_the_model_is_refused_with_its_name(refused: Any, desk: Desk, name: str) -> None:
    (desk.model / name).write_text("{not json")
    assert str(desk.model / name) in refused()


def test_weights_in_another_format_are_refused_with_the_way_to_convert_them(refused: Any, desk: Desk) -> None:
    (desk.model / "model.safetensors").rename(desk.model / "pytorch_model.bin")
    paragraph = refused()
    assert "pytorch_model.bin, which Laminar does not read" in paragraph and "save_pretrained" in paragraph


def test_weights_that_were_cut_off_are_refused_before_anything_loads_them(refused: Any, desk: Desk) -> None:
    weights = desk.model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert f"{weights} is cut off" in refused()


def test_weights_too_big_for_this_machine_are_refused_before_anything_loads_them(refused: Any, desk: Desk) -> None:
    weights, size_bytes = desk.model / "model.safetensors", 2**40
    header = json.dumps({"w": {"dtype": "F32", "shape": [size_bytes // 4], "data_offsets": [0, size_bytes]}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, 8 + len(header) + size_bytes)  # sparse: it takes no room
    paragraph = refused()
    assert "of memory" in paragraph and "free" in paragraph and str(desk.model) in paragraph


def test_a_config_that_claims_another_size_than_the_weights_is_refused(refused: Any, desk: Desk) -> None:
    desk.change_config(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128)
    paragraph = refused()
    assert str(desk.model / "config.json") in paragraph and "not of the same model" in paragraph


def test_a_wrong_column_is_refused_with_the_nearest_name(refused: Any) -> None:
    assert "no column 'promt'. Did you mean 'prompt'?" in refused("--set", "data.train.promptField=promt")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is empty"), ("\n\n", "has no rows"), ("hello\n", "first row"), ("[1]\n", "not a JSON object")],
)
def test_data_without_a_first_row_is_refused(refused: Any, desk: Desk, text: str, said: str) -> None:
    data = desk.write("data.jsonl", text)
    paragraph = refused()
    assert str(data) in paragraph and said in paragraph


def test_a_reward_that_is_not_there_is_refused_with_what_there_is(refused: Any, desk: Desk) -> None:
    missing = desk.folder / "rewrd.py"
    assert f"{missing} cannot be read: No such file" in refused(reward=missing)
    assert "defines no 'scroe'. It defines: score." in refused(function="scroe")


def test_unknown_fields_and_overrides_are_refused_with_the_nearest_name(refused: Any, desk: Desk, laminar: Any) -> None:
    assert "Did you mean 'learningRate'?" in refused("--set", "algorithm.learningrate=1")
    assert "not path=value" in refused("--set", "steps")
    file = desk.write("job.yaml", desk.job().replace("sampling:", "samplng:"))
    done = laminar("run", file, "--run", desk.run)
    assert done.returncode == EXIT_BAD_INPUT
    assert f"{file}, line 10: spec has no field 'samplng'. Did you mean 'sampling'?" in one_paragraph(done.stderr)


def test_a_port_that_is_taken_is_refused(refused: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Port {port} is taken" in refused("--port", port)


def test_a_folder_with_other_things_is_never_taken_for_a_run(refused: Any, desk: Desk) -> None:
    desk.run.mkdir()
    thesis = desk.run / "thesis.txt"
    thesis.write_text("years of work")
    assert "is not a run folder" in refused("--fresh")
    assert thesis.read_text() == "years of work"


def test_data_in_another_format_is_refused(refused: Any, desk: Desk) -> None:
    assert "neither .jsonl nor .parquet" in refused(data=desk.write("rows.csv", "prompt,answer\n1,2\n"))
    assert "is not a parquet file" in refused(data=desk.write("rows.parquet", "prompt,answer\n1,2\n"))
    assert "is a folder" in refused(data=desk.model)


# --- refused by a service, which alone can know -----------------------------------------------------------------


def test_an_architecture_that_nobody_knows_ends_the_run_with_one_paragraph(laminar: Any, desk: Desk) -> None:
    desk.change_config(model_type="mamba9000", architectures=["Mamba9000ForCausalLM"])
    done = laminar("run", desk.job_file(), "--run", desk.run, "--quiet")
    assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
    assert "mamba9000" in done.stdout and str(desk.model) in done.stdout, done.stdout
    for command in ("status", "audit", "report"):
        laminar(command, desk.run)  # may refuse, with a paragraph


def test_prompts_that_are_all_too_long_or_not_json_end_the_run_with_one_paragraph(laminar: Any, desk: Desk) -> None:
    done = laminar("run", desk.job_file(), "--run", desk.run, "--quiet", "--set", "data.maxPromptTokens=2")
    assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
    assert f"all 40 prompts of {desk.data} are longer than data.maxPromptTokens = 2" in done.stdout
    for command in ("status", "audit", "report"):
        laminar(command, desk.run)
    desk.data.write_text(rows(range(3)) + "hello\n")
    done = laminar("run", desk.job_file(), "--run", desk.folder / "second", "--quiet")
    assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
    assert f"{desk.data}, row 4: not a JSON object" in done.stdout


# --- run folders ------------------------------------------------------------------------------------------------


def flip_a_byte(checkpoint: Path) -> None:
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_a_run_folder_keeps_to_its_job_and_survives_damaged_checkpoints(
    make_job: Callable[..., Any], desk: Desk, laminar: Any, until: Any
) -> None:
    # 30 rows without a fault, and some of each kind.
    bad = [{"prompt": "1+1="}, {"answer": "2"}, {"prompt": "", "answer": "2"}, {"prompt": "9" * 99, "answer": "2"}]
    desk.data.write_text(rows(range(30)) + "".join(json.dumps(row) + "\n" for row in bad))
    job = make_job(desk.job(steps=3) + "  loggers: {}\n")
    limit = ("--set", "data.maxPromptTokens=20")
    job.start(*limit)
    until("it runs", lambda: (job.folder / "job.json").exists())
    busy = laminar("run", job.job_file, "--run", job.folder, *limit)
    assert busy.returncode == EXIT_BAD_INPUT
    assert f"(pid {job.driver.pid}) is using {job.folder}" in one_paragraph(busy.stderr)
    report = job.assert_complete_and_clean(3)
    assert report["discarded"].get("tooLong", 0) in (0, 4)
    left_out = {"missingAnswer": 1, "missingPrompt": 2, "tooLong": 1}
    assert job.output[-1]["skipped_prompts"] == left_out
    assert json.loads(laminar("status", job.folder, "--json").stdout)["skipped_prompts"] == left_out
    assert job.events("data") == ["prompts left out: 1 missingAnswer, 2 missingPrompt, 1 tooLong"]

    other = laminar("run", desk.write("other.yaml", desk.job(name="other")), "--run", job.folder)
    assert other.returncode == EXIT_BAD_INPUT
    assert f"{job.folder} belongs to the job 'tiny', not to 'other'" in one_paragraph(other.stderr)
    changed = laminar("run", job.job_file, "--run", job.folder, *limit, "--set", "algorithm.learningRate=0.5")
    assert changed.returncode == EXIT_BAD_INPUT and "spec.algorithm.learningRate: 1e-06 -> 0.5" in changed.stderr
    fewer = laminar("run", job.job_file, "--run", job.folder, *limit, "--set", "steps=1")
    assert fewer.returncode == EXIT_BAD_INPUT and "spec.steps: 3 -> 1" in fewer.stderr

    kept = sorted((job.folder / "checkpoints").glob("step-*"))
    assert [path.name for path in kept] == ["step-2-attempt-1", "step-3-attempt-1"]
    flip_a_byte(kept[1])
    job.start(*limit, "--set", "steps=4")
    job.assert_complete_and_clean(4)
    (attempt,) = [text for text in job.events("attempt") if text.startswith("attempt 2 ")]
    assert "goes on after step 2" in attempt and attempt.endswith("because they are damaged: 1")

    for checkpoint in (job.folder / "checkpoints").glob("step-*"):
        flip_a_byte(checkpoint)
    done = laminar("run", job.job_file, "--run", job.folder, *limit, "--set", "steps=5", "--quiet")
    assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
    assert "No kept checkpoint" in done.stdout and "has changed since it was written" in done.stdout
    job.assert_nothing_left()
    job.audit()


# --- rewards ----------------------------------------------------------------------------------------------------


def test_responses_whose_reward_fails_are_left_out_and_counted_and_the_run_goes_on(
    make_job: Callable[..., Any], desk: Desk
) -> None:
    desk.reward.write_text(
        "import time\n"
        "def score(prompt, response, answer):\n"
        "    number = sum(response.encode())\n"
        "    if number % 16 == 0:\n"
        "        raise RuntimeError('the judge is confused')\n"
        "    if number % 16 == 5:\n"
        "        return float('nan')\n"
        "    if number % 61 == 7:\n"
        "        time.sleep(3600)\n"
        "    return 1.0\n"
    )
    job = make_job(desk.job(steps=4, timeout_s=0.5))
    job.start()
    report = job.assert_complete_and_clean(4)
    assert report["discarded"]["ungraded"] > 0 and report["consumed"] > 0
    assert "responses were left out" in job.output[-1]["conditions"]["ResponsesUngraded"]
    metrics = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["reward_mean"] >= 0.0 for row in metrics)
    # Whatever was graded is worth 1, or 0 for being cut at the limit: a failure is no reward.


def test_a_reward_that_always_fails_ends_the_job_with_the_reason(make_job: Callable[..., Any], desk: Desk) -> None:
    desk.reward.write_text(
        "import time\n"
        "def score(prompt, response, answer):\n"
        "    if len(response) % 4 == 0:\n"
        "        time.sleep(3600)\n"
        "    raise KeyError('api key')\n"
    )
    job = make_job(desk.job(steps=6, timeout_s=0.2))
    job.start()
    assert job.wait_end() == EXIT_FAILED
    reason = job.output[-1]["reason"]
    assert "responses in a row could not be graded" in reason
    assert "KeyError: 'api key'" in reason or "not done within 0.2 s" in reason
    warnings = [text for kind, text in job.pool_events() if kind == "ungraded"]
    assert len(warnings) == 1 and warnings[0].startswith("8 responses in a row could not be graded"), warnings
    job.assert_nothing_left()
    report = job.audit()
    assert report["consumed"] == 16 * report["committed_step"]
    desk.reward.write_text(REWARD)
    job.start()
    job.assert_complete_and_clean(6)


# --- a full disk ------------------------------------------------------------------------------------------------


class Disk:
    """A small file system of its own."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", folder], check=True)

    def fill(self) -> None:
        """To the last byte; again after something has been deleted."""
        with self._ballast.open("ab", buffering=0) as file:
            for size_bytes in (2**20, 2**12, 1):
                try:
                    while file.write(bytes(size_bytes)):
                        continue
                except OSError as error:
                    assert error.errno == errno.ENOSPC

    def free(self) -> None:
        self._ballast.unlink()

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[int], Disk]]:
    disks: list[Disk] = []

    def make(size_mb: int) -> Disk:
        disks.append(Disk(tmp_path / f"disk-{size_mb}", size_mb))
        return disks[-1]

    yield make
    for disk in disks:
        disk.unmount()


@pytest.mark.root
def test_a_disk_without_room_for_the_run_is_refused_before_it_starts(
    make_disk: Callable[[int], Disk], desk: Desk, refused: Callable[..., str]
) -> None:
    desk.run = make_disk(24).folder / "run"
    paragraph = refused()
    assert f"{desk.run} has 0.0 GB free" in paragraph and "--run" in paragraph


@pytest.mark.root
def test_a_disk_that_fills_up_stops_the_run_until_there_is_room_and_loses_nothing(
    make_disk: Callable[[int], Disk], desk: Desk, until: Any, make_job: Callable[..., Any]
) -> None:
    disk = make_disk(256)
    # `keep` missed saves in a row end a job: that rule has its own test, so here it must not be reached.
    job = make_job(desk.job(steps=24).replace("keep: 2", "keep: 20"), str(disk.folder / "job"))
    job.stderr_file = desk.folder / "driver.stderr"
    job.start()
    job.wait_step(4)

    def noticed() -> bool:
        disk.fill()
        return "DiskFull" in (job.status() or {"conditions": {}})["conditions"]

    until("the pool says that it waits", noticed)
    step = job.committed()
    disk.free()
    job.wait_step(step + 2)

    # A process to replace needs something on disk first: the driver waits for room, too.
    until("the pool says that it waits", noticed)
    attempt = job.status()["attempt"]
    job.kill(job.pid("trainer-0"))
    until("the trainer is gone", lambda: not job.pids("-m laminar.trainer "))
    assert job.driver.poll() is None and job.status()["attempt"] == attempt
    disk.free()
    report = job.assert_complete_and_clean(24)
    assert report["committed_step"] == 24
    assert "Traceback" not in job.stderr_file.read_text()
