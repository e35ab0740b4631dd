"""The pool: one job's prompt stream, ledger, experience buffer, version register and members, joined.

    rollouts --lease/progress--> Rollouts --\\                        /--> Store (SQLite, one writer thread)
    trainer  --take/commit/...-> Training ---> Books (core objects) --
    members  --register/beat---> Pool     --/                        \\--> commands to replicas, stream to the driver

Life of a job: starting -> evaluatingFirst -> training -> evaluatingLast -> complete | stopped | failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from laminar.core.decisions import Loss
from laminar.core.versions import VersionState
from laminar.pool import rows
from laminar.pool.books import Books
from laminar.pool.members import (
    CommandStream,
    Member,
    OlderLife,
    SupersededIncarnation,
    Unregistered,
)
from laminar.pool.restore import Stored
from laminar.pool.rollouts import Rollouts
from laminar.pool.signals import until
from laminar.pool.training import Training
from laminar.shell.answers import Refusal
from laminar.wire.codec import frame
from laminar.wire.dataplane import Command, CommandKind
from laminar.wire.messages import (
    Fence,
    Heartbeat,
    HeartbeatReply,
    MemberState,
    PoolView,
    Register,
    Registered,
    Role,
    StopRequest,
)

PING_S = 1.0
VIEW_S = 0.5
"""The driver's stream says something at least this often."""
LOAD_PERIOD_S = 1.0
MAX_LOADS = 20_000
"""Points of the load curves; when full, every second one goes and from then on half as many are taken."""
MAX_RETAINED = 64
"""As many as relay.retainSlots may be."""


