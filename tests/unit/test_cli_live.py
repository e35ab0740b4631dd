"""The live view, drawn to a recorded terminal from fixed reports of the pool."""

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from laminar.cli.formats import count, duration, histogram_bars, interval95, sparkline, thin
from laminar.cli.live import LiveView
from laminar.cli.live_panels import Screen, screen
from laminar.cli.metering import TokenMeter, seconds_per_step, surviving
from laminar.cli.run_folder import Result, RunFolder
from laminar.cli.view import PlainView
from laminar.wire.messages import (
    EngineLoad,
    EvaluationProgress,
    EvaluationRow,
    Event,
    Histogram,
    JobStatus,
    LedgerCounts,
    MemberState,
    MemberView,
    PoolPhase,
    Role,
    StepRow,
    Visible,
)
from laminar.wire.spec import LaminarJob


def job() -> LaminarJob:
    return LaminarJob.model_validate(
        {
            "metadata": {"name": "arithmetic"},
            "spec": {
                "steps": 60,
                "model": {"source": "file:/nowhere/model"},
                "data": {"train": {"source": "file:/nowhere/train.jsonl"}},
                "rewards": [{"name": "answer", "type": "exact"}],
            },
        }
    )


def member(slot: str, role: Role, **changes: object) -> MemberView:
    values: dict[str, object] = {
        "slot": slot, "role": role, "index": int(slot[-1]), "life": 1, "incarnation": 1, "machine": "0", "pid": 7,
        "http_address": "", "data_address": "", "state": MemberState.RUNNING, "connected": True, "silent_s": 0.2,
        "suspect": False, "version": 34,
    }  # fmt: skip
    return MemberView.model_validate(values | changes)


def row(step: int, reward: float = 0.5, attempt: int = 1) -> StepRow:
    return StepRow(
        step=step, attempt=attempt, version=step, wall_s=1_790_000_000 + 1.5 * step, reward_mean=reward,
        num_samples=256, response_tokens=3600, inherent={0: 100, 1: 156}, consumed={1: 256},
    )  # fmt: skip


def evaluation(point: str, mode: str, graded: int, mean: float) -> EvaluationRow:
    return EvaluationRow.model_validate(
        {"name": "heldout", "point": point, "mode": mode, "version": 0, "step": 0, "num_items": 512,
         "num_graded": graded, "mean": mean, "stderr": 0.02}
    )  # fmt: skip


def status(**changes: object) -> JobStatus:
    values: dict[str, object] = {
        "job": "arithmetic", "uid": "u", "generation": 1, "phase": PoolPhase.TRAINING, "steps": 60,
        "committed_step": 34, "attempt": 2, "newest": Visible(version=35, step=34, digest="d"), "epoch": 3,
        "chain": ["relay-0", "relay-1"],
        "members": [
            member("rollout-0", Role.ROLLOUT),
            member("rollout-1", Role.ROLLOUT, suspect=True, silent_s=4.2, version=33),
            member("relay-0", Role.RELAY, version=35), member("relay-1", Role.RELAY, version=35, life=2),
            member("trainer-0", Role.TRAINER, version=None),
        ],
        "loads": {
            "rollout-0": EngineLoad(running=64, waiting=3, kv_used_tokens=3050, kv_capacity_tokens=5000),
            "rollout-1": EngineLoad(running=6, kv_used_tokens=100, kv_capacity_tokens=5000),
        },
        "counts": LedgerCounts(
            admitted=9000, consumed=8702, open=296, started_unconsumed_groups=41, discarded={"failed": 2}
        ),
        "inherent": Histogram(counts={0: 2000, 1: 6000, 2: 704}), "consumed": Histogram(counts={1: 5000, 2: 3704}),
        "last_step": row(34),
        "evaluations": [evaluation("first", "sampled", 512, 0.46), evaluation("first", "greedy", 512, 0.88)],
        "checkpoints": [], "wall_s": 1_790_000_060.0,
    }  # fmt: skip
    return JobStatus.model_validate(values | changes)


EVENTS = [
    Event(seq=1, wall_s=1_790_000_001, kind="lost", text="rollout-1 lost, 6 trajectories redirected"),
    Event(seq=2, wall_s=1_790_000_004, kind="replaced", text="rollout-1 replaced by life 2: exit code -9"),
]
REWARDS = [0.42 + 0.012 * step for step in range(34)]


def drawn(shown: JobStatus | None, width: int = 110, steps: int = 34) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    rows = [row(step + 1, reward) for step, reward in enumerate(REWARDS[:steps])]
    console.print(screen(Screen(job(), Path("runs/arithmetic"), shown, rows, EVENTS, "", 83.0, 5812.0), width))
    return console.export_text()


