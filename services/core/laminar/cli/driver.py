"""The local driver: processes in the place of pods, led by the same reconciler as a cluster.

    exits, the pool's stream, health checks --observe--> Snapshot --reconcile--> actions --apply--> processes, calls

One loop; it is woken by news and turns at least twice a second. What must never go back (epoch, attempt, lives) is
on disk before anybody hears of it. Beside the loop: the follower of the pool's stream, the prober, the recorder.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar.cli.children import Child, Children
from laminar.cli.follow import PoolFollower, Prober, Suspect, stage_of
from laminar.cli.launch import Launchpad
from laminar.cli.record import Recorder
from laminar.cli.run_folder import Result, RunFolder, State, StoredMember
from laminar.cli.view import View
from laminar.core.chain import ChainNode
from laminar.core.events import Occurrence, describe
from laminar.core.identity import Incarnation, Role
from laminar.core.liveness import DEFAULT_LIMITS, Sighting, Watch
from laminar.core.lost_relays import LostRelays, Neighbourhood
from laminar.core.reconcile import (
    EXIT_BAD_INPUT,
    Action,
    Create,
    Fence,
    Kill,
    PublishChain,
    RequestStop,
    SetCondition,
    SetPhase,
    Stop,
    reconcile,
)
from laminar.core.restarts import Restarts, after_exit, after_progress
from laminar.core.snapshot import (
    ChainState,
    Exit,
    JobPhase,
    Member,
    MemberPhase,
    Pool,
    Snapshot,
    Spec,
)
from laminar.shell.calls import Refused, Unreachable
from laminar.shell.client import PoolClient
from laminar.shell.ledger_file import FILE_NAME
from laminar.shell.sealed_folder import newest_sealed
from laminar.wire import messages
from laminar.wire.messages import Ack, ChainEpoch, ChainMember, Event, MemberView

DISK_FULL = "DiskFull"
TURN_S = 0.5
CALL_S = 1.5
"""A call that changes something; one that fails is made again at the next turn."""
PROBE_AFTER_S = 5.0
"""A pool that has been away this long is asked for its health: a restart takes a second or two."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended. `bad_input`: by a mistake of the user's; `interrupted`: by the second Ctrl-C."""

    result: Result
    bad_input: bool = False
    interrupted: bool = False


