"""The trainer's side of the pool: attempts, versions, sealed batches, steps, checkpoints.

Every call names its attempt; a lower one than the newest that began is refused, so an old trainer that still runs
changes nothing. Calls that end or roll back steps are taken one at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from laminar.core.checkpoints import CheckpointRow
from laminar.core.decisions import StepConflict
from laminar.core.evaluation import EvalPoint
from laminar.core.groups import slice_groups
from laminar.core.samples import Group
from laminar.core.versions import VersionConflict, VersionRow, VersionState, relays_needed
from laminar.pool import rows
from laminar.pool.books import Books
from laminar.pool.journal import COMMIT_LIMIT_S, STORE_BUSY
from laminar.shell.answers import Refusal
from laminar.wire.dataplane import BatchGroup, BatchSample, BatchSlice
from laminar.wire.messages import (
    BeginAttempt,
    BeginAttemptReply,
    ChainEpoch,
    CheckpointDurable,
    CheckpointDurableReply,
    CheckpointFailed,
    CheckpointInfo,
    CommitStep,
    PoolPhase,
    PublicationView,
    ReservedVersion,
    ReserveVersion,
    ResumePoint,
    StepRow,
    Take,
    TakeReply,
    TakeStatus,
    VersionComplete,
)

STEPS_KEPT = 2
"""Responses of the newest steps stay for the report, whatever the checkpoints need; step 1 stays beside them."""
ROWS_KEPT = 100_000
"""Samples of consumed steps that keep a row of their own, some 25 MB; of older ones the numbers stay."""
CHECKPOINT_STALE = "CheckpointStale"


class Training:
    """Methods that return at once decide only; the caller commits the books before it answers."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._turn = asyncio.Lock()
        self._missed_saves: set[int] = set()
        """Steps whose save has failed since the last one that did not."""

    def fence(self, attempt: int) -> None:
        """Raises a 409 unless this attempt is the one that began last."""
        current = self._books.trained.attempt
        if attempt != current:
            detail = "has ended" if attempt < current else "has not begun"
            raise Refusal(409, "attempt", f"attempt {attempt} {detail}; attempt {current} trains", current=current)

    # --- attempts -----------------------------------------------------------------------------------------------

    def resume_point(self, at_most: int | None) -> ResumePoint:
        kept = self._books.trained.checkpoints
        row = kept.restore_point(at_most)
        return ResumePoint(checkpoint=_info(row) if row else None, kept=[_info(each) for each in kept.kept])

    async def begin(self, call: BeginAttempt) -> BeginAttemptReply:
        """From here on this attempt trains: unseen versions of earlier ones are burned, later steps are due again."""
        books = self._books
        async with self._turn:
            if call.attempt < books.trained.attempt:
                self.fence(call.attempt)
            if call.attempt > books.trained.attempt:
                await self._roll_back(call)
            elif call.restored_step != books.trained.restored_step:
                raise Refusal(409, "attempt", f"attempt {call.attempt} began at step {books.trained.restored_step}")
            await books.journal.commit()
        row = books.head(call.restored_step)
        return BeginAttemptReply(
            restored_version=row.version if row else None,
            steps=books.ledger.plan.steps,
            evaluations_pending=not books.round_done(EvalPoint.FIRST),
        )

    async def _roll_back(self, call: BeginAttempt) -> None:
        books, step = self._books, call.restored_step
        committed = books.ledger.committed_step
        if step > committed:
            raise Refusal(409, "step", f"step {step} was never committed; {committed} is the last", current=committed)
        if step < books.trained.checkpoints.prunable_step:
            oldest = books.trained.checkpoints.prunable_step
            raise Refusal(409, "step", f"batches up to step {oldest} are gone: restore that or later", current=oldest)
        try:
            async with asyncio.timeout(COMMIT_LIMIT_S):
                consumed = await books.journal.store.consumed_after(step)
        except TimeoutError as error:
            raise Refusal(503, *(books.journal.store.condition or STORE_BUSY)) from error
        assert [batch.step for batch, _ in consumed] == list(range(step + 1, committed + 1)), "a batch is missing"
        burned = books.register.burn_before(call.attempt)
        books.ledger.roll_back(step, consumed)
        books.trained.begin(call.attempt, step)
        if step < books.ledger.plan.steps and EvalPoint.LAST in books.rounds:
            books.restart_round(EvalPoint.LAST, books.rounds[EvalPoint.LAST].version)
        books.journal.write(*books.totals())  # no sample moved, but the totals did
        self._missed_saves.clear()
        books.failed_reason = ""
        books.conditions.pop(CHECKPOINT_STALE, None)
        text = f"attempt {call.attempt} of the trainer goes on after step {step}"
        if committed > step:
            text += f"; steps {step + 1} to {committed} are trained again on the same batches"
        if call.num_damaged:
            text += f"; newer checkpoints passed over because they are damaged: {call.num_damaged}"
        books.journal.event("attempt", text + (f"; burned versions {burned}" if burned else ""))
        books.news.batches.notify()
        books.news.members.notify()

    # --- versions -----------------------------------------------------------------------------------------------

    def reserve(self, call: ReserveVersion) -> ReservedVersion:
        self.fence(call.attempt)
        books = self._books
        try:
            row = books.register.reserve(call.attempt, call.step, call.parent)
        except VersionConflict as error:
            raise Refusal(409, "version", str(error)) from error
        return ReservedVersion(version=row.version, epoch=books.chain.epoch, master=books.master)

    def publication(self, version: int, attempt: int) -> PublicationView:
        """Where a publication stands. Raises a 409 for a burned version: its attempt is over."""
        self.fence(attempt)
        row = self._version(version)
        if row.state is VersionState.BURNED:
            raise Refusal(409, "version", f"version {version} was burned when a later attempt began")
        books = self._books
        return PublicationView(
            version=version,
            visible=row.state is VersionState.VISIBLE,
            complete_on=sorted(row.complete_on),
            needed=relays_needed(books.num_relays),
            epoch=books.chain.epoch,
            master=books.master,
        )

    def complete(self, call: VersionComplete) -> None:
        """A relay holds a version whole."""
        self._version(call.version)
        self.report_complete(call.slot, call.version, call.digest)

    def report_complete(self, slot: str, version: int, digest: str) -> None:
        """Raises a 409 if relays disagree on the digest."""
        books = self._books
        row = books.register.row(version)
        if row.state is VersionState.VISIBLE and row.digest == digest:
            row.complete_on.add(slot)
            return
        try:
            visible = books.register.report_complete(version, digest, slot, books.num_relays)
        except VersionConflict as error:
            books.journal.event("digest", str(error))
            raise Refusal(409, "digest", str(error)) from error
        books.news.versions.notify()
        if visible:
            self._announce(version)

    def remind_complete(self, slot: str, version: int, digest: str) -> None:
        """The same from a heartbeat: a restarted pool learns again what relays told the earlier one."""
        try:
            row = self._books.register.row(version)
        except VersionConflict:
            return
        if row.state is VersionState.RESERVED and slot not in row.complete_on and row.digest in ("", digest):
            self.report_complete(slot, version, digest)

    def _announce(self, version: int) -> None:
        row = self._books.register.row(version)
        self._books.journal.event("version", f"version {version} (step {row.step}) is visible")

    def _version(self, version: int) -> VersionRow:
        try:
            return self._books.register.row(version)
        except VersionConflict as error:
            raise Refusal(404, "version", str(error)) from error

    def new_chain(self, chain: ChainEpoch) -> None:
        """Raises a 409 for a lower epoch, or another list under the same one."""
        books = self._books
        current = books.chain
        same = (chain.epoch, chain.members) == (current.epoch, current.members)
        if chain.epoch < current.epoch or (chain.epoch == current.epoch and not same):
            raise Refusal(409, "epoch", f"epoch {current.epoch} is in force", current=current.epoch)
        if same:
            return
        books.chain = chain
        books.journal.write(rows.meta("chain", chain.model_dump_json()))
        members = {member.slot for member in chain.members}
        for slot in sorted({member.slot for member in current.members} - members):
            self.relay_left(slot)
        # A shorter chain needs fewer complete relays, also for what its members had reported before.
        for version in books.register.relay_left("", books.num_relays):
            self._announce(version)
        books.journal.event("epoch", f"relay chain epoch {chain.epoch}: {' > '.join(m.slot for m in chain.members)}")
        books.news.versions.notify()
        books.news.members.notify()

    def relay_left(self, slot: str) -> None:
        """What only this relay held does not count any more."""
        for version in self._books.register.relay_left(slot, self._books.num_relays):
            self._announce(version)

    # --- batches and steps --------------------------------------------------------------------------------------

    def take(self, call: Take) -> TakeReply | None:
        """Batch `step`, sealed now or before; None: not yet."""
        self.fence(call.attempt)
        books, ledger = self._books, self._books.ledger
        if ledger.finished:
            return TakeReply(status=TakeStatus.DONE)
        if books.stop_reason is not None or books.phase is PoolPhase.FAILED:
            books.trained.taken_step = 0
            return TakeReply(status=TakeStatus.STOP)
        if books.phase is PoolPhase.EVALUATING_FIRST:
            return None
        known = call.step in ledger.batches
        try:
            batch = ledger.seal(call.step)
        except StepConflict as error:
            raise Refusal(409, "step", str(error), current=ledger.committed_step) from error
        if batch is None:
            return None
        if not known:
            books.trained.write_batch(batch)
        books.trained.taken_step = call.step
        groups = ledger.batch_groups(call.step)
        return TakeReply(
            status=TakeStatus.BATCH,
            step=call.step,
            num_groups=len(groups),
            num_samples=sum(len(group.graded) for group in groups),
            num_tokens=sum(self._num_tokens(group) for group in groups),
        )

    def slice(self, attempt: int, step: int, rank: int, world: int) -> BatchSlice:
        """Whole groups of a sealed batch, balanced over ranks by tokens."""
        self.fence(attempt)
        if not 0 <= rank < world:
            raise Refusal(422, "malformed", f"rank {rank} of {world} does not exist")
        try:
            groups = self._books.ledger.batch_groups(step)
        except StepConflict as error:
            raise Refusal(409, "step", str(error), current=self._books.ledger.committed_step) from error
        mine = slice_groups([self._num_tokens(group) for group in groups], world)[rank]
        return BatchSlice(
            step=step,
            rank=rank,
            world=world,
            groups=[self._batch_group(groups[index]) for index in mine],
            num_groups_total=len(groups),
            num_samples_total=sum(len(group.graded) for group in groups),
        )

    def _num_tokens(self, group: Group) -> int:
        prompt = self._books.prompts.train[group.key.prompt].num_tokens
        return sum(prompt + sample.length for sample in group.graded)

    def _batch_group(self, group: Group) -> BatchGroup:
        samples: list[BatchSample] = []
        for sample in group.graded:
            assert sample.version is not None, f"graded sample {sample.key} has no version"
            samples.append(
                BatchSample(
                    id=str(sample.key), version=sample.version, step=self._books.register.row(sample.version).step,
                    tokens=bytes(sample.tokens), logprobs=bytes(sample.logprobs), reward=sample.reward,
                    finish_reason=sample.finish_reason, tools=list(sample.tools),
                )
            )  # fmt: skip
        prompt = self._books.prompts.train[group.key.prompt]
        return BatchGroup(group=str(group.key), prompt_tokens=prompt.tokens, samples=samples)

    async def commit_step(self, call: CommitStep) -> None:
        """The batch is consumed by this attempt; a repeated call changes nothing."""
        books = self._books
        async with self._turn:
            self.fence(call.attempt)
            try:
                groups = books.ledger.commit(call.step)
            except StepConflict as error:
                raise Refusal(409, "step", str(error), current=books.ledger.committed_step) from error
            if groups:
                books.trained.write_step(self._step_row(call, groups))
                books.news.leases.notify()
                self._prune()
            await books.journal.commit()

    def _step_row(self, call: CommitStep, groups: list[Group]) -> StepRow:
        books = self._books
        head = books.head(call.step - 1)
        samples = [sample for group in groups for sample in group.graded]
        consumed: Counter[int] = Counter()
        inherent: Counter[int] = Counter()
        ages: dict[int, int] = {}
        for sample in samples:
            assert sample.version is not None
            if sample.version not in ages:
                from_ = head.version if head else sample.version
                ages[sample.version] = books.register.age(sample.version, from_, call.step - 1).steps
            consumed[ages[sample.version]] += 1
            inherent[sample.inherent or 0] += 1
        return StepRow(
            step=call.step, attempt=call.attempt, version=head.version if head else None,
            wall_s=books.clock.wall_s(), reward_mean=math.fsum(s.reward for s in samples) / len(samples),
            num_samples=len(samples), response_tokens=sum(sample.length for sample in samples),
            inherent=dict(sorted(inherent.items())), consumed=dict(sorted(consumed.items())),
            stats={name: value for name, value in call.stats.items() if math.isfinite(value)},
        )  # fmt: skip

    # --- checkpoints --------------------------------------------------------------------------------------------

    async def ledger_snapshot(self, attempt: int, step: int) -> bytes:
        """What a pool without its store would go on from: opaque bytes, written beside checkpoint `step`."""
        self.fence(attempt)
        await self._books.journal.commit()
        return await self._books.journal.store.snapshot(step)

    async def checkpoint_durable(self, call: CheckpointDurable) -> CheckpointDurableReply:
        """Registers it; what the oldest kept one covers is final."""
        async with self._turn:
            reply = self._register_checkpoint(call)
            await self._books.journal.commit()
            return reply

    def _register_checkpoint(self, call: CheckpointDurable) -> CheckpointDurableReply:
        self.fence(call.attempt)
        books, info = self._books, call.checkpoint
        if info.attempt != call.attempt or info.step > books.ledger.committed_step:
            committed = books.ledger.committed_step
            raise Refusal(409, "step", f"checkpoint {info.path} does not fit step {committed}", current=committed)
        row = CheckpointRow(info.step, info.attempt, info.path, tuple(sorted(info.manifest.items())))
        is_new = row not in books.trained.checkpoints.kept
        removable = books.trained.checkpoints.register(row)
        if is_new:
            books.trained.write_checkpoints(removable)
            books.journal.event("checkpoint", f"checkpoint of step {info.step} is durable")
            self._missed_saves.clear()
            books.conditions.pop(CHECKPOINT_STALE, None)
            self._prune()
            books.news.members.notify()
        return CheckpointDurableReply(
            kept=[_info(each) for each in books.trained.checkpoints.kept],
            removable=[_info(each) for each in books.trained.removable],
        )

    def checkpoint_failed(self, call: CheckpointFailed) -> None:
        """Training goes on; after as many missed saves as are kept it stops. A repeated call changes nothing."""
        self.fence(call.attempt)
        books = self._books
        if call.step in self._missed_saves:
            return
        self._missed_saves.add(call.step)
        books.conditions[CHECKPOINT_STALE] = f"the checkpoint of step {call.step} failed: {call.reason}"
        books.journal.event("checkpoint", books.conditions[CHECKPOINT_STALE])
        if len(self._missed_saves) >= books.spec.trainer.checkpoint.keep:
            books.failed_reason = f"{len(self._missed_saves)} checkpoints in a row failed: {call.reason}"

    def _prune(self) -> None:
        """Responses that no checkpoint can ask for again go, except those that the report shows."""
        trained, ledger = self._books.trained, self._books.ledger
        num_rows_steps = -(-ROWS_KEPT // (ledger.plan.prompts_per_step * ledger.plan.samples_per_prompt))
        trained.prune_to(min(trained.checkpoints.prunable_step, ledger.committed_step - STEPS_KEPT), num_rows_steps)


def _info(row: CheckpointRow) -> CheckpointInfo:
    return CheckpointInfo(step=row.step, attempt=row.attempt, path=row.path, manifest=dict(row.manifest))
