"""The record of a run: RUN/metrics.jsonl holds every step, however the pool hands them out."""

import asyncio
import io
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from laminar.cli.record import Recorder
from laminar.cli.run_folder import RunFolder
from laminar.cli.view import QuietView
from laminar.shell.client import PoolClient
from laminar.wire import messages as m

STEPS, PAGE = 8, 3


def row(step: int) -> m.StepRow:
    return m.StepRow(
        step=step, attempt=1, version=step, wall_s=step, reward_mean=step / STEPS, num_samples=2, response_tokens=9
    )


class Pool:
    """Answers with at most PAGE rows a call, as the real one does with more."""

    def __init__(self) -> None:
        self.committed_step = STEPS

    def server(self) -> TestServer:
        app = web.Application()
        app.add_routes(
            [web.get("/v1/status", self.status), web.get("/v1/steps", self.steps), web.get("/v1/events", self.events)]
        )
        return TestServer(app)

    async def status(self, _: web.Request) -> web.Response:
        status = m.JobStatus(
            job="toy", uid="u", generation=1, phase=m.PoolPhase.TRAINING, steps=STEPS,
            committed_step=self.committed_step, attempt=1, newest=None, epoch=0, chain=[], members=[], loads={},
            counts=m.LedgerCounts(), inherent=m.Histogram(), consumed=m.Histogram(), last_step=None, evaluations=[],
            checkpoints=[], wall_s=0,
        )  # fmt: skip
        return web.Response(text=status.model_dump_json())

    async def steps(self, request: web.Request) -> web.Response:
        after = int(request.query["after"])
        rows = [row(step) for step in range(1, self.committed_step + 1) if step > after]
        return web.Response(text=m.Steps(rows[:PAGE]).model_dump_json())

    async def events(self, _: web.Request) -> web.Response:
        return web.Response(text="[]")


def recorded_steps(run: RunFolder) -> list[int]:
    return [m.StepRow.model_validate_json(line).step for line in run.metrics_file.read_text().splitlines()]


def test_all_steps_are_recorded_though_the_pool_answers_with_a_limited_number(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Pool().server() as server, PoolClient(str(server.make_url("")), "t", "u", 1, "driver") as client:
            recorder = Recorder(client, run := RunFolder(tmp_path), QuietView(io.StringIO()))
            await recorder.finish(pool_answers=True)
            assert recorded_steps(run) == list(range(1, STEPS + 1))
            assert recorder.result("complete", "", STEPS, 1.0, {}).reward_last == sum(range(4, 9)) / 5 / STEPS

    asyncio.run(scene())


def test_steps_that_a_rollback_took_back_leave_the_record(tmp_path: Path) -> None:
    async def scene() -> None:
        pool = Pool()
        async with pool.server() as server, PoolClient(str(server.make_url("")), "t", "u", 1, "driver") as client:
            recorder = Recorder(client, run := RunFolder(tmp_path), QuietView(io.StringIO()))
            await recorder.refresh(5.0)
            pool.committed_step = 5
            await recorder.refresh(5.0)
            assert recorded_steps(run) == [1, 2, 3, 4, 5]

    asyncio.run(scene())


def test_a_last_look_at_a_pool_that_just_died_is_taken_again_at_its_next_life(tmp_path: Path) -> None:
    """Otherwise the newest steps and the last evaluation would be missing in the record for good."""

    async def scene() -> None:
        async with Pool().server() as server:
            url, port = str(server.make_url("")), server.port
        async with PoolClient(url, "t", "u", 1, "driver") as client:
            recorder = Recorder(client, run := RunFolder(tmp_path), QuietView(io.StringIO()))
            assert not await recorder.finish(pool_answers=False)
            app = Pool().server().app
            async with TestServer(app, port=port):
                assert await recorder.finish(pool_answers=True)
            assert recorded_steps(run) == list(range(1, STEPS + 1))

    asyncio.run(scene())
