"""Whole jobs under kill -9 and kill -STOP: each ends, and its books balance. One row of the failure table a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)


def test_an_undisturbed_run_completes_and_its_books_balance(job: Any) -> None:
    job.start()
    report = job.assert_complete_and_clean()
    assert report["consumed"] == 40 * 8 * 8
    assert (job.folder / "model" / "model.safetensors").stat().st_size > 0


def test_killed_rollout_agent_and_engine_are_replaced_and_their_trajectories_continue(job: Any, until: Any) -> None:
    job.start()
    job.wait_step(4)
    before = job.member("rollout-1")["incarnation"]
    job.kill(job.pid("rollout-1"))
    until("rollout-1 is back", lambda: (job.member("rollout-1") or {}).get("incarnation", 0) > before)
    job.wait_step(10)
    before = job.member("rollout-0")["incarnation"]
    job.kill(job.process("laminar.rollout.torch_engine", "LAMINAR_SLOT=rollout-0"))
    until("rollout-0 has a new incarnation", lambda: (job.member("rollout-0") or {}).get("incarnation", 0) > before)
    job.assert_complete_and_clean()


def test_killed_relays_leave_and_rejoin_the_chain_the_master_too(job: Any, until: Any) -> None:
    job.start()
    job.wait_step(4)
    for slot in ("relay-1", "relay-0"):
        epoch, life = job.status()["epoch"], job.member(slot)["life"]
        job.kill(job.pid(slot))
        until(f"{slot} lives again", lambda slot=slot, life=life: (job.member(slot) or {}).get("life", 0) > life)
        until(
            "both are in the chain",
            lambda epoch=epoch: (s := job.status()) and s["epoch"] > epoch and len(s["chain"]) == 2,
        )
        version = job.status()["newest"]["version"]
        until(
            "a newer version is visible",
            lambda version=version: (s := job.status()) and s["newest"]["version"] > version,
        )
    job.assert_complete_and_clean()


@pytest.mark.parametrize("victim", ["-m laminar.trainer ", "-u -m laminar.trainer.rank", "torch.distributed.run"])
def test_a_killed_trainer_process_means_a_new_attempt_and_no_lost_step(job: Any, until: Any, victim: str) -> None:
    job.start()
    job.wait_step(6)
    attempt = job.status()["attempt"]
    job.kill(job.process(victim))
    until("the next attempt trains", lambda: (s := job.status()) and s["attempt"] > attempt)
    job.assert_complete_and_clean()


@pytest.mark.parametrize("victim", ["-u -m laminar.trainer.rank", "torch.distributed.run"])
def test_a_stopped_trainer_process_is_noticed_killed_and_followed_by_a_new_attempt(
    make_job: Callable[..., Any], until: Any, victim: str
) -> None:
    job = make_job()
    job.start("--set", "steps=60")
    job.wait_step(6)
    attempt = job.status()["attempt"]
    pid = job.process(victim)
    job.kill(pid, signal.SIGSTOP)
    until("the next attempt trains", lambda: (s := job.status()) and s["attempt"] > attempt, 120)
    assert not os.path.exists(f"/proc/{pid}")
    assert any("hung and were killed" in text and f"process {pid}" in text for text in job.events()), job.events()
    job.assert_complete_and_clean(60)


def test_a_killed_pool_reopens_its_store_and_nobody_notices_more_than_a_wait(job: Any) -> None:
    job.start()
    for step in (3, 8, 13):
        job.wait_step(step)
        job.kill(job.pid("pool-0"))
    job.assert_complete_and_clean()


def test_a_killed_driver_takes_everything_with_it_and_the_run_resumes(job: Any) -> None:
    job.start()
    job.wait_step(10)
    job.kill(job.driver.pid)
    job.driver.wait(10)
    job.assert_nothing_left()
    job.audit()
    job.start()
    job.assert_complete_and_clean()


def test_an_agent_that_sleeps_is_suspect_and_comes_back_in_the_same_life(
    make_job: Callable[..., Any], until: Any
) -> None:
    job = make_job()
    job.start("--set", "steps=120")
    job.wait_step(4)
    incarnation = job.member("rollout-1")["incarnation"]
    pid = job.pid("rollout-1")
    job.kill(pid, signal.SIGSTOP)
    suspect = until("rollout-1 is suspect", lambda: (m := job.member("rollout-1")) and m["suspect"] and m, 10)
    assert suspect["silent_s"] < 6
    step = job.committed()
    until("the other replica goes on", lambda: job.committed() >= step + 2)
    job.kill(pid, signal.SIGCONT)
    back = until("it is no longer suspect", lambda: (m := job.member("rollout-1")) and not m["suspect"] and m, 15)
    assert back["incarnation"] == incarnation
    job.assert_complete_and_clean(120)


def test_an_engine_that_sleeps_for_ten_seconds_moves_nothing(make_job: Callable[..., Any], until: Any) -> None:
    job = make_job()
    job.start("--set", "steps=60")
    job.wait_step(4)
    before = job.status()["counts"]
    engine = job.process("laminar.rollout.torch_engine", "LAMINAR_SLOT=rollout-1")
    job.kill(engine, signal.SIGSTOP)
    step = job.committed()
    until("the other replica goes on", lambda: job.committed() >= step + 2)
    assert not until("its agent answers", lambda: job.member("rollout-1"))["suspect"]
    job.kill(engine, signal.SIGCONT)
    counts = job.status()["counts"]
    assert (counts["moved_samples"], counts["restarted_samples"]) == (
        before["moved_samples"],
        before["restarted_samples"],
    )
    job.assert_complete_and_clean(60)


def test_an_agent_that_sleeps_for_long_is_replaced(make_job: Callable[..., Any], until: Any) -> None:
    job = make_job()
    job.start("--set", "steps=4000")
    job.wait_step(4)
    life = job.member("rollout-1")["life"]
    pid = job.pid("rollout-1")
    job.kill(pid, signal.SIGSTOP)
    until("it is replaced", lambda: (m := job.member("rollout-1")) and m["life"] > life, 60)
    until("the sleeper is gone", lambda: not os.path.exists(f"/proc/{pid}"))
    job.driver.send_signal(signal.SIGINT)
    assert job.wait_end(60) == 130
    job.assert_nothing_left()
    job.audit()


def test_a_run_goes_back_to_its_oldest_kept_checkpoint_and_replays(job: Any) -> None:
    job.start()
    assert job.wait_end() == 0
    first = job.audit()
    kept = sorted(int(path.name.split("-")[1]) for path in (job.folder / "checkpoints").glob("step-*-attempt-*"))
    stray = job.folder / "checkpoints" / "step-2-attempt-9"
    stray.mkdir()
    job.start("--resume-from", "2")
    assert job.wait_end() == 2
    assert "keeps no checkpoint of step 2: step-2-attempt-9 is there, but" in job.stderr_file.read_text()
    stray.rmdir()
    job.start("--resume-from", str(kept[0]))
    again = job.assert_complete_and_clean()
    assert again["consumed"] == first["consumed"]


def test_first_interrupt_checkpoints_and_the_run_goes_on_later(job: Any) -> None:
    job.start()
    job.wait_step(6)
    job.driver.send_signal(signal.SIGINT)
    assert job.wait_end(60) == 130
    job.assert_nothing_left()
    stopped = job.audit()
    assert stopped["consumed"] >= 6 * 64
    job.start()
    job.assert_complete_and_clean()
