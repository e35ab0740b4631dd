"""What the commands say about a run that has ended, read from its folder alone."""

import io
import json
import random
import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner
from typer.testing import Result as Result_

from laminar.cli import commands
from laminar.cli.errors import BadInput
from laminar.cli.logs import Follower
from laminar.cli.recorders import attach
from laminar.cli.report import render, write_report
from laminar.cli.run_data import MAX_TRAJECTORIES, Thinning, load_run
from laminar.cli.run_folder import Result, RunFolder, State, StoredMember, new_record
from laminar.cli.view import QuietView
from laminar.shell.ledger_file import FILE_NAME, SCHEMA_VERSION, columns, schema
from laminar.wire.codec import pack_logprobs, pack_tokens
from laminar.wire.messages import EngineLoad, Event, Histogram, JobStatus, LedgerCounts, PoolPhase, StepRow
from laminar.wire.spec import LaminarJob

START_WALL_S = 1_790_000_000.0
GROUPS, SAMPLES = 6, 4
NASTY = 'Is 3 < 5 & "7 > 2"?</script><script>alert(1)</script>'


def job(steps: int = 12) -> LaminarJob:
    return LaminarJob.model_validate(
        {
            "metadata": {"name": "arithmetic"},
            "spec": {
                "steps": steps,
                "model": {"source": "file:/nowhere/model"},
                "data": {"train": {"source": "file:/nowhere/train.jsonl"}},
                "evaluations": [{"name": "heldout", "source": "file:/nowhere/heldout.jsonl"}],
                "rewards": [{"name": "answer", "type": "exact", "extract": {"tag": "answer"}}],
                "sampling": {"maxResponseTokens": 160},
                "algorithm": {"promptsPerStep": GROUPS, "samplesPerPrompt": SAMPLES},
            },
        }
    )


