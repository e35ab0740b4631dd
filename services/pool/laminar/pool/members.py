"""Who belongs to the job, which life of each counts, and who is suspect.

    register(new nonce) -> incarnation + 1 -> alive <--heard again--/--closed stream, or 3 s of silence--> suspect
                                               \\--fence, or a newer incarnation--> superseded (410 for ever)

Silence is judged by this process's own monotonic clock: a restarted pool begins with a full silent period for
everybody, and time in which its own loop did not run counts for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from laminar.core.samples import Holder
from laminar.pool.restore import StoredMember
from laminar.wire.dataplane import Command
from laminar.wire.messages import EngineLoad, Heartbeat, MemberState, MemberView, Register, Role

SILENT_S = 3.0
"""Three heartbeats: one may be lost and one late."""
TICK_S = 0.25
LAG_S = 0.1
"""A tick later than this means that this process did not run: everybody's silence is extended by it."""
STREAM_LAG_S = 2.0
"""Replicas give a command stream up that brings nothing for 5 s (pings come every second): if this process stood
still for longer than this, a stream that ends says nothing about its replica."""
MAX_COMMANDS = 1024
"""Undelivered commands of one replica; more, and its stream is closed: it does not read."""


class Unregistered(Exception):
    """No such member; it should register."""


class SupersededIncarnation(Exception):
    """A newer life of the member counts (`current`), or this one is fenced."""

    def __init__(self, slot: str, incarnation: int, current: int) -> None:
        super().__init__(f"incarnation {incarnation} of {slot} is superseded; {current} is in force")
        self.current = current


class OlderLife(ValueError):
    """A process of an earlier life of the slot tries to register after a later one did."""


