"""The `emulated` engine's loop: no model, random tokens, and the pace of GPUs that are not there.

One thread: take commands, jump to the next event that is due, tell what came of it, wait for the next one. Nothing is
computed a token or a step (`laminar.core.decode_batch`), so thousands of responses cost a few percent of a core.
What is handled late is still dated when it was due: lateness delays news, it never slows the emulated machine.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

import msgspec
from tokenizers import Tokenizer

from laminar.rollout import engine_process
from laminar.rollout.channel import BlockingChannel
from laminar.rollout.emulated_decoder import EmulatedDecoder
from laminar.rollout.emulated_tokens import TokenTape
from laminar.rollout.engine_messages import (
    Abort,
    Add,
    Begin,
    EmulatedMachine,
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
from laminar.rollout.loading import WeightsSource, failed, load_version, without_weights
from laminar.rollout.model_folder import ModelFolderError, eos_ids, tokenizer_path
from laminar.wire.manifest import TensorEntry

STREAM_INTERVAL_S = 0.25
"""Real seconds: what an engine's death costs at most. The agent passes tokens on once a second."""
IDLE_WAIT_S = 60.0


class Engine:
    """Obeys one agent. Invariant: nothing is generated without a live version, or while it is paused."""

    def __init__(self, channel: BlockingChannel[EngineCommand], decoder: EmulatedDecoder, load_s: float) -> None:
        """`load_s`: real seconds that a load takes on the emulated machine."""
        self._channel, self._decoder, self._load_s = channel, decoder, load_s
        self._live: int | None = None
        self._loads: list[tuple[float, int, LoadResult]] = []
        """(when the emulated copy is through, its number, the result): a heap."""
        self._num_loads = 0
        self._told_s = time.monotonic()

    def run(self) -> None:
        """Until the agent closes the channel (ChannelClosed)."""
        while True:
            command = self._channel.receive_ready(self._wait_s())
            while command is not None:
                self._obey(command)
                command = self._channel.receive_ready()
            self._end_loads()
            self._decoder.advance()
            self._tell(whole=False)

    def _wait_s(self) -> float:
        """Until the next thing is due."""
        now_s = time.monotonic()
        due = [IDLE_WAIT_S]
        if self._loads:
            due.append(self._loads[0][0] - now_s)
        if self._decoder.busy and not self._decoder.clock.paused:
            due.append(self._told_s + STREAM_INTERVAL_S - now_s)
            event_s = self._decoder.next_event_s()
            if event_s is not None:
                due.append(event_s)
        return max(0.0, min(due))

    def _obey(self, command: EngineCommand) -> None:
        match command:
            case Load():
                self._load(command)
            case Add(requests=requests):
                self._add(requests)
            case Abort(keys=keys):
                self._decoder.abort(keys)
                self._tell(whole=True)
            case Pause():
                self._decoder.advance()
                self._decoder.clock.pause()
                self._tell(whole=True)
            case Resume():
                self._decoder.clock.resume()
            case Begin():
                raise AssertionError("Begin comes once")
            case _:
                assert_never(command)

    def _add(self, requests: list[EngineRequest]) -> None:
        if self._live is not None:
            self._decoder.add(requests)
            return
        self._channel.send(Progress(ended=without_weights(requests), load=self._decoder.take_load()))

    def _tell(self, *, whole: bool) -> None:
        """Sends what ended at once; the rest every `STREAM_INTERVAL_S`, or now if `whole`."""
        blocks, ended = self._decoder.take_ended()
        now_s = time.monotonic()
        due = self._decoder.busy and now_s - self._told_s >= STREAM_INTERVAL_S
        if whole or due:
            blocks += self._decoder.take_pending()
        if whole or due or ended:
            self._told_s = now_s
            paused = self._decoder.clock.paused
            self._channel.send(Progress(blocks=blocks, ended=ended, load=self._decoder.take_load(), paused=paused))

    def _load(self, command: Load) -> None:
        if self._decoder.busy:
            self._channel.send(failed(command, LoadStatus.REFUSED, "requests are running"))
            return
        begin_s = time.monotonic()
        result = load_version(command, _look_through)
        if result.status is LoadStatus.LOADED:
            self._live = None
            self._num_loads += 1
            due_s = max(time.monotonic(), begin_s + self._load_s)
            result = msgspec.structs.replace(result, load_s=due_s - begin_s)
            heapq.heappush(self._loads, (due_s, self._num_loads, result))
        else:
            self._channel.send(result)

    def _end_loads(self) -> None:
        while self._loads and self._loads[0][0] <= time.monotonic():
            _, _, result = heapq.heappop(self._loads)
            self._live = result.version
            self._channel.send(result)


def _look_through(entries: Sequence[TensorEntry], source: WeightsSource) -> int:
    """Reads nothing: a version is known by its manifest, whose digest has been compared."""
    source.check()
    return sum(entry.nbytes for entry in entries)


def build_decoder(begin: Begin, machine: EmulatedMachine) -> EmulatedDecoder:
    """Raises ModelFolderError: the model does not fit the emulated GPUs, or its folder lacks something."""
    folder = Path(begin.model_folder)
    capacity = machine.serving.kv_capacity_tokens // machine.token_grain
    if capacity < 2:
        needed, there = machine.serving.model.weights_bytes, machine.serving.tensor_parallel
        raise ModelFolderError(
            f"the emulated model ({needed / 1e9:.0f} GB of weights) does not fit {there} emulated GPU(s) with room for "
            f"a KV cache; raise rollout.gpusPerReplica"
        )
    ends = eos_ids(folder)
    vocabulary = Tokenizer.from_file(str(tokenizer_path(folder))).get_vocab(with_added_tokens=True).values()
    eos_id = min(ends)
    tape = TokenTape(set(vocabulary) - ends, eos_id, min(begin.max_length, capacity))
    return EmulatedDecoder(machine, begin.max_running, begin.max_length, tape, eos_id)


def build(begin: Begin, channel: BlockingChannel[EngineCommand]) -> Built:
    """The engine of one emulated machine. Raises ModelFolderError."""
    machine = begin.emulated
    assert machine is not None, "an emulated engine needs to know its machine"
    decoder = build_decoder(begin, machine)
    engine = Engine(channel, decoder, machine.serving.load_s / machine.time_scale)
    return Built(decoder.take_load().kv_capacity_tokens, decoder.max_length, engine.run)


def serve(descriptor: int, started_s: float) -> int:
    return engine_process.serve(descriptor, started_s, build)
