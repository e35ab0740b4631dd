"""The pool's volume is lost: the run goes on from the ledger beside its newest checkpoint."""

from __future__ import annotations

import shutil
from typing import Any


def test_a_lost_store_means_a_new_generation_from_the_newest_checkpoint_while_the_run_goes_on(
    job: Any, until: Any
) -> None:
    job.start()
    until("a checkpoint", lambda: (job.status() or {"checkpoints": []})["checkpoints"])
    job.wait_step(6)
    before = job.committed()
    pid = job.pid("pool-0")
    shutil.rmtree(job.folder / "pool")
    job.kill(pid)
    status = until("generation 2", lambda: (found := job.status()) and found["generation"] == 2 and found)
    assert 0 < status["committed_step"] <= before, "from a checkpoint, not from the start"
    job.wait_step(before + 2)
    job.assert_complete_and_clean()


def test_a_run_whose_store_was_lost_between_two_drivers_goes_on_in_a_new_generation(job: Any, until: Any) -> None:
    job.start()
    until("a checkpoint", lambda: (job.status() or {"checkpoints": []})["checkpoints"])
    job.driver.kill()
    job.driver.wait()
    shutil.rmtree(job.folder / "pool")
    job.start()
    status = until("generation 2", lambda: (found := job.status()) and found["generation"] == 2 and found)
    assert status["committed_step"] >= 4
    job.assert_complete_and_clean()