class CommandStream:
    """Commands that wait for one open connection; `closed` once another took its place or its member is superseded."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: deque[Command] = deque()
        self._news = asyncio.Event()

    def send(self, command: Command) -> None:
        self._waiting.append(command)
        if len(self._waiting) > MAX_COMMANDS:
            self.closed = True
        self._news.set()

    def close(self) -> None:
        """What waits is still delivered."""
        self.closed = True
        self._news.set()

    async def take(self, wait_s: float) -> list[Command]:
        """What waits; an empty list after `wait_s`."""
        if not self._waiting and not self.closed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


@dataclass(slots=True)
class Member:
    """One slot's life in force. Times are monotonic seconds of the pool."""

    register: Register
    incarnation: int
    heard_s: float
    fenced: bool = False
    suspect: bool = False
    state: MemberState = MemberState.STARTING
    version: int | None = None
    epoch: int | None = None
    load: EngineLoad | None = None
    lost_neighbours: list[str] = field(default_factory=list[str])
    note: str = ""
    stream: CommandStream | None = None
    max_running: int | None = None
    progress_s: float = 0.0
    """Last token, or last moment without running samples."""
    stalled: bool = False
    since_s: float = 0.0
    """When this process learned of this life."""
    held: frozenset[int] = frozenset()
    """Relays: complete versions, by the last heartbeat."""
    told_held: bool = False

    @property
    def slot(self) -> str:
        return self.register.slot

    @property
    def holder(self) -> Holder:
        return Holder(self.register.slot, self.incarnation)

    @property
    def leaving(self) -> bool:
        """It has said so itself: it drains, or is gone."""
        return self.state in (MemberState.DRAINING, MemberState.STOPPED)

    @property
    def gone(self) -> bool:
        """Cannot be counted on now."""
        return self.suspect or self.fenced or self.state is MemberState.STOPPED

    @property
    def usable(self) -> bool:
        """May be given work by a command."""
        return self.stream is not None and not (self.gone or self.leaving or self.stalled)

    def view(self, now_s: float) -> MemberView:
        return MemberView(
            slot=self.slot, role=self.register.role, index=self.register.index, life=self.register.life,
            incarnation=self.incarnation, machine=self.register.machine, pid=self.register.pid,
            http_address=self.register.http_address, data_address=self.register.data_address, state=self.state,
            connected=self.stream is not None, silent_s=round(max(0.0, now_s - self.heard_s), 3),
            suspect=self.suspect, fenced=self.fenced, version=self.version, epoch=self.epoch, stalled=self.stalled,
            lost_neighbours=self.lost_neighbours,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joined:
    """`superseded`: the life that no longer counts, if there was one. `is_new`: not a repeated call."""

    member: Member
    is_new: bool
    superseded: Member | None


class Members:
    """Invariant: incarnations of a slot only grow; at most one life of a slot counts."""

    def __init__(self, stored: Iterable[StoredMember], now_s: float, first_incarnation: int = 1) -> None:
        """`first_incarnation`: the lowest one of this generation of the pool."""
        self._first_incarnation = first_incarnation
        self._members: dict[str, Member] = {
            row.register.slot: Member(
                row.register, row.incarnation, now_s, fenced=row.fenced, progress_s=now_s, since_s=now_s
            )
            for row in stored
        }
        self._ticked_s = now_s
        self._stood_still_s = float("-inf")

    def all(self) -> list[Member]:
        return [member for _, member in sorted(self._members.items())]

    def of_role(self, role: Role) -> list[Member]:
        return [member for member in self.all() if member.register.role is role]

    def get(self, slot: str) -> Member | None:
        return self._members.get(slot)

    def deliver(self, slot: str, command: Command) -> None:
        """Onto the member's command connection, if it has one; a new one brings what matters again."""
        member = self._members.get(slot)
        if member is not None and member.stream is not None:
            member.stream.send(command)

    def join(self, register: Register, now_s: float) -> Joined:
        """The same nonce gets the same incarnation. Raises OlderLife."""
        known = self._members.get(register.slot)
        if known is not None and known.register.nonce == register.nonce:
            return Joined(known, is_new=False, superseded=None)
        if known is not None and register.life < known.register.life:
            raise OlderLife(f"life {register.life} of {register.slot} comes after life {known.register.life}")
        incarnation = max(self._first_incarnation, known.incarnation + 1 if known else 1)
        if known is not None and known.stream is not None:
            known.stream.close()
        member = Member(register, incarnation, now_s, progress_s=now_s, since_s=now_s)
        self._members[register.slot] = member
        return Joined(member, is_new=True, superseded=known)

    def heard(self, slot: str, incarnation: int, now_s: float) -> Member:
        """The member that this message is of; it is not suspect any more.

        Raises Unregistered, or SupersededIncarnation.
        """
        member = self._members.get(slot)
        if member is None:
            raise Unregistered(f"{slot} is not registered")
        if member.incarnation != incarnation or member.fenced:
            raise SupersededIncarnation(slot, incarnation, member.incarnation)
        member.heard_s = now_s
        member.suspect = False
        return member

    def beat(self, beat: Heartbeat, now_s: float) -> tuple[Member, bool]:
        """Takes in a heartbeat; also says whether anything that others should hear of changed. Raises as `heard`."""
        known = self._members.get(beat.slot)
        before = (known.suspect, known.state, known.version, known.epoch, known.lost_neighbours) if known else None
        member = self.heard(beat.slot, beat.incarnation, now_s)
        member.state, member.version, member.epoch, member.load = beat.state, beat.version, beat.epoch, beat.load
        member.lost_neighbours, member.note = beat.lost_neighbours, beat.note
        member.held, member.told_held = frozenset(held.version for held in beat.held), True
        after = (member.suspect, member.state, member.version, member.epoch, member.lost_neighbours)
        return member, before != after

    def fence(self, slot: str, incarnation: int) -> Member | None:
        """Nothing of this incarnation counts any more. None if that was so already."""
        member = self._members.get(slot)
        if member is None or member.incarnation != incarnation or member.fenced:
            return None
        member.fenced = True
        return member

    def open_stream(self, slot: str, incarnation: int, now_s: float) -> CommandStream:
        """A new command connection replaces the earlier one. Raises as `heard`."""
        member = self.heard(slot, incarnation, now_s)
        if member.stream is not None:
            member.stream.close()
        member.stream = CommandStream()
        return member.stream

    def close_stream(self, slot: str, stream: CommandStream, now_s: float) -> Member | None:
        """The connection is gone: its member, now suspect; None if the stream did not count any more, or if it may
        have ended because of us (then silence judges, as it does everybody)."""
        member = self._members.get(slot)
        if member is None or member.stream is not stream:
            return None
        member.stream = None
        if now_s - self._ticked_s > STREAM_LAG_S or now_s - self._stood_still_s < SILENT_S:
            return None
        if member.state is MemberState.STOPPED:
            return None  # it has said goodbye
        member.suspect = True
        return member

    def tick(self, now_s: float) -> list[Member]:
        """Call every TICK_S. Returns the members that turned suspect by silence."""
        lag_s = now_s - self._ticked_s - TICK_S
        self._ticked_s = now_s
        if lag_s > STREAM_LAG_S:
            self._stood_still_s = now_s
        if lag_s > LAG_S:
            for member in self._members.values():
                # Whoever was heard since the pause needs no allowance for it.
                member.heard_s = min(now_s, member.heard_s + lag_s)
                member.progress_s = min(now_s, member.progress_s + lag_s)
        quiet = [m for m in self.all() if not m.suspect and m.state is not MemberState.STOPPED]
        silent = [member for member in quiet if now_s - member.heard_s > SILENT_S]
        for member in silent:
            member.suspect = True
        return silent

    def judge_progress(self, running: set[Holder], now_s: float, stall_s: float) -> list[Member]:
        """`running`: lives that hold running samples. Returns the members that turned stalled: no token for
        `stall_s`."""
        turned: list[Member] = []
        for member in self.of_role(Role.ROLLOUT):
            if member.holder not in running:
                member.progress_s = now_s
            was, member.stalled = member.stalled, now_s - member.progress_s > stall_s
            if member.stalled and not was:
                turned.append(member)
        return turned
