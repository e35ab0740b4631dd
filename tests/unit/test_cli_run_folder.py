"""Who may use a run folder, and whether what is in it may go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.cli import room, sources
from laminar.cli.errors import BadInput
from laminar.cli.run_folder import (
    Result,
    RunFolder,
    Standing,
    State,
    StoredMember,
    check_unchanged,
    claim,
    new_record,
)
from laminar.wire.sources import absolute
from laminar.wire.spec import LaminarJob


def job(
    name: str = "tiny", *, steps: int = 10, model: str = "file:/models/a", learning_rate: float = 1e-4
) -> LaminarJob:
    return LaminarJob.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "steps": steps,
                "model": {"source": model},
                "data": {"train": {"source": "file:/data/train.jsonl"}},
                "rewards": [{"name": "answer", "type": "exact"}],
                "algorithm": {"learningRate": learning_rate},
            },
        }
    )


def result(phase: str) -> Result:
    return Result(phase=phase, reason="", steps=10, committed_step=10, wall_s=1.0)


def started(path: Path) -> RunFolder:
    with claim(path) as held:
        held.folder.write_job(new_record(job()), job())
    return RunFolder(path)


def test_a_second_run_on_a_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with claim(tmp_path / "run"):
        with pytest.raises(BadInput, match=rf"pid {os.getpid()}\) is using"):
            claim(tmp_path / "run")
    claim(tmp_path / "run").release()


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    body = (
        "import os, signal, sys; from pathlib import Path; from laminar.cli.run_folder import claim;"
        "held = claim(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    code = subprocess.run([sys.executable, "-c", body, str(tmp_path / "run")], timeout=60).returncode
    assert code == -9
    claim(tmp_path / "run").release()


def test_a_folder_with_files_of_somebody_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(BadInput, match="is not a run folder"):
            claim(tmp_path, fresh=fresh)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_standing_follows_the_files(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.standing() is Standing.NEW
    started(run.path)
    assert run.standing() is Standing.UNFINISHED
    run.write_result(result("stopped"))
    assert run.standing() is Standing.UNFINISHED
    run.write_result(result("complete"))
    assert run.standing() is Standing.FINISHED
    run.forget_result()
    assert run.standing() is Standing.UNFINISHED


def test_fresh_moves_the_old_run_aside_and_keeps_it(tmp_path: Path) -> None:
    for number in (1, 2):
        started(tmp_path / "run")
        with claim(tmp_path / "run", fresh=True) as held:
            assert held.folder.standing() is Standing.NEW
        assert RunFolder(tmp_path / f"run.old-{number}").standing() is Standing.UNFINISHED


def test_more_steps_are_no_change(tmp_path: Path) -> None:
    check_unchanged(tmp_path, job(steps=10), job(steps=20))


def test_fewer_steps_and_any_other_change_are_refused_with_the_difference(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="spec.steps: 10 -> 5"):
        check_unchanged(tmp_path, job(steps=10), job(steps=5))
    with pytest.raises(BadInput, match="spec.algorithm.learningRate"):
        check_unchanged(tmp_path, job(), job(learning_rate=1e-3))


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="belongs to the job 'other'"):
        check_unchanged(tmp_path, job("other"), job())


def test_what_must_not_go_back_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    member = StoredMember(slot="relay-0", address="127.0.0.1:1", machine="machine-0", incarnation=4)
    state = State(epoch=3, chain=[member], attempt=2, lives={"rollout-0": 5})
    run.write_state(state)
    assert run.state() == state


def test_the_token_is_the_owners_alone_and_stays_the_same(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    assert run.token() == run.token()
    assert (run.path / "token").stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    (run.path / "state.json").write_text("{")
    with pytest.raises(BadInput, match="is damaged"):
        run.state()


def test_the_socket_of_a_deep_folder_is_short_enough_for_the_kernel(tmp_path: Path) -> None:
    deep = RunFolder(tmp_path / ("d" * 120))
    assert len(os.fsencode(deep.handoff_socket(1, "0123456789abcdef"))) <= 107
    assert deep.handoff_socket(0, "u" * 20) != deep.handoff_socket(1, "u" * 20)


def model_folder(path: Path, *, without: str = "") -> Path:
    path.mkdir()
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]}}).encode()
    files = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(64),
    }
    for name, data in files.items():
        if name != without:
            (path / name).write_bytes(data)
    return path


def job_on(folder: Path, rows: str, **data: str) -> LaminarJob:
    (folder / "train.jsonl").write_text(rows)
    base = job(model=f"file:{folder / 'model'}").model_dump(by_alias=True, mode="json")
    base["spec"]["data"]["train"] = {"source": f"file:{folder / 'train.jsonl'}", **data}
    return LaminarJob.model_validate(base)


ROW = '{"prompt": "1+1", "answer": "2", "reward_model": {"ground_truth": "2"}}\n'


def test_good_files_pass(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    sources.check(job_on(tmp_path, ROW))
    sources.check(job_on(tmp_path, ROW, answerField="reward_model.ground_truth"))


@pytest.mark.parametrize(
    ("without", "words"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no weights")],
)
def test_a_model_folder_that_lacks_a_file_is_named(tmp_path: Path, without: str, words: str) -> None:
    model_folder(tmp_path / "model", without=without)
    with pytest.raises(BadInput, match=words):
        sources.check(job_on(tmp_path, ROW))


@pytest.mark.parametrize(
    ("rows", "data", "words"),
    [
        ("", {}, "is empty"),
        ("\n\n", {}, "has no rows"),
        ("not json\n", {}, "is not JSON"),
        ("[1]\n", {}, "is not a JSON object"),
        (ROW, {"promptField": "question"}, "no column 'question'. It has: answer, prompt"),
    ],
)
def test_data_that_cannot_be_used_is_refused(tmp_path: Path, rows: str, data: dict[str, str], words: str) -> None:
    model_folder(tmp_path / "model")
    with pytest.raises(BadInput, match=words):
        sources.check(job_on(tmp_path, rows, **data))


def test_parquet_columns_inside_structs_are_found(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    model_folder(tmp_path / "model")
    path = tmp_path / "train.parquet"
    table = pyarrow.Table.from_pylist([{"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "2"}}])
    parquet.write_table(table, path)
    good = job_on(tmp_path, ROW).model_dump(by_alias=True, mode="json")
    good["spec"]["data"]["train"] = {"source": f"file:{path}", "answerField": "reward_model.ground_truth"}
    sources.check(LaminarJob.model_validate(good))
    good["spec"]["data"]["train"]["answerField"] = "answer"
    with pytest.raises(BadInput, match="no column 'answer'"):
        sources.check(LaminarJob.model_validate(good))


def test_a_reward_function_that_is_not_defined_is_refused(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    (tmp_path / "score.py").write_text("def grade(prompt, response, answer):\n    return 1.0\n")
    base = job_on(tmp_path, ROW).model_dump(by_alias=True, mode="json", exclude_none=True)

    def with_function(text: str) -> LaminarJob:
        base["spec"]["rewards"] = [{"name": "own", "type": "python", "function": text}]
        return absolute(LaminarJob.model_validate(base), tmp_path)

    sources.check(with_function("score.py:grade"))
    with pytest.raises(BadInput, match="defines no 'reward'. It defines: grade"):
        sources.check(with_function("score.py:reward"))


def test_relative_sources_count_from_the_job_file(tmp_path: Path) -> None:
    moved = absolute(job(model="file:models/../a"), tmp_path)
    assert moved.spec.model.source == f"file:{tmp_path / 'a'}"


def test_a_model_too_large_for_this_host_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    assert room.count_parameters(model) == 32
    spec = job().spec
    assert room.need(spec, 10**9, 2).memory_bytes > 20e9
    huge = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"replicas": 4096})})
    with pytest.raises(BadInput, match="of memory with 4096 rollout replicas"):
        room.check(huge, model, tmp_path, 2)