def test_the_screen_shows_where_the_run_stands() -> None:
    text = drawn(status())
    for part in (
        "34/60", "1.50 s a step", "ETA 0:39", "0.816", "5,812", "groups in flight 41 of 64", "inherent 0.85",
        "consumed 1.43", "version 35 (step 34)", "attempt 2", "chain epoch 3: relay-0 → relay-1", "61%", "64 running",
        "suspect 4 s", "running (life 2)", "first 0.460 ± 0.039", "6 trajectories redirected",
    ):  # fmt: skip
        assert part in text


def test_an_evaluation_that_goes_on_shows_its_progress() -> None:
    progress = EvaluationProgress(point="first", version=0, num_done=128, num_samples=512)
    shown = status(phase=PoolPhase.EVALUATING_FIRST, evaluations=[], evaluating=progress, committed_step=0)
    text = drawn(shown, steps=0)
    assert "evaluating version 0: 128/512" in text and "evaluating the first version" in text
    assert all(len(line) <= 60 for line in drawn(shown, 60, steps=0).splitlines())
    assert "evaluating version" not in drawn(status())


def test_plain_lines_tell_how_far_an_evaluation_is() -> None:
    out = io.StringIO()
    progress = EvaluationProgress(point="last", version=61, num_done=1200, num_samples=4096)
    PlainView(out).status(status(phase=PoolPhase.EVALUATING_LAST, evaluating=progress))
    assert out.getvalue() == "[evaluatingLast] evaluating version 61: 1,200/4,096\n"


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(status(), width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 24


def test_before_the_pool_answers_the_screen_says_so() -> None:
    assert "starting the processes" in drawn(None, steps=0)


@dataclass
class Clock:
    now_s: float = 0.0
    draw_s: float = 0.0
    """What each look at the clock costs, as drawing would."""

    def __call__(self) -> float:
        self.now_s += self.draw_s
        return self.now_s


class Counting(io.StringIO):
    """A terminal that counts frames: each is written in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = 0

    def write(self, text: str) -> int:
        self.frames += "arithmetic" in text
        return super().write(text)


def test_a_talkative_pool_does_not_make_it_draw_more_often(tmp_path: Path) -> None:
    clock, out = Clock(), Counting()
    view = LiveView(Console(file=out, width=100, force_terminal=True), clock)
    view.started(job(), RunFolder(tmp_path))
    for tick in range(100):
        clock.now_s = tick / 50
        view.status(status())
    assert 6 <= out.frames <= 9
    view.ended(Result(phase="complete", reason="", steps=60, committed_step=60, wall_s=90.0), RunFolder(tmp_path))


def test_the_end_is_a_short_table_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    out = io.StringIO()
    view = LiveView(Console(file=out, width=100), Clock())
    view.started(job(), RunFolder(tmp_path))
    view.steps([row(step + 1, reward) for step, reward in enumerate(REWARDS)])
    rows = [evaluation("first", "sampled", 512, 0.46), evaluation("last", "sampled", 512, 0.81)]
    view.status(status(evaluations=rows))
    view.ended(Result(phase="complete", reason="", steps=60, committed_step=34, wall_s=90.0), RunFolder(tmp_path))
    end = out.getvalue().rpartition("complete after")[2]
    report = str(tmp_path / "report.html")
    for part in ("34 of 60", "0.444 → 0.792 (+0.348", "0.460 ± 0.039", "+0.350", "2 failed", report):
        assert part in end


def test_a_new_life_of_a_replica_counts_from_zero() -> None:
    meter = TokenMeter()
    for second, generated in enumerate((100, 1100, 2100, 50, 1050)):
        meter.add({"rollout-0": EngineLoad(generated_tokens=generated)}, float(second))
    assert meter.tokens_per_s == pytest.approx((1000 + 1000 + 50 + 1000) / 4)


def test_a_step_trained_again_counts_once() -> None:
    rows = surviving([row(1), row(2), row(3), row(2, attempt=2)])
    assert [(r.step, r.attempt) for r in rows] == [(1, 1), (2, 2), (3, 1)]
    assert seconds_per_step(rows) == pytest.approx(1.5)


def test_numbers_read_well() -> None:
    assert [duration(s) for s in (7, 185, 8109, float("nan"))] == ["0:07", "3:05", "2:15:09", "-"]
    numbers = [count(number) for number in (0, 950, 9500, 95_000, 1_250_000, 3e9)]
    assert numbers == ["0", "950", "9,500", "95.0 k", "1.25 M", "3.00 G"]
    assert interval95(0.99, 0.02) == (pytest.approx(0.9508, abs=1e-3), 1.0)
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█" and sparkline([1, 1], 4) == "▄▄" and sparkline([], 4) == ""
    assert len(thin(list(range(1000)), 60)) == 60
    assert histogram_bars({0: 1, 1: 8, 2: 4, 3: 1, 9: 1}, 4) == "0▂ 1█ 2▅ 3+▃"
