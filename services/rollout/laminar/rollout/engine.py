"""The agent's side of an engine: a small interface, and the child process that implements it.

    spawned -> ready -> (load -> add ... -> idle)* -> killed or exited

The agent never shares a process with torch, so it answers while an engine is busy; and it learns of an engine's end
from the channel, at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec

from laminar.rollout.channel import ChannelClosed, SpawnedChild, read_frame, spawn_child
from laminar.rollout.engine_messages import (
    Abort,
    Add,
    Begin,
    EngineCommand,
    EngineEvent,
    EngineReady,
    EngineRefused,
    EngineRequest,
    Load,
    Pause,
    RequestKey,
    Resume,
)
from laminar.shell.process import child_environment, kill_tree
from laminar.wire.codec import frame
from laminar.wire.spec import EngineType

TORCH_ENGINE = "laminar.rollout.torch_engine"
ENGINES = {EngineType.TORCH: TORCH_ENGINE, EngineType.EMULATED: "laminar.rollout.emulated_engine"}
"""Modules; each runs in a process of its own."""
_DECODER = msgspec.msgpack.Decoder(EngineEvent)


class EngineExited(RuntimeError):
    """The engine's process has ended; everything it held is lost but what it had sent."""


class UnservableModel(ValueError):
    """The engine cannot serve this model folder; another start would not help."""


class Engine(Protocol):
    """What an agent needs of an engine. Commands are queued without waiting; their results are events, in order."""

    @property
    def pid(self) -> int: ...

    async def start(self, begin: Begin) -> EngineReady:
        """Waits until the model is built. Raises UnservableModel or EngineExited."""
        ...

    def load(self, command: Load) -> None:
        """Answered by a LoadResult."""
        ...

    def add(self, requests: Sequence[EngineRequest]) -> None: ...
    def abort(self, keys: Sequence[RequestKey]) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...

    async def next_event(self) -> EngineEvent:
        """Raises EngineExited as soon as the engine is gone."""
        ...

    async def kill(self) -> None:
        """Ends it and all its descendants, stopped ones too. May be called twice."""
        ...


class EngineProcess:
    """An engine in a child process, reached over a socket pair."""

    def __init__(self, child: SpawnedChild) -> None:
        self._child = child

    @classmethod
    async def spawn(cls, module: str = TORCH_ENGINE) -> EngineProcess:
        """Starts `python -m module FD`; it dies with this process."""
        # One thread for each numerical library too: they read this before torch is imported.
        environment = child_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        # Without .pyc files each start imports torch three times slower.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return cls(await spawn_child([sys.executable, "-m", module], environment))

    @property
    def pid(self) -> int:
        return self._child.process.pid

    async def start(self, begin: Begin) -> EngineReady:
        self._send(begin)
        match await self.next_event():
            case EngineReady() as ready:
                return ready
            case EngineRefused(detail=detail):
                await self.kill()
                raise UnservableModel(detail)
            case event:
                raise AssertionError(f"an engine that starts says {event}")

    def load(self, command: Load) -> None:
        self._send(command)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        if requests:
            self._send(Add(requests=list(requests)))

    def abort(self, keys: Sequence[RequestKey]) -> None:
        if keys:
            self._send(Abort(keys=list(keys)))

    def pause(self) -> None:
        self._send(Pause())

    def resume(self) -> None:
        self._send(Resume())

    async def next_event(self) -> EngineEvent:
        try:
            return _DECODER.decode(await read_frame(self._child.reader))
        except ChannelClosed:
            code = await self._ended()
            raise EngineExited(f"the engine (pid {self.pid}) ended with {_meaning(code)}") from None

    async def kill(self) -> None:
        await self._ended()

    async def _ended(self) -> int:
        """The exit code, once it and all its descendants are gone."""
        self._child.writer.close()
        if self._child.process.returncode is None:
            await asyncio.to_thread(kill_tree, self.pid)
        return await self._child.process.wait()

    def _send(self, command: EngineCommand) -> None:
        # Bounded by what a lease holds: an engine that does not read is killed with its incarnation.
        self._child.writer.write(frame(command))


def _meaning(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