@dataclass
class Books:
    """Rows of a ledger as a pool would have left them after a quiet run, and what they add up to."""

    steps: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    rows: dict[str, list[tuple[object, ...]]] = field(default_factory=dict)
    consumed: int = 0
    discarded: int = 0
    clock_s: dict[str, float] = field(default_factory=lambda: {"rollout-0": 0.0, "rollout-1": 0.4})

    def put(self, table: str, **values: object) -> None:
        self.rows.setdefault(table, []).append(tuple(values.get(name) for name in columns(table)))

    def train(self) -> None:
        for version in range(self.steps + 1):
            self.put(
                "versions", version=version, step=version, parent=version - 1 if version else None,
                attempt=1 if version < self.steps // 2 else 2, state="visible", digest=f"d{version}",
            )  # fmt: skip
        for step in range(1, self.steps + 1):
            self.one_step(step)
        self.one_group(self.steps + 1, None, "discarded")
        self.loads()
        self.evaluations()

    def one_step(self, step: int) -> None:
        names, rewards, tokens, inherent, consumed = [], [], 0, {}, {}
        for place in range(GROUPS):
            prompt = (step - 1) * GROUPS + place
            for reward, length, stale in self.one_group(step, prompt, "consumed"):
                rewards.append(reward)
                tokens += length
                inherent[stale[0]] = inherent.get(stale[0], 0) + 1
                consumed[stale[1]] = consumed.get(stale[1], 0) + 1
            names.append(f"0/{prompt}")
        wall_s = START_WALL_S + max(self.clock_s.values())
        self.put("batches", step=step, groups=json.dumps(names), sealed_wall_s=wall_s)
        stats = {"loss": 0.3 / step, "grad_norm": 1 + self.rng.random(), "clip_fraction": 0.01, "train_s": 0.8}
        row = StepRow(
            step=step, attempt=1, version=step, wall_s=wall_s + 0.5, reward_mean=sum(rewards) / len(rewards),
            num_samples=len(rewards), response_tokens=tokens, inherent=inherent, consumed=consumed, stats=stats,
        )  # fmt: skip
        self.put("steps", step=step, row=row.model_dump_json())

    def one_group(self, step: int, prompt: int | None, state: str) -> list[tuple[float, int, tuple[int, int]]]:
        number = self.steps * GROUPS if prompt is None else prompt
        slot = f"rollout-{number % 2}"
        text = NASTY if number == 0 else f"{number % 7} + {number % 5} ="
        self.put(
            "groups", **{"pass": 0}, prompt=number, state=state, ready_seq=number,
            step=None if prompt is None else step, prompt_text=text, answer=str(number % 7 + number % 5),
        )  # fmt: skip
        start, ends, made = self.clock_s[slot], [], []
        stale = min(step - 1, self.rng.choice([0, 0, 1, 1, 2]))
        for index in range(SAMPLES):
            good = self.rng.random() < 0.4 + 0.5 * step / self.steps
            length = max(3, int(self.rng.gauss(22 - 8 * step / self.steps, 6)))
            ends.append(start + length * 0.02)
            self.put(
                "samples", **{"pass": 0}, prompt=number, idx=index, state=state, term=1, slot=slot,
                version=step - 1 - stale, length=length, kept=int(state == "consumed"),
                finish_reason="stop", reward=float(good), parts="{}",
                failures=0, restarts=0, moves=0, inherent=max(0, stale - 1), across_rollback=0,
                reason=None if state == "consumed" else "surplus", detail="", tools="[]", lost_lives="[]",
                leased_wall_s=START_WALL_S + start, finished_wall_s=START_WALL_S + ends[-1],
            )  # fmt: skip
            if state == "consumed":
                self.put(
                    "segments", **{"pass": 0}, prompt=number, idx=index, start=0, tokens=pack_tokens(range(length)),
                    logprobs=pack_logprobs([0.0] * length),
                )  # fmt: skip
            made.append((float(good), length, (max(0, stale - 1), stale)))
        self.clock_s[slot] = max(ends) if number % GROUPS > GROUPS - 3 else start + 0.05
        self.consumed += SAMPLES * (state == "consumed")
        self.discarded += SAMPLES * (state == "discarded")
        return made

    def loads(self) -> None:
        end = int(max(self.clock_s.values())) + 1
        for second in range(end):
            for index in (0, 1):
                used = int(4000 * abs(self.rng.gauss(0.5, 0.2))) % 4000
                load = EngineLoad(running=12, kv_used_tokens=used, kv_capacity_tokens=4000)
                self.put(
                    "loads", seq=2 * second + index, wall_s=START_WALL_S + second, slot=f"rollout-{index}",
                    version=second, load=load.model_dump_json(),
                )  # fmt: skip

    def evaluations(self) -> None:
        for point, version, rate in (("first", 0, 0.5), ("last", self.steps, 0.85)):
            self.put("rounds", point=point, version=version)
            for mode, better in (("sampled", 0.0), ("greedy", 0.1)):
                for prompt in range(60):
                    self.put(
                        "eval_samples", id=f"eval/heldout/{point}/{mode}/{prompt}/0", point=point, term=1, done=1,
                        reward=float(self.rng.random() < rate + better), length=12, finish_reason="stop",
                    )  # fmt: skip

    def write(self, file: Path, uid: str) -> None:
        counters = {
            "admitted": self.consumed + self.discarded, "consumed": self.consumed,
            "discarded": {"surplus": self.discarded}, "restarted_samples": 2, "restarted_tokens": 31,
            "moved_samples": 6, "refused": {"superseded": 3},
        }  # fmt: skip
        for key, value in (
            ("schema", SCHEMA_VERSION), ("job_uid", uid), ("generation", 1), ("counters", json.dumps(counters)),
            ("committed_step", self.steps), ("attempt", 2),
        ):  # fmt: skip
            self.put("meta", key=key, value=str(value))
        events = [("started", "rollout-0 started"), ("lost", "rollout-1 lost, 6 trajectories redirected")]
        for seq, (kind, text) in enumerate(events, 1):
            self.put("events", seq=seq, wall_s=START_WALL_S + seq, kind=kind, text=text)
        file.parent.mkdir(parents=True)
        with sqlite3.connect(file) as db:
            for statement in schema():
                db.execute(statement)
            for table, rows in self.rows.items():
                db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns(table)))})", rows)
        db.close()


