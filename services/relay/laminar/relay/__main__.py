"""`python -m laminar.relay`: one relay of one job."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from laminar.relay.agent import RelayAgent
from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.settings import RelaySettings
from laminar.shell.client import PoolClient
from laminar.shell.service import Service, start
from laminar.shell.settings import Common
from laminar.shell.sockets import listening_socket
from laminar.shell.transport import listen_tcp, listen_unix


async def main(common: Common) -> int:
    """Runs until SIGTERM. Returns the exit code."""
    settings = RelaySettings.from_env(common)
    service = Service(common, title="relay", version=version("laminar-rl"))
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def notice() -> None:
        if plane.failure is not None:
            service.fail(plane.failure)
        changed.set()

    def notice_from_thread() -> None:
        loop.call_soon_threadsafe(notice)

    data_listener = listen_tcp(listening_socket(settings.data_listen))
    plane = DataPlane(
        common.slot,
        Credentials(common.token, common.job_uid),
        settings.sizes,
        data_listener,
        listen_unix(str(settings.handoff)),
        notice_from_thread,
    )
    plane.start()
    try:
        async with PoolClient(common.pool_url, common.token, common.job_uid, common.generation, common.slot) as client:
            agent = RelayAgent(service, settings, plane, client, data_listener.address, changed)
            return await service.run(agent.run())
    finally:
        await asyncio.to_thread(plane.close)


if __name__ == "__main__":
    start(main)