class Pool:
    """See the module. Invariant: an answer goes out only after what it says is durable."""

    def __init__(self, books: Books, stored: Stored) -> None:
        self.books = books
        self.rollouts = Rollouts(books)
        self.training = Training(books)
        self.stopping: Callable[[], bool] = lambda: False
        self._num_loads, self._load_seq = stored.num_loads, stored.load_seq
        self._load_period_s = float(stored.meta.get("load_period_s", LOAD_PERIOD_S))
        self._loads_at_s = 0.0
        self._judged_s = 0.0
        self._condition: tuple[str, str] | None = None
        self._last_loads: dict[str, str] = {}

    # --- members ------------------------------------------------------------------------------------------------

    async def join(self, call: Register) -> Registered:
        """A member's life begins; what its earlier life held moves."""
        books = self.books
        if call.role is Role.TRAINER and call.attempt < books.trained.attempt:
            detail = f"attempt {call.attempt} has ended; attempt {books.trained.attempt} trains"
            raise Refusal(409, "attempt", detail, current=books.trained.attempt)
        try:
            joined = books.members.join(call, books.clock.monotonic_s())
        except OlderLife as error:
            known = books.members.get(call.slot)
            raise Refusal(409, "life", str(error), current=known.register.life if known else None) from error
        if joined.is_new:
            books.journal.write(rows.member(call, joined.member.incarnation, fenced=False))
            if joined.superseded is not None:
                loss = Loss.LEFT if joined.superseded.leaving else Loss.DEAD
                self._superseded(joined.superseded, loss, "a new incarnation registered")
            books.news.members.notify()
        await books.journal.commit()
        return Registered(incarnation=joined.member.incarnation, generation=books.identity.generation)

    def _superseded(self, member: Member, loss: Loss, reason: str) -> None:
        role = member.register.role
        if role is Role.ROLLOUT:
            self.rollouts.redirects.lose(member.holder, loss, reason)
        elif role is Role.RELAY:
            self.training.relay_left(member.slot)  # its memory went with it

    def member(self, slot: str, incarnation: int) -> Member:
        """The member that speaks; every message is a sign of life. Raises a 404 or 410 Refusal."""
        books = self.books
        try:
            known = books.members.get(slot)
            was_suspect = known is not None and known.suspect
            member = books.members.heard(slot, incarnation, books.clock.monotonic_s())
        except Unregistered as error:
            raise Refusal(404, "member", str(error)) from error
        except SupersededIncarnation as error:
            raise Refusal(410, "incarnation", str(error), current=error.current) from error
        if was_suspect:
            books.ledger.absolve(member.holder)
            books.journal.event("member", f"{slot} is heard again")
            books.news.members.notify()
        return member

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        books = self.books
        left = self.member(beat.slot, beat.incarnation).state is MemberState.STOPPED
        member, changed = books.members.beat(beat, books.clock.monotonic_s())
        if member.register.role is Role.ROLLOUT and beat.state is MemberState.STOPPED and not left:
            # All that it generated has arrived before this goodbye.
            self.rollouts.redirects.lose(member.holder, Loss.LEFT, "it leaves")
        if member.register.role is Role.RELAY:
            for held in beat.held:
                self.training.remind_complete(beat.slot, held.version, held.digest)
        if changed:
            books.news.members.notify()
        books.journal.submit()
        newest = books.register.newest
        retain = self._retained() if member.register.role is Role.RELAY else []
        return HeartbeatReply(newest=newest.version if newest else None, retain=retain)

    def _retained(self) -> list[int]:
        """Versions that relays keep beyond the newest ones if they can: an open evaluation's, then by open samples."""
        evaluated = [round_.version for round_ in self.books.rounds.values() if not round_.done]
        unfinished = [version for version in self.books.ledger.unfinished_versions() if version not in evaluated]
        return [*evaluated, *unfinished][:MAX_RETAINED]

    async def fence(self, call: Fence) -> None:
        """Nothing that this incarnation says counts any more."""
        member = self._fence(call.slot, call.incarnation, call.reason)
        await self.books.journal.commit()
        if member is not None and member.stream is not None:
            member.stream.close()

    def _fence(self, slot: str, incarnation: int, reason: str) -> Member | None:
        books = self.books
        member = books.members.fence(slot, incarnation)
        if member is not None:
            books.journal.write(rows.member(member.register, member.incarnation, fenced=True))
            books.journal.event("fence", f"{slot} is fenced: {reason}")
            self._superseded(member, Loss.LEFT if member.leaving else Loss.DEAD, f"fenced: {reason}")
            books.journal.command(slot, Command(kind=CommandKind.FENCE, reason=reason))
            books.news.members.notify()
        return member

    async def commands(self, stream: CommandStream, member: Member) -> AsyncGenerator[bytes, None]:
        """The command connection of one life of a replica; its end makes the member suspect at once."""
        try:
            yield frame(Command(kind=CommandKind.HELLO))
            while True:
                commands = await stream.take(PING_S)
                for command in commands or [Command(kind=CommandKind.PING)]:
                    yield frame(command)
                if stream.closed:
                    return
        finally:
            self._stream_ended(member, stream)

    def open_commands(self, slot: str, incarnation: int) -> tuple[CommandStream, Member]:
        member = self.member(slot, incarnation)
        stream = self.books.members.open_stream(slot, incarnation, self.books.clock.monotonic_s())
        self.rollouts.redirects.adopt_unconfirmed(member.holder)
        self.books.news.members.notify()
        self.books.journal.submit()
        return stream, member

    def _stream_ended(self, member: Member, stream: CommandStream) -> None:
        if self.stopping():
            return  # the connection ends with this process: that says nothing about the member
        now_s = self.books.clock.monotonic_s()
        if self.books.members.close_stream(member.slot, stream, now_s) is member and not member.fenced:
            self._suspect(member, "its command connection closed")
            self.books.journal.submit()

    def _suspect(self, member: Member, reason: str) -> None:
        self.books.journal.event("suspect", f"{member.slot} is suspect: {reason}")
        if member.register.role is Role.ROLLOUT:
            self.rollouts.redirects.lose(member.holder, Loss.SUSPECT, f"suspect: {reason}")
        self.books.news.members.notify()

    # --- the pool's own clock -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Every TICK_S: who went silent, who makes no progress, load curves."""
        books = self.books
        now_s = books.clock.monotonic_s()
        for member in books.members.tick(now_s):
            self._suspect(member, f"silent for {now_s - member.heard_s:.1f} s")
        if now_s - self._judged_s >= 1.0:
            self._judged_s = now_s
            self._judge_progress(now_s)
            self.rollouts.judge()
        self._note_condition()
        if now_s - self._loads_at_s >= self._load_period_s and books.journal.store.condition is None:
            self._loads_at_s = now_s
            self._note_loads()
        books.journal.submit()

    def _judge_progress(self, now_s: float) -> None:
        """Without a token for stallSeconds an engine hangs: its agent, which answers, is told to start another one."""
        stall_s = self.books.spec.rollout.stall_seconds
        for member in self.books.members.judge_progress(self.rollouts.running_holders(), now_s, stall_s):
            self.books.journal.event(
                "stalled", f"{member.slot} has responses to generate and no token for {stall_s:g} s"
            )
            self._fence(member.slot, member.incarnation, "makes no progress")

    def _note_condition(self) -> None:
        """Who waited for the disk goes on."""
        books, condition = self.books, self.books.journal.store.condition
        if (condition is None) is (self._condition is None):
            return
        books.journal.event("store", f"{condition[0]}: {condition[1]}" if condition else "the ledger is written again")
        self._condition = condition
        books.news.leases.notify()
        books.news.batches.notify()

    def _note_loads(self) -> None:
        """One point a replica whose load is not what it was."""
        for member in self.books.members.of_role(Role.ROLLOUT):
            if member.load is None or member.suspect:
                continue
            text = member.load.model_dump_json()
            if self._last_loads.get(member.slot) == text:
                continue
            self._last_loads[member.slot] = text
            self._load_seq += 1
            self._num_loads += 1
            wall_s = self.books.clock.wall_s()
            self.books.journal.write(rows.load(self._load_seq, wall_s, member.slot, member.version, member.load))
        if self._num_loads > MAX_LOADS:
            self._num_loads //= 2
            self._load_period_s *= 2
            self.books.journal.write(rows.HalveLoads(), rows.meta("load_period_s", self._load_period_s))

    # --- the driver and people ----------------------------------------------------------------------------------

    def view(self) -> PoolView:
        """What the driver decides on."""
        books = self.books
        now_s = books.clock.monotonic_s()
        epochs = [member.epoch for member in books.members.of_role(Role.RELAY) if member.epoch is not None]
        newest = books.register.newest
        return PoolView(
            generation=books.identity.generation, phase=books.phase,
            members=[member.view(now_s) for member in books.members.all()],
            highest_epoch=max([books.chain.epoch, *epochs]), attempt=books.trained.attempt,
            durable_step=books.trained.durable_step,
            newest=newest.version if newest else None, reason=books.failed_reason or books.stop_reason or "",
        )  # fmt: skip

    async def views(self) -> AsyncGenerator[bytes, None]:
        """One line at once, on each change, and at least every VIEW_S."""
        while True:
            yield self.view().model_dump_json().encode() + b"\n"
            try:
                async with asyncio.timeout(VIEW_S):
                    await self.books.news.members.wait()
            except TimeoutError:
                continue

    async def stop(self, call: StopRequest) -> None:
        """Finish the current step, checkpoint, stop. Lasts as long as this process: the driver asks a new one again."""
        books = self.books
        if books.stop_reason is None:
            books.stop_reason = call.reason
            books.journal.event("stop", f"stopping: {call.reason}")
            books.news.batches.notify()
            books.news.leases.notify()
        await books.journal.commit()

    async def visible(self, version: int, attempt: int, epoch: int) -> None:
        """Returns when the version is visible, or another epoch is in force."""

        def decide() -> bool | None:
            self.training.fence(attempt)
            row = self.books.register.row(version)
            return True if row.state is not VersionState.RESERVED or self.books.chain.epoch != epoch else None

        await until(decide, self.books.news.versions)
