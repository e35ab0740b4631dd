"""The life of an engine's process, whatever engine it is: told what to serve, ready or refused, obeying, gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from laminar.rollout.channel import BlockingChannel, ChannelClosed
from laminar.rollout.engine_messages import Begin, EngineCommand, EngineReady, EngineRefused
from laminar.rollout.model_folder import ModelFolderError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    kv_capacity_tokens: int
    max_length: int
    run: Callable[[], None]
    """Obeys until the agent closes the channel (ChannelClosed)."""


Build = Callable[[Begin, BlockingChannel[EngineCommand]], Built]
"""Raises ModelFolderError for what it cannot serve."""


def serve(descriptor: int, started_s: float, build: Build) -> int:
    """Builds what Begin names and obeys; returns the exit code. A model that cannot be served is exit code 2."""
    commands: msgspec.msgpack.Decoder[EngineCommand] = msgspec.msgpack.Decoder(EngineCommand)
    channel = BlockingChannel[EngineCommand].inherited(descriptor, commands)
    try:
        begin = channel.receive()
        assert isinstance(begin, Begin), begin
        try:
            built = build(begin, channel)
        except ModelFolderError as error:
            channel.send(EngineRefused(detail=str(error)))
            return 2
        start_s = time.monotonic() - started_s
        channel.send(
            EngineReady(kv_capacity_tokens=built.kv_capacity_tokens, max_length=built.max_length, start_s=start_s)
        )
        built.run()
    except ChannelClosed:
        log.info("the agent is gone")
    return 0
