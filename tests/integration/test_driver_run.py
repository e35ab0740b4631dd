"""The driver with stand-in services: real processes, sockets and signals, but nothing is trained."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from laminar.cli.children import Launch, processes_of
from laminar.cli.driver import Driver, Ending
from laminar.cli.launch import Launchpad
from laminar.cli.run_folder import RunFolder, claim, new_record
from laminar.cli.running import exit_code, placement
from laminar.cli.view import QuietView
from laminar.core.reconcile import Create
from laminar.shell.process import become_subreaper
from laminar.wire.messages import Event, StepRow
from laminar.wire.spec import LaminarJob

STANDIN = Path(__file__).with_name("standin_service.py")
DEADLINE_S = 60


class StandinLaunchpad(Launchpad):
    def launch(
        self, create: Create, generation: int, restore_step: int | None, checkpoint: Path | None = None
    ) -> Launch:
        real = super().launch(create, generation, restore_step, checkpoint)
        return replace(real, command=(sys.executable, str(STANDIN)))


class Seen(QuietView):
    """Remembers what it was told, and calls `react` after each step."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.texts: list[str] = []
        self.last_step = 0
        self.react: Callable[[int], None] = lambda step: None

    def events(self, events: Sequence[Event]) -> None:
        self.texts.extend(event.text for event in events)

    def steps(self, rows: Sequence[StepRow]) -> None:
        self.last_step = rows[-1].step
        self.react(self.last_step)


def job(steps: int) -> LaminarJob:
    return LaminarJob.model_validate(
        {
            "metadata": {"name": "standin"},
            "spec": {
                "steps": steps,
                "model": {"source": "file:/nowhere"},
                "data": {"train": {"source": "file:/nowhere"}},
                "rewards": [{"name": "answer", "type": "exact"}],
            },
        }
    )


@dataclass
class Scene:
    path: Path
    steps: int
    view: Seen = field(default_factory=Seen)
    uid: str = ""
    driver: Driver | None = None

    def run(self) -> Ending:
        become_subreaper()
        with claim(self.path) as held:
            run = held.folder
            record = run.job() or new_record(job(self.steps))
            self.uid = record.uid
            run.write_job(record, job(self.steps))
            spec = placement(job(self.steps), 2)
            pad = StandinLaunchpad(run, "standin", record.uid, spec, 0)
            try:
                return asyncio.run(self._drive(run, pad))
            finally:
                pad.close()
                assert processes_of(self.uid) == []

    async def _drive(self, run: RunFolder, pad: Launchpad) -> Ending:
        spec = placement(job(self.steps), 2)
        self.driver = Driver(run, spec, self.uid, self.steps, pad, self.view)
        async with asyncio.timeout(DEADLINE_S):
            return await self.driver.run()

    def pid(self, slot: str) -> int:
        (pid,) = [pid for pid in processes_of(self.uid) if f"LAMINAR_SLOT={slot}" in environment(pid)]
        return pid

    def once_at_step(self, step: int, act: Callable[[], None]) -> None:
        pending = [act]
        self.view.react = lambda now: pending.pop()() if pending and now >= step else None


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def test_a_job_runs_to_its_end_and_leaves_files_but_no_processes(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", steps=5)
    ending = scene.run()
    assert exit_code(ending) == 0
    lines = (scene.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    result = RunFolder(scene.path).result()
    assert result is not None and (result.phase, result.committed_step) == ("complete", 5)
    state = RunFolder(scene.path).state()
    assert (state.attempt, state.epoch >= 1) == (1, True)


def test_killed_children_are_replaced_and_the_job_completes(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", steps=60)
    slots = {2: "rollout-1", 12: "relay-0", 22: "trainer-0", 32: "pool-0"}
    left = dict(slots)

    def kill_next(step: int) -> None:
        due = [at for at in left if step >= at]
        if due:
            os.kill(scene.pid(left.pop(due[0])), signal.SIGKILL)

    scene.view.react = kill_next
    ending = scene.run()
    assert exit_code(ending) == 0
    state = RunFolder(scene.path).state()
    assert {slot: life for slot, life in state.lives.items() if life > 1} == {slot: 2 for slot in slots.values()}
    for slot in slots.values():
        assert any(text.startswith(f"{slot} replaced by life 2") for text in scene.view.texts)
    assert any(text.startswith("rollout-1 fenced") for text in scene.view.texts)
    # The chain without the relay, and then with it again at the tail.
    assert state.epoch >= 3
    assert [member.slot for member in state.chain] == ["relay-1", "relay-0"]


def test_the_first_interrupt_stops_and_the_next_run_goes_on_from_there(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", steps=40)
    scene.once_at_step(3, lambda: scene.driver.interrupt() if scene.driver else None)
    ending = scene.run()
    assert (ending.result.phase, exit_code(ending)) == ("stopped", 130)
    reached = ending.result.committed_step
    assert 3 <= reached < 40
    again = Scene(tmp_path / "run", steps=40)
    ending = again.run()
    assert (ending.result.phase, ending.result.committed_step) == ("complete", 40)
    state = RunFolder(again.path).state()
    assert (state.attempt, state.lives["rollout-0"]) == (2, 2)


def test_the_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", steps=10_000)

    def twice() -> None:
        assert scene.driver is not None
        os.kill(scene.pid("trainer-0"), signal.SIGSTOP)
        scene.driver.interrupt()
        scene.driver.interrupt()

    scene.once_at_step(2, twice)
    started_s = time.monotonic()
    ending = scene.run()
    assert (ending.interrupted, exit_code(ending)) == (True, 130)
    assert time.monotonic() - started_s < 30


def test_a_users_mistake_ends_the_job_with_the_childs_own_words(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", steps=1000)
    folder = RunFolder(scene.path).slot_folder("rollout-0")
    claim(scene.path).release()
    with claim(scene.path) as held:
        held.folder.write_job(new_record(job(1000)), job(1000))
    folder.mkdir(parents=True)
    (folder / "mistake").write_text("the tokenizer has no chat template")
    ending = scene.run()
    assert exit_code(ending) == 2
    assert ending.result.reason == "the tokenizer has no chat template"


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    body = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_driver_run as t;"
        "t.Scene(Path(sys.argv[1]), steps=10_000).run()"
    )
    command = [sys.executable, "-c", body, str(tmp_path / "run"), str(STANDIN.parent)]
    driver = subprocess.Popen(command)
    try:
        run = RunFolder(tmp_path / "run")
        wait_until(lambda: run.metrics_file.exists() and '"step":2' in run.metrics_file.read_text())
        record = run.job()
        assert record is not None and len(processes_of(record.uid)) == 6
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: processes_of(record.uid) == [])


def wait_until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.05)