def make_run(folder: Path, steps: int = 12) -> Path:
    """A finished run as the driver and the pool leave it."""
    folder.mkdir(parents=True)
    run, wanted = RunFolder(folder), job(steps)
    record = new_record(wanted)
    books = Books(steps)
    books.train()
    books.write(run.store / FILE_NAME, record.uid)
    run.write_job(record, wanted)
    chain = [StoredMember(slot=f"relay-{i}", address="127.0.0.1:1", machine=str(i), incarnation=1) for i in (0, 1)]
    run.write_state(State(epoch=2, chain=chain, attempt=2, lives={"pool-0": 1, "rollout-1": 2}))
    run.write_result(Result(phase="complete", reason="", steps=steps, committed_step=steps, wall_s=61.0))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "arithmetic")


class Page(HTMLParser):
    """Element names and attributes of a page, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_needs_nothing_but_itself(run: Path) -> None:
    text = write_report(run).read_text()
    page = Page(text)
    assert page.links == []
    assert re.findall(r"(?:url\(|@import|https?://)(?!www\.w3\.org/2000/svg)", text) == []
    assert (run / "report.html").stat().st_size < 400_000


def test_the_report_shows_every_part_of_the_run(run: Path) -> None:
    words = " ".join(Page(write_report(run).read_text()).words)
    for part in (
        "Training reward", "Evaluation", "Staleness", "Response lengths", "KV cache in use", "Timeline of trajectories",
        "Prompts and responses", "Step 1:", "Step 12:", "Trajectories accounted for", "Attempts and relay chain",
        "6 trajectories redirected", "promptsPerStep: 6", "attempt 2",
    ):  # fmt: skip
        assert part in words


def test_text_of_the_data_cannot_become_part_of_the_page(run: Path) -> None:
    page = Page(write_report(run).read_text())
    assert page.tags.count("script") == 2
    assert any("alert(1)" in word for word in page.words)


def test_the_report_of_a_long_run_stays_bounded(run: Path) -> None:
    data = load_run(run)
    kept: Thinning[int] = Thinning(MAX_TRAJECTORIES)
    for number in range(10 * MAX_TRAJECTORIES):
        kept.add(number)
    assert MAX_TRAJECTORIES // 2 <= len(kept.items) <= MAX_TRAJECTORIES
    gaps = {after - before for before, after in zip(kept.items, kept.items[1:], strict=False)}
    assert len(gaps) == 1
    assert data.num_trajectories == 13 * GROUPS * SAMPLES - (GROUPS - 1) * SAMPLES


def test_a_run_without_any_step_has_a_report_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "empty")
    with sqlite3.connect(folder / "pool" / FILE_NAME) as db:
        for table in ("steps", "samples", "segments", "groups", "batches", "loads", "events", "eval_samples", "rounds"):
            db.execute(f"DELETE FROM {table}")
    db.close()
    assert "No step has been committed yet" in render(load_run(folder))


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a run folder"):
        load_run(tmp_path)


def laminar(*words: object) -> Result_:
    """Runs a command as the console script would."""
    app = typer.Typer()
    commands.register(app)
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_the_audit_prints_the_equation_with_its_numbers(run: Path) -> None:
    result = laminar("audit", run)
    assert result.exit_code == 0
    assert "292 admitted = 288 consumed + 4 discarded (surplus) + 0 open" in result.stdout
    assert json.loads(laminar("audit", run, "--json").stdout)["ok"] is True


def test_the_audit_fails_when_a_sample_is_gone(run: Path) -> None:
    with sqlite3.connect(run / "pool" / FILE_NAME) as db:
        db.execute("DELETE FROM samples WHERE prompt = 3 AND idx = 1")
    db.close()
    result = laminar("audit", run)
    assert result.exit_code == 1
    assert "292 admitted != 287 consumed" in result.stdout and "VIOLATION" in result.stdout


def test_a_run_that_has_ended_says_so(run: Path) -> None:
    result = laminar("status", run)
    assert result.exit_code == 0
    for part in ("not running, complete", "12 of 12", "6 trajectories redirected", "heldout", "sampled"):
        assert part in result.stdout
    values = json.loads(laminar("status", run, "--json").stdout)
    assert (values["running"], values["committed_step"], values["phase"]) == (False, 12, "complete")


class PoolStandIn(BaseHTTPRequestHandler):
    """Answers what `laminar status` asks a pool for."""

    def do_GET(self) -> None:
        assert isinstance(self.server, PoolServer)
        path = self.path.partition("?")[0]
        allowed = self.headers["authorization"] == f"Bearer {self.server.token}"
        body = self.server.answers[path] if allowed else b'{"error": "unauthorized", "detail": ""}'
        self.send_response(200 if allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class PoolServer(ThreadingHTTPServer):
    token = ""
    answers: dict[str, bytes] = {}


@pytest.fixture
def pool() -> Iterator[PoolServer]:
    server = PoolServer(("127.0.0.1", 0), PoolStandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_live_pool_is_asked(run: Path, pool: PoolServer) -> None:
    pool.token = RunFolder(run).token()
    now = JobStatus(
        job="arithmetic", uid="u", generation=1, phase=PoolPhase.TRAINING, steps=12, committed_step=5, attempt=1,
        newest=None, epoch=1, chain=["relay-0"], members=[], loads={}, counts=LedgerCounts(), inherent=Histogram(),
        consumed=Histogram(), last_step=None, evaluations=[], checkpoints=[], wall_s=START_WALL_S,
    )  # fmt: skip
    pool.answers = {"/v1/status": now.model_dump_json().encode(), "/v1/steps": b"[]", "/v1/events": b"[]"}
    RunFolder(run).write_endpoint(f"http://127.0.0.1:{pool.server_port}")
    values = json.loads(laminar("status", run, "--json").stdout)
    assert (values["running"], values["committed_step"]) == (True, 5)
    assert "5/12" in laminar("status", run).stdout
    pool.token = "of another job"
    assert json.loads(laminar("status", run, "--json").stdout)["running"] is False
    assert "its pool does not answer yet" in laminar("status", run).stdout


def test_samples_show_prompt_response_reward_and_version(run: Path) -> None:
    text = laminar("samples", run, "--step", 1, "-n", 5).stdout
    assert text.startswith("step 1\n") and NASTY in text and text.count("reward") == 5 + 2
    lines = laminar("samples", run, "-n", 3, "--json").stdout.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [12, 12, 12]
    assert json.loads(lines[0])["response"].startswith("0 1 2")


def test_a_step_that_is_not_there_is_refused(run: Path) -> None:
    result = laminar("samples", run, "--step", 99)
    assert result.exit_code == 2
    assert "steps 1 to 12 are committed" in result.stderr


def test_logs_are_merged_by_time_and_tracebacks_stay_together(run: Path) -> None:
    logs = run / "logs"
    logs.mkdir()
    line = "2026-11-30T21:00:{:02d}.500Z INFO laminar.pool {}\n"
    (logs / "pool-0.log").write_text(line.format(1, "one") + line.format(4, "four") + "Traceback\n  line\n")
    (logs / "trainer-0.log").write_text(line.format(2, "two") + line.format(5, "five"))
    words = [text.split()[-1] for text in laminar("logs", run).stdout.splitlines()]
    assert words == ["one", "two", "four", "Traceback", "line", "five"]
    assert "two" not in laminar("logs", run, "pool-0").stdout
    refused = laminar("logs", run, "pool-7")
    assert refused.exit_code == 2 and "There are: pool-0, trainer-0" in refused.stderr


def test_following_gives_whole_new_lines_of_old_and_new_files(run: Path) -> None:
    logs = run / "logs"
    logs.mkdir()
    file = logs / "pool-0.log"
    file.write_text("2026-11-30T21:00:01.500Z INFO a old\n")
    follower = Follower(run, None)
    with file.open("a") as stream:
        stream.write("2026-11-30T21:00:03.500Z INFO a new\n2026-11-30T21:00:04.500Z INFO a ha")
    (logs / "relay-0.log").write_text("2026-11-30T21:00:02.500Z INFO b first\n")
    assert [(entry.slot, entry.text.split()[-1]) for entry in follower.news()] == [
        ("relay-0", "first"),
        ("pool-0", "new"),
    ]
    with file.open("a") as stream:
        stream.write("lf\n")
    assert [entry.text.split()[-1] for entry in follower.news()] == ["half"]
    assert follower.news() == []


def test_the_final_model_is_exported_whole(run: Path, tmp_path: Path) -> None:
    assert "no final model" in laminar("export", run, "--to", tmp_path / "out").stderr
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert laminar("export", run, "--to", tmp_path / "out").exit_code == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]
    again = laminar("export", run, "--to", tmp_path / "out")
    assert again.exit_code == 2 and "not an empty folder" in again.stderr


def test_a_checkpoint_that_is_not_kept_is_refused(run: Path, tmp_path: Path) -> None:
    result = laminar("export", run, "--step", 7, "--to", tmp_path / "out")
    assert result.exit_code == 2 and "no checkpoint of step 7. Kept: none." in result.stderr


def test_a_job_file_is_checked_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "apiVersion: laminar.dev/v1alpha1\nkind: LaminarJob\nmetadata: {name: sums}\nspec:\n  steps: 3\n"
        "  model: {source: recipe://arithmetic-tiny}\n  data: {train: {source: recipe://chain-sum}}\n"
        "  rewards: [{name: answer, type: exact}]\n"
    )
    assert "sums, 5 steps" in laminar("validate", file, "--set", "steps=5").stdout
    refused = laminar("validate", file, "--set", "stepz=5")
    assert refused.exit_code == 2 and "steps" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("command", ["status", "audit", "report", "samples", "logs"])
def test_bad_input_is_one_paragraph_and_exit_code_2(command: str, tmp_path: Path) -> None:
    result = laminar(command, tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.stdout == "" and "is not a run folder" in result.stderr and result.stderr.count("\n") == 1


def test_what_the_driver_did_stands_among_the_events(run: Path) -> None:
    view = attach(QuietView(io.StringIO()), job())
    view.started(job(), RunFolder(run))
    pools = Event(seq=3, wall_s=START_WALL_S + 3, kind="suspect", text="kept by the pool, not here")
    view.events([Event(seq=0, wall_s=START_WALL_S + 1.5, kind="epoch", text="relay chain epoch 2: relay-1"), pools])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"seq": 0, "wall_s"')
    kinds = [event.kind for event in load_run(run).events]
    assert kinds == ["started", "epoch", "lost"]


def test_tensorboard_gets_steps_and_evaluations(tmp_path: Path) -> None:
    wanted = job().model_dump(by_alias=True)
    wanted["spec"]["loggers"] = {"tensorboard": {}}
    view = attach(QuietView(io.StringIO()), LaminarJob.model_validate(wanted))
    view.started(job(), RunFolder(tmp_path))
    view.steps([StepRow(step=s, attempt=1, version=s, wall_s=START_WALL_S, reward_mean=0.5, num_samples=4,
                        response_tokens=40, stats={"loss": 0.25}) for s in (1, 2)])  # fmt: skip
    view.ended(Result(phase="complete", reason="", steps=2, committed_step=2, wall_s=1.0), RunFolder(tmp_path))
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [(1, 0.25), (2, 0.25)]
    assert len(accumulator.Scalars("reward/mean")) == 2
