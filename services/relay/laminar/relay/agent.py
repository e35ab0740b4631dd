"""The relay's asyncio side: registration, heartbeats, completion reports and the HTTP API, beside the data threads."""

from __future__ import annotations

import asyncio
import logging
import os

from pydantic import BaseModel

from laminar.relay.metrics import PlaneCollector
from laminar.relay.plane import DataPlane, LowerEpoch, PlaneView
from laminar.relay.settings import RelaySettings
from laminar.shell.answers import first_of
from laminar.shell.calls import Refused, Superseded, Unknown, Unreachable
from laminar.shell.client import PoolClient
from laminar.shell.logs import fields
from laminar.shell.member import Member
from laminar.shell.service import Refusal, Service
from laminar.wire.messages import (
    Ack,
    ChainEpoch,
    Heartbeat,
    HeartbeatReply,
    HeldVersion,
    MemberState,
    Register,
    Role,
    VersionComplete,
)

log = logging.getLogger("laminar.relay")

BEAT = "heartbeat"
BEAT_LIMIT_S = 10.0
"""Beats are tried every second, each for at most 2 s; silence for 10 s means that the loop is stuck."""
EXTRA_BEAT_S = 1.0


class RelayState(BaseModel):
    """`GET /v1/relay`: for tests and people."""

    slot: str
    incarnation: int | None
    epoch: int
    index: int | None
    members: list[str]
    held: list[HeldVersion]
    lost_neighbours: list[str]
    received_bytes: int
    forwarded_bytes: int
    aborted_versions: int
    superseded_versions: int
    slots_reused_under_reader: int
    bypasses: int
    resumed_versions: int
    downstream: str | None
    refused: dict[str, int]
    declined: dict[str, int]


class RelayAgent:
    """Life: join -> (heartbeats, reports) -> superseded -> join again; the data plane goes on meanwhile.

    `changed` is set (on the loop) whenever the data plane has news.
    """

    def __init__(
        self,
        service: Service,
        settings: RelaySettings,
        plane: DataPlane,
        client: PoolClient,
        data_address: str,
        changed: asyncio.Event,
    ) -> None:
        self._service = service
        self._settings = settings
        self._plane = plane
        self._client = client
        self._data_address = data_address
        self._changed = changed
        self._member: Member | None = None
        service.registry.register(PlaneCollector(plane.view))
        service.router.post("/epoch")(self.take_epoch)
        service.router.get("/relay")(self.state)

    async def take_epoch(self, epoch: ChainEpoch) -> Ack:
        """The driver's list. Idempotent; 409 with the epoch in force for a lower one."""
        try:
            await asyncio.to_thread(self._plane.apply_epoch, epoch)
        except LowerEpoch as error:
            raise Refusal(409, "epoch", str(error), current=error.current) from error
        return Ack()

    async def state(self) -> RelayState:
        view = self._plane.view()
        member = self._member
        return RelayState(
            slot=self._service.common.slot,
            incarnation=member.incarnation if member is not None and member.joined else None,
            epoch=view.epoch,
            index=view.index,
            members=list(view.members),
            held=_held(view),
            lost_neighbours=list(view.lost_neighbours),
            received_bytes=view.counters.received_bytes,
            forwarded_bytes=view.counters.forwarded_bytes,
            aborted_versions=view.counters.aborted_versions,
            superseded_versions=view.counters.superseded_versions,
            slots_reused_under_reader=view.counters.slots_reused_under_reader,
            bypasses=view.counters.bypasses,
            resumed_versions=view.counters.resumed_versions,
            downstream=view.downstream,
            refused=view.counters.refused,
            declined=view.counters.declined,
        )

    async def run(self) -> None:
        """Stays a member until the service stops."""
        common = self._service.common
        register = Register(
            slot=common.slot, role=Role.RELAY, index=self._settings.index, life=common.life, nonce="",
            machine=common.machine, pid=os.getpid(), http_address=self._service.address,
            data_address=self._data_address,
        )  # fmt: skip
        member = Member(self._client, register)
        while not self._service.stopping.is_set():
            if await first_of(member.join(), self._service.stopping.wait()) is None:
                return
            self._member = member
            if self._client.generation is not None:
                self._service.generation = self._client.generation
            log.info("joined", extra=fields(incarnation=member.incarnation))
            self._service.watch(BEAT, BEAT_LIMIT_S)
            self._service.set_ready(True)
            try:
                async with asyncio.TaskGroup() as tasks:
                    beat = member.heartbeat_loop(
                        lambda: self._heartbeat(member),
                        until=self._service.stopping,
                        take_reply=lambda reply: self._plane.retain(reply.retain),
                    )
                    tasks.create_task(beat)
                    tasks.create_task(self._tell(member))
            except* (Superseded, Unknown) as errors:
                log.warning("the pool wants a new incarnation", extra=fields(why=errors.exceptions[0]))
            self._service.unwatch(BEAT)
            self._service.set_ready(False, "registering")

    def _heartbeat(self, member: Member) -> Heartbeat:
        self._service.progress(BEAT)
        view = self._plane.view()
        held = _held(view)
        return Heartbeat(
            slot=self._service.common.slot,
            incarnation=member.incarnation,
            state=MemberState.IDLE if view.index is None else MemberState.RUNNING,
            version=held[-1].version if held else None,
            epoch=view.epoch if view.epoch >= 0 else None,
            held=held,
            lost_neighbours=list(view.lost_neighbours),
        )

    async def _tell(self, member: Member) -> None:
        """Reports each complete version once per incarnation, and lost neighbours and epochs as soon as they change."""
        told: set[tuple[int, str]] = set()
        told_chain: tuple[int, tuple[str, ...]] | None = None
        self._changed.set()
        while await first_of(self._changed.wait(), self._service.stopping.wait()):
            self._changed.clear()
            view = self._plane.view()
            for held in view.held:
                if (held.version, held.digest) not in told:
                    await self._report(member, view.epoch, held.version, held.digest)
                    told.add((held.version, held.digest))
            chain = (view.epoch, view.lost_neighbours)
            if chain != told_chain and told_chain is not None:
                await self._beat_now(member)
            told_chain = chain

    async def _report(self, member: Member, epoch: int, version: int, digest: str) -> None:
        complete = VersionComplete(
            slot=self._service.common.slot, incarnation=member.incarnation, epoch=epoch, version=version, digest=digest
        )
        try:
            await first_of(self._client.post_json("/v1/relay/complete", complete, Ack), self._service.stopping.wait())
        except Superseded:
            raise
        except Refused as error:
            # Not ours to judge: the pool burned this version, or knows it under another digest.
            log.error("the pool refuses a version", extra=fields(version=version, why=error))

    async def _beat_now(self, member: Member) -> None:
        try:
            await self._client.post_json(
                "/v1/heartbeat", self._heartbeat(member), HeartbeatReply, EXTRA_BEAT_S, deadline_s=EXTRA_BEAT_S
            )
        except Unreachable:
            return  # the regular beat says it again


def _held(view: PlaneView) -> list[HeldVersion]:
    return [HeldVersion(version=item.version, digest=item.digest) for item in view.held]
