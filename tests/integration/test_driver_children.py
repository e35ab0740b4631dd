"""Processes of a run, with small scripts in the place of services."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from laminar.cli.children import Child, Children, Launch, processes_of
from laminar.shell.process import become_subreaper

UID = f"job-{os.getpid()}"
PREAMBLE = "import os, signal, subprocess, sys, time\n"


def launch(folder: Path, body: str, *, slot: str = "rollout-0", life: int = 1, sockets: tuple[int, ...] = ()) -> Launch:
    variables = {"LAMINAR_JOB_UID": UID, "LAMINAR_SLOT": slot, "LAMINAR_LIFE": str(life)}
    command = (sys.executable, "-c", PREAMBLE + body)
    return Launch(slot, life, command, variables, sockets, folder / f"{slot}.log")


class Scene:
    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.children = Children(UID, time.monotonic, self.woken.set)

    async def next_exit(self) -> Child:
        async with asyncio.timeout(20):
            while True:
                await self.woken.wait()
                self.woken.clear()
                ended = await self.children.settle()
                if ended:
                    return ended[0]


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene()
        try:
            await scenario(scene)
        finally:
            await scene.children.end_all()
        assert processes_of(UID) == []

    asyncio.run(main())


def test_an_exit_is_seen_with_its_code_and_last_paragraph(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.children.start(launch(tmp_path, "print('busy'); print(); print('error: no such model'); sys.exit(2)"))
        child = await scene.next_exit()
        assert (child.code, child.last_words()) == (2, "no such model")

    run(scenario)


def test_the_words_of_an_earlier_life_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.children.start(launch(tmp_path, "print('first'); sys.exit(1)"))
        await scene.next_exit()
        scene.children.start(launch(tmp_path, "sys.exit(1)", life=2))
        assert (await scene.next_exit()).last_words() == ""
        assert "first" in (tmp_path / "rollout-0.log").read_text()

    run(scenario)


def test_what_a_dead_child_leaves_behind_is_gone_before_its_exit_is_reported(tmp_path: Path) -> None:
    become_subreaper()

    async def scenario(scene: Scene) -> None:
        body = "subprocess.Popen(['sleep', '300'], start_new_session=True); os.kill(os.getpid(), signal.SIGKILL)"
        scene.children.start(launch(tmp_path, body))
        child = await scene.next_exit()
        assert child.code == -9
        assert processes_of(UID) == []

    run(scenario)


def test_a_stopped_tree_is_killed_whole(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        body = "subprocess.Popen(['sleep', '300'], start_new_session=True); os.kill(os.getpid(), signal.SIGSTOP)"
        child = scene.children.start(launch(tmp_path, body))
        await until(lambda: len(processes_of(UID)) == 2)
        await scene.children.kill(child)
        assert (await scene.next_exit()).code == -9
        assert processes_of(UID) == []

    run(scenario)


def test_a_connection_made_between_two_lives_is_served_by_the_next_one(tmp_path: Path) -> None:
    serve = (
        "import socket; s = socket.socket(fileno=int(sys.argv[1])); c, _ = s.accept(); "
        "c.sendall(b'life ' + os.environ['LAMINAR_LIFE'].encode()); c.close()"
    )

    async def scenario(scene: Scene) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for life in (1, 2):
                with socket.create_connection(listener.getsockname(), timeout=20) as knocking:
                    prepared = launch(tmp_path, serve, life=life, sockets=(listener.fileno(),))
                    command = (*prepared.command, str(listener.fileno()))
                    scene.children.start(
                        Launch("rollout-0", life, command, prepared.variables, prepared.sockets, prepared.log)
                    )
                    assert (await scene.next_exit()).code == 0
                    assert knocking.recv(100) == f"life {life}".encode()

    run(scenario)


def test_a_child_that_is_asked_to_stop_leaves_by_itself(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
        child = scene.children.start(launch(tmp_path, body))
        await until(lambda: "up" in (tmp_path / "rollout-0.log").read_text())
        scene.children.stop(child)
        assert (await scene.next_exit()).code == 0

    run(scenario)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  other processes set no events of ours
            await asyncio.sleep(0.02)
