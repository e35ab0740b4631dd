"""The `torch` engine's loop: small models on the CPU.

One thread: take commands, decode one step, tell what came of it. Idle, it waits in a read; the agent's death
ends it at once (the kernel's signal) or at the end of the channel.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import assert_never

import torch

from laminar.rollout import engine_process
from laminar.rollout.channel import BlockingChannel
from laminar.rollout.decoder import Decoder
from laminar.rollout.engine_messages import (
    PROGRESS_INTERVAL_S,
    Abort,
    Add,
    Begin,
    EngineCommand,
    EngineRequest,
    Load,
    LoadResult,
    LoadStatus,
    Pause,
    Progress,
    Resume,
)
from laminar.rollout.engine_process import Built
from laminar.rollout.loading import failed, load_version, without_weights
from laminar.rollout.model import build_model
from laminar.rollout.weights import WeightLoader


class Engine:
    """Obeys one agent. Invariant: `_live` names the version whose weights are whole, or is None; without one, and
    while the weights are replaced, nothing is generated."""

    def __init__(self, channel: BlockingChannel[EngineCommand], decoder: Decoder, loader: WeightLoader) -> None:
        self._channel, self._decoder, self._loader = channel, decoder, loader
        self._live: int | None = None
        self._paused = False
        self._told_s = 0.0

    def run(self) -> None:
        """Until the agent closes the channel (ChannelClosed)."""
        while True:
            busy = self._decoder.busy and not self._paused
            command = self._channel.receive_ready() if busy else self._channel.receive()
            while command is not None:
                self._obey(command)
                command = self._channel.receive_ready()
            if self._decoder.busy and not self._paused:
                self._decoder.step()
            self._tell(whole=False)

    def _obey(self, command: EngineCommand) -> None:
        match command:
            case Load():
                self._channel.send(self._load(command))
            case Add(requests=requests):
                self._add(requests)
            case Abort(keys=keys):
                self._decoder.abort(keys)
                self._tell(whole=True)
            case Pause():
                self._paused = True
                self._tell(whole=True)
            case Resume():
                self._paused = False
            case Begin():
                raise AssertionError("Begin comes once")
            case _:
                assert_never(command)

    def _add(self, requests: list[EngineRequest]) -> None:
        if self._live is not None:
            for request in requests:
                self._decoder.add(request)
            return
        self._channel.send(Progress(ended=without_weights(requests), load=self._decoder.load))

    def _tell(self, *, whole: bool) -> None:
        """Sends what ended at once; the rest every `PROGRESS_INTERVAL_S`, or now if `whole`."""
        blocks, ended = self._decoder.take_ended()
        now_s = time.monotonic()
        due = self._decoder.busy and now_s - self._told_s >= PROGRESS_INTERVAL_S
        if whole or due:
            blocks += self._decoder.take_pending()
        if whole or due or ended:
            self._told_s = now_s
            self._channel.send(Progress(blocks=blocks, ended=ended, load=self._decoder.load, paused=self._paused))

    def _load(self, command: Load) -> LoadResult:
        if self._decoder.busy:
            return failed(command, LoadStatus.REFUSED, "requests are running")
        result = load_version(command, self._loader.load)
        if result.status is LoadStatus.LOADED:
            self._live = command.version
        elif result.status is LoadStatus.STALE:
            self._live = None
        return result


def build(begin: Begin, channel: BlockingChannel[EngineCommand]) -> Built:
    """The engine of one model folder. Raises ModelFolderError."""
    served = build_model(Path(begin.model_folder), slots=begin.max_running, max_length=begin.max_length)
    decoder = Decoder(served.model, served.cache, served.eos_ids, served.vocabulary)
    engine = Engine(channel, decoder, WeightLoader(served.model))
    return Built(decoder.load.kv_capacity_tokens, served.cache.shape.max_length, engine.run)


def serve(descriptor: int, started_s: float) -> int:
    # Two threads are far slower than one for models that fit this engine, and the machine has other processes.
    torch.set_num_threads(1)
    return engine_process.serve(descriptor, started_s, build)
