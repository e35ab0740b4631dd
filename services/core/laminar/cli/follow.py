"""What the driver hears: the pool's stream of members, and health checks of who may be dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp

from laminar.core.snapshot import PoolStage
from laminar.shell.calls import Unreachable
from laminar.shell.client import PoolClient
from laminar.wire.messages import PoolPhase, PoolView

STALE_AFTER_S = 2.0
"""The stream repeats itself every 0.5 s: after four missed lines the pool is not reachable."""
REOPEN_AFTER_S = 0.1
"""Between two connections to a pool that ends its streams, as it does while it stops."""
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 2.0

_STAGES = {
    PoolPhase.EVALUATING_LAST: PoolStage.FINISHING,
    PoolPhase.COMPLETE: PoolStage.COMPLETE,
    PoolPhase.STOPPED: PoolStage.STOPPED,
    PoolPhase.FAILED: PoolStage.FAILED,
}


def stage_of(phase: PoolPhase) -> PoolStage:
    return _STAGES.get(phase, PoolStage.BUSY)


class PoolFollower:
    """Keeps the newest view of the pool's stream. `woken` is called when one has come, or the stream broke off."""

    def __init__(self, client: PoolClient, clock: Callable[[], float], woken: Callable[[], None]) -> None:
        self._client = client
        self._clock = clock
        self._woken = woken
        self._heard_s: float | None = None
        self.view: PoolView | None = None
        """The last one heard, however old."""

    @property
    def reachable(self) -> bool:
        return self._heard_s is not None and self._clock() - self._heard_s < STALE_AFTER_S

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async for view in self._client.stream_json_lines("/v1/members/stream", PoolView, idle_s=STALE_AFTER_S):
                    self.view = view
                    self._heard_s = self._clock()
                    self._woken()
            except Unreachable:
                pass  # as after an orderly end: it is opened again below
            self._heard_s = None
            self._woken()
            await asyncio.sleep(REOPEN_AFTER_S)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A life whose health is asked for."""

    slot: str
    life: int
    url: str


class Prober:
    """Asks /healthz of those who are suspected; anything but 200 within 2 s is no answer."""

    def __init__(self, suspects: Callable[[], Iterable[Suspect]]) -> None:
        self._suspects = suspects
        self._answers: dict[tuple[str, int], bool] = {}

    def take(self, slot: str, life: int) -> bool | None:
        """The newest answer since the last call; None: none."""
        return self._answers.pop((slot, life), None)

    async def run(self) -> None:
        """Until cancelled."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                suspects = list(self._suspects())
                answers = await asyncio.gather(*(self._ask(session, suspect) for suspect in suspects))
                for suspect, answer in zip(suspects, answers, strict=True):
                    self._answers[suspect.slot, suspect.life] = answer
                await asyncio.sleep(PROBE_EVERY_S)

    async def _ask(self, session: aiohttp.ClientSession, suspect: Suspect) -> bool:
        try:
            async with session.get(f"{suspect.url}/healthz") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False
