"""A member's tie to the pool: registration and heartbeats."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from laminar.shell.calls import OldGeneration, Unreachable
from laminar.shell.client import PoolClient
from laminar.wire.messages import Heartbeat, HeartbeatReply, Register, Registered, Role

PERIOD_S = 1.0
"""The pool suspects a member after 3 s of silence: two beats may get lost."""
BEAT_DEADLINE_S = 2.0
"""A beat older than this is given up for a fresh one."""


class Member:
    """One member of a job. Life: join -> heartbeats -> Superseded -> (work stopped by the owner) -> join again.

    Invariant: `incarnation` is the one of the last `join`; it only grows.
    """

    def __init__(self, client: PoolClient, register: Register) -> None:
        self._client = client
        self._register = register
        self._incarnation: int | None = None
        self.newest: int | None = None
        """Newest visible version as the last heartbeat's answer said."""

    @property
    def incarnation(self) -> int:
        """Only after `join`."""
        assert self._incarnation is not None, "join first"
        return self._incarnation

    @property
    def joined(self) -> bool:
        return self._incarnation is not None

    async def join(self, *, deadline_s: float | None = None) -> int:
        """Registers as a new incarnation and returns it.

        Draws a fresh nonce, then repeats the call with that same nonce until the pool answers, so a lost answer
        never makes two incarnations. `Register.nonce` of the constructor is not used. A newer generation of the pool
        is followed, except by the trainer: an attempt belongs to one. Raises Refused; Conflict for a lower attempt;
        Unreachable after `deadline_s`.
        """
        register = self._register.model_copy(update={"nonce": secrets.token_hex(16)})
        while True:
            try:
                reply = await self._client.post_json("/v1/register", register, Registered, deadline_s=deadline_s)
            except OldGeneration as error:
                if register.role is Role.TRAINER or error.current is None:
                    raise
                self._client.generation = error.current
            else:
                self._incarnation = reply.incarnation
                self._client.generation = reply.generation
                return reply.incarnation

    async def heartbeat_loop(
        self,
        make_heartbeat: Callable[[], Heartbeat],
        *,
        until: asyncio.Event | None = None,
        take_reply: Callable[[HeartbeatReply], None] | None = None,
    ) -> None:
        """Sends what `make_heartbeat` returns once a second, until `until` is set (None: until cancelled).

        An unreachable pool is no error: the next beat is a fresh one. Raises Superseded (410) and every other
        Refused to its owner; Unknown (404) says that the pool does not know this member: join again.
        """
        loop = asyncio.get_running_loop()
        until = until or asyncio.Event()
        next_s = loop.time()
        while not until.is_set():
            try:
                reply = await self._client.post_json(
                    "/v1/heartbeat", make_heartbeat(), HeartbeatReply, BEAT_DEADLINE_S, deadline_s=BEAT_DEADLINE_S
                )
                self.newest = reply.newest
                if take_reply is not None:
                    take_reply(reply)
            except Unreachable:
                pass  # the pool restarts: what is said next second counts, not this beat
            next_s = max(next_s + PERIOD_S, loop.time())
            try:
                async with asyncio.timeout_at(next_s):
                    await until.wait()
            except TimeoutError:
                continue