class Driver:
    """One run, from its first process to its last. Use once: `await run()`."""

    def __init__(
        self, run: RunFolder, spec: Spec, uid: str, num_steps: int, launchpad: Launchpad, view: View,
        restore_step: int | None = None,
    ) -> None:  # fmt: skip
        self._run = run
        self._spec = spec
        self._num_steps = num_steps
        self._pad = launchpad
        self._view = view
        self._uid = uid
        self._state: State = run.state()
        self._restore_step = restore_step
        self._restoring_attempt: int | None = None
        self._clock = time.monotonic
        self._started_s = self._clock()
        self._woken = asyncio.Event()
        self._now = asyncio.Event()
        self._children = Children(uid, self._clock, self._woken.set)
        self._slots: dict[str, Child] = {}
        self._known: dict[tuple[str, int], MemberView] = {}
        self._ready: dict[tuple[str, int], bool] = {}
        self._lost_relays = LostRelays()
        self._fenced: set[tuple[str, int, int]] = set()
        self._pool_life_heard: int | None = None
        self._told: set[tuple[str, int]] = set()
        self._highest_epoch = 0
        self._restarts: dict[str, Restarts] = {}
        self._durable_step: int | None = None
        self._watch = Watch(self._started_s)
        self._phase = JobPhase.STARTING
        self._reason = ""
        self._conditions: dict[str, str] = {}
        self._stop_requested = False
        self._stop_heard_by: int | None = None
        self._bad_input = False
        self._client = PoolClient(launchpad.pool_url, launchpad.token, uid, self._state.generation, "driver")
        self._follower = PoolFollower(self._client, self._clock, self._woken.set)
        self._prober = Prober(self._suspects)
        self._recorder = Recorder(self._client, run, view)

    def interrupt(self) -> None:
        """Ctrl-C. The first asks the job to stop after a checkpoint, the second ends everything now."""
        if self._stop_requested:
            self._now.set()
        else:
            self._stop_requested = True
            self._view.note("Stopping: the current step is finished and a checkpoint written. Ctrl-C again: at once.")
        self._woken.set()

    async def run(self) -> Ending:
        """Until the job has ended and no process of it is left."""
        # Of a driver that was killed: the kernel has told its children to end, but may not be done with it.
        await self._children.end_all()
        self._run.write_endpoint(self._pad.pool_url)
        try:
            async with self._client, asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(part) for part in (self._follower.run(), self._prober.run(), self._recorder.run())
                ]
                await self._drive()
                for task in beside:
                    task.cancel()
        finally:
            await self._children.end_all()
            self._run.endpoint_file.unlink(missing_ok=True)
        assert not self._children.left_over(), "a process of this job is left"
        return self._ending()

    async def _drive(self) -> None:
        while not self._now.is_set():
            await self._collect()
            try:
                for action in reconcile(self._observe()):
                    await self._apply(action)
            except OSError as error:
                self._cannot_act(error)
            else:
                self._conditions.pop(DISK_FULL, None)
            if self._phase.ended and not self._children.running:
                return
            await self._turn()

    def _cannot_act(self, error: OSError) -> None:
        """What must be stored before it is done could not be. Without room on the disk the next turn tries again;
        anything else ends the run: what is stored is whole, so it can go on later."""
        what = f"{error.filename or 'a process could not be started'}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._conditions[DISK_FULL] = f"{what}; nothing is started or replaced until there is room"
        else:
            self._phase, self._reason = JobPhase.FAILED, what

    async def _turn(self) -> None:
        """Until there is news, or for half a second: deadlines pass without any."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()

    def _ending(self) -> Ending:
        interrupted = self._now.is_set() and not self._phase.ended
        if interrupted:
            self._phase, self._reason = JobPhase.STOPPED, "ended at once by the second Ctrl-C"
        wall_s = self._clock() - self._started_s
        result = self._recorder.result(self._phase, self._reason, self._num_steps, wall_s, self._conditions)
        try:
            self._run.write_result(result)
        except OSError as error:
            self._view.note(f"{self._run.path / 'result.json'} cannot be written: {error.strerror}.")
        return Ending(result, bad_input=self._bad_input, interrupted=interrupted)

    # Observe.

    async def _collect(self) -> None:
        """The children that have ended, and what their exits mean for their slots."""
        for child in await self._children.settle():
            if child.ended_s is None or self._phase.ended:
                continue
            role = Role(child.slot.rpartition("-")[0])
            before = self._restarts.get(child.slot, Restarts())
            lived_s = child.ended_s - child.started_s
            served = (child.slot, child.life) in self._known
            if role is Role.POOL:
                served = child.life == self._pool_life_heard
                self._watch.forget_pool()
            self._restarts[child.slot] = after_exit(
                before, role, lived_s, child.ended_s, served=served, disrupted=child.killed
            )
            self._bad_input = self._bad_input or child.code == EXIT_BAD_INPUT
            if not (role is Role.TRAINER and child.code == 0):
                self._say(Occurrence("exited", f"{child.slot} ended {_how(child)}"))

    def _observe(self) -> Snapshot:
        now_s = self._clock()
        view = self._follower.view
        reachable = self._follower.reachable
        if view is not None and reachable:
            self._learn(view)
        sightings = [self._sighting(child, now_s) for child in self._slots.values() if child.slot != "pool-0"]
        self._watch.observe(now_s, sightings, pool_reachable=reachable)
        pool = self._slots.get("pool-0")
        if pool is not None:
            if reachable and pool.code is None:
                self._pool_life_heard = pool.life
                self._watch.observe_pool(now_s, answers=True)
            elif (answers := self._prober.take(pool.slot, pool.life)) is not None:
                self._watch.observe_pool(now_s, answers=answers)
        return Snapshot(
            now_s=now_s,
            started_s=self._started_s,
            spec=self._spec,
            phase=self._phase,
            members=tuple(self._member(child) for child in self._slots.values()),
            chain=ChainState(
                epoch=self._state.epoch,
                members=tuple(_node(member) for member in self._state.chain),
                highest_reported=self._highest_epoch,
                acknowledged=frozenset(self._told),
                apart=self._lost_relays.apart(self._clock()),
            ),
            pool=Pool()
            if view is None
            else Pool(reachable, stage_of(view.phase), view.reason, view.attempt, newest_version=view.newest),
            attempt=self._state.attempt,
            lives=self._state.lives,
            restarts=self._restarts,
            brake=self._watch.brake(now_s),
            conditions=self._conditions,
            stop_requested=self._stop_requested,
            stop_acknowledged=pool is not None and self._stop_heard_by == pool.life,
        )

    def _learn(self, view: messages.PoolView) -> None:
        """What outlasts the view it came with: a restarted pool knows only who has spoken to it again."""
        for member in view.members:
            key = (member.slot, member.life)
            self._known[key] = member
            self._ready[key] = not (member.suspect or member.fenced)
        chain = [_node(member) for member in self._state.chain]
        self._lost_relays.observe(self._clock(), chain, self._state.epoch, map(_neighbourhood, view.members))
        reported = [view.highest_epoch, *(m.epoch for m in view.members if m.epoch is not None)]
        self._highest_epoch = max(self._highest_epoch, *reported)
        if view.durable_step is not None and (self._durable_step is None or view.durable_step > self._durable_step):
            self._durable_step = view.durable_step
            self._restarts["trainer-0"] = after_progress(self._restarts.get("trainer-0", Restarts()))
        if self._restoring_attempt is not None and view.attempt >= self._restoring_attempt:
            # It has begun from there; whatever comes later resumes from its own checkpoints.
            self._restore_step = None

    def _sighting(self, child: Child, now_s: float) -> Sighting:
        known = self._known.get((child.slot, child.life))
        suspect = self._overdue(child, now_s) if known is None else known.suspect
        return Sighting(
            slot=child.slot,
            life=child.life,
            suspect=suspect,
            answers=self._prober.take(child.slot, child.life),
            exited=child.code is not None,
            stalled=known is not None and known.stalled,
        )

    def _overdue(self, child: Child, now_s: float) -> bool:
        """It has not registered, and the pool has been there long enough to register with."""
        pool = self._slots.get("pool-0")
        since_s = max(child.started_s, pool.started_s if pool is not None else now_s)
        return now_s - since_s > DEFAULT_LIMITS.registering_s

    def _member(self, child: Child) -> Member:
        role, _, index = child.slot.rpartition("-")
        key = (child.slot, child.life)
        known = self._known.get(key)
        incarnation = None if known is None else known.incarnation
        is_pool = role == Role.POOL
        if child.code is not None:
            phase = MemberPhase.EXITED
        else:
            phase = MemberPhase.RUNNING if known is not None or is_pool else MemberPhase.STARTING
        evidence = (
            self._watch.pool_evidence(exited=child.code is not None)
            if is_pool
            else self._watch.evidence(child.slot, child.life)
        )
        ended = child.ended_s is not None
        is_lost = incarnation is not None and self._lost_relays.is_lost(child.slot, incarnation, self._clock())
        return Member(
            slot=child.slot,
            role=Role(role),
            index=int(index),
            life=child.life,
            node=child.launch.variables["LAMINAR_MACHINE"],
            phase=phase,
            started_s=child.started_s,
            evidence=evidence,
            incarnation=incarnation,
            fenced=known is not None and (known.fenced or (*key, known.incarnation) in self._fenced),
            ready=not ended and self._ready.get(key, False) and not is_lost,
            address=self._pad.data_address(child.slot) if role == Role.RELAY else "",
            newest_version=None if known is None else known.version,
            stopping_since_s=child.stopping_since_s,
            exit=None if child.ended_s is None else Exit(child.ended_s, child.code, child.last_words()),
        )

    def _suspects(self) -> Iterator[Suspect]:
        """Whose health is asked for: suspects, and a pool that has been away for a while."""
        now_s = self._clock()
        for child in self._slots.values():
            if child.code is not None:
                continue
            if child.slot == "pool-0":
                wanted = not self._follower.reachable and now_s - child.started_s > PROBE_AFTER_S
            else:
                wanted = self._watch.evidence(child.slot, child.life).suspect_since_s is not None
            if wanted:
                yield Suspect(child.slot, child.life, self._pad.http_url(child.slot))

    # Do.

    async def _apply(self, action: Action) -> None:
        match action:
            case Create():
                self._create(action)
            case Fence():
                await self._fence(action)
            case Kill():
                await self._children.kill(self._slots[action.slot])
            case Stop():
                self._children.stop(self._slots[action.slot])
            case PublishChain():
                await self._publish(action)
            case RequestStop():
                await self._request_stop(action)
            case SetPhase():
                await self._set_phase(action)
            case SetCondition():
                self._conditions[action.name] = action.text
        self._announce(action)

    def _announce(self, action: Action) -> None:
        """What the pool does not say itself, and is no matter of course."""
        occurrence = describe(action)
        routine = isinstance(action, PublishChain) or (isinstance(action, Create) and action.reason == "wanted")
        if occurrence is not None and not routine:
            self._say(occurrence)

    async def _set_phase(self, action: SetPhase) -> None:
        if action.phase.ended:
            # The pool answers until it is asked to leave, which comes at a later turn.
            seen = await self._recorder.finish(pool_answers=self._follower.reachable)
            if not seen and action.phase is not JobPhase.FAILED:
                return  # it died just now: its next life has the end of the record, and the phase comes again
        self._phase, self._reason = action.phase, action.reason
        self._woken.set()

    def _create(self, action: Create) -> None:
        attempt = action.life if action.role is Role.TRAINER else self._state.attempt
        lives = {**self._state.lives, action.slot: action.life}
        self._store(self._state.model_copy(update={"lives": lives, "attempt": attempt}))
        restore_step = None
        if action.role is Role.TRAINER and self._restore_step is not None:
            restore_step = self._restore_step
            self._restoring_attempt = self._restoring_attempt or action.life
        checkpoint = self._new_generation() if action.role is Role.POOL and self._ledger_is_lost() else None
        launch = self._pad.launch(action, self._state.generation, restore_step, checkpoint)
        self._slots[action.slot] = self._children.start(launch)
        if action.role is Role.TRAINER:
            # The relays hear of the new attempt with the list, and refuse what an older one may still send.
            self._told.clear()

    def _ledger_is_lost(self) -> bool:
        """A trainer has been started, so there was one."""
        return self._state.attempt > 0 and not (self._run.store / FILE_NAME).exists()

    def _new_generation(self) -> Path | None:
        """Stored before any pool hears of it. Returns the checkpoint that it begins from, None: from nothing."""
        generation = self._state.generation + 1
        checkpoint = newest_sealed(self._run.checkpoints)
        origin = f"the ledger in {checkpoint.name}" if checkpoint else "the start: there is no whole checkpoint"
        self._store(self._state.model_copy(update={"generation": generation}))
        self._client.generation = generation
        self._say(Occurrence("generation", f"the pool's store is lost; generation {generation} goes on from {origin}"))
        return checkpoint

    async def _fence(self, action: Fence) -> None:
        body = messages.Fence(slot=action.slot, incarnation=action.incarnation, reason=action.reason)
        try:
            await self._client.post_json("/v1/fence", body, Ack, CALL_S, deadline_s=CALL_S)
        except Unreachable:
            return
        except Refused:
            pass  # the pool knows a later incarnation, or none: this one's words count for nothing already
        self._fenced.add((action.slot, action.life, action.incarnation))
        self._woken.set()

    async def _publish(self, action: PublishChain) -> None:
        if action.epoch != self._state.epoch:
            self._told.clear()
            chain = [
                StoredMember(slot=n.slot, address=n.address, machine=n.machine, incarnation=n.incarnation)
                for n in action.members
            ]
            self._store(self._state.model_copy(update={"epoch": action.epoch, "chain": chain}))
        members = [ChainMember(slot=n.slot, address=n.address, machine=n.machine) for n in action.members]
        epoch = ChainEpoch(epoch=action.epoch, members=members, attempt=self._state.attempt)
        heard = await asyncio.gather(*(self._tell(slot, epoch) for slot in action.to))
        for slot, has_heard in zip(action.to, heard, strict=True):
            if has_heard:
                self._told.add((slot, self._slots[slot].life))

    async def _tell(self, slot: str, epoch: ChainEpoch) -> bool:
        url = self._pad.http_url(slot)
        try:
            async with PoolClient(url, self._pad.token, self._uid, self._state.generation, "driver") as client:
                await client.post_json("/v1/epoch", epoch, Ack, CALL_S, deadline_s=CALL_S)
        except Unreachable:
            return False
        except Refused as error:
            if error.current is not None:
                self._highest_epoch = max(self._highest_epoch, error.current)
            return False
        return True

    async def _request_stop(self, action: RequestStop) -> None:
        life = self._slots["pool-0"].life
        try:
            body = messages.StopRequest(reason=action.reason)
            await self._client.post_json("/v1/stop", body, Ack, CALL_S, deadline_s=CALL_S)
        except Unreachable:
            return
        self._stop_heard_by = life

    def _store(self, state: State) -> None:
        self._run.write_state(state)
        self._state = state

    def _say(self, occurrence: Occurrence) -> None:
        self._view.events([Event(seq=0, wall_s=time.time(), kind=occurrence.kind, text=occurrence.text)])


def _node(member: StoredMember) -> ChainNode:
    return ChainNode(member.slot, Incarnation(member.incarnation), member.address, member.machine)


def _neighbourhood(member: MemberView) -> Neighbourhood:
    return Neighbourhood(member.slot, member.incarnation, member.epoch, tuple(member.lost_neighbours), member.silent_s)


def _how(child: Child) -> str:
    code = child.code if child.code is not None else 0
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    words = child.last_words()
    return f"{how}: {words}" if words and code > 0 else how
