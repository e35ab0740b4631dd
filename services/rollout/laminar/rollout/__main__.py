"""`python -m laminar.rollout`: the agent of one rollout replica."""

from __future__ import annotations

import sys
from functools import partial

from laminar.rollout.agent import Agent
from laminar.rollout.engine import ENGINES, EngineProcess
from laminar.rollout.model_folder import ModelFolderError
from laminar.rollout.settings import RolloutSettings
from laminar.shell.client import PoolClient
from laminar.shell.service import Service, start
from laminar.shell.settings import Common, SettingsError
from laminar.wire.sources import NotResolved

LEAVE_S = 10.0
"""For the last flush; above its own limits."""


async def main(common: Common) -> int:
    service = Service(common, title="rollout", version="1")
    async with PoolClient(common.pool_url, common.token, common.job_uid, common.generation, common.slot) as client:
        try:
            settings = RolloutSettings.from_env(common)
            agent = Agent(settings, service, client, partial(EngineProcess.spawn, ENGINES[settings.engine]))
        except (ModelFolderError, NotResolved) as error:
            raise SettingsError(str(error)) from error
        code = await service.run(agent.run(), grace_s=LEAVE_S)
    if agent.last_words:
        # After every log line: the end of the log is the reason.
        words = f"error: The {settings.engine} engine cannot serve the model: {agent.last_words}"
        print(words, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    start(main)
