"""What becomes of the work of a replica that is suspect, dead, stalled or drained; ADOPT and CANCEL follow.

same version with room -> moved at once        a relay keeps the version -> parked, the next idle replica loads it
neither                -> starts again         ran in too many dying lives -> set aside
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from laminar.core.decisions import Fate, Loss, Moved
from laminar.core.redirect import Destination
from laminar.core.samples import Holder, Sample, SampleState
from laminar.pool.books import Books
from laminar.pool.evaluations import Evaluations
from laminar.pool.grants import Grants
from laminar.pool.members import SILENT_S, Member
from laminar.wire.dataplane import Command, CommandKind
from laminar.wire.messages import Role

POISON = "PoisonSamples"


class Redirects:
    """Decides; the caller commits the books, and commands leave once that is durable."""

    def __init__(self, books: Books, evaluations: Evaluations, grants: Grants) -> None:
        self._books, self._evaluations, self._grants = books, evaluations, grants

    def lose(self, source: Holder, loss: Loss, reason: str) -> None:
        """Nothing that `source` holds is written by it any more."""
        books = self._books
        moved = books.ledger.lose(source, self._destinations(source), reason, loss=loss, kept=self.kept())
        num_evals = self._evaluations.lose(source, loss)
        if not moved and not num_evals:
            return
        self._cancel(source, moved, reason)
        for destination in sorted({move.to for move in moved if move.to is not None}):
            self._adopt(destination, [move.sample for move in moved if move.to == destination], reason)
        books.journal.event("redirect", _text(source, moved, num_evals, reason))
        self._report_poison([move for move in moved if move.fate is Fate.POISONED])
        books.news.leases.notify()

    def adopt_unconfirmed(self, holder: Holder) -> None:
        """A replica (re)opened its commands: what was moved to it may have been lost on the way.

        It ignores what it knows. What it leased itself it gets again with its next lease.
        """
        held = self._books.ledger.held_by(holder)
        self._adopt(holder, [s for s in held if s.moves or s.state is SampleState.FINISHED], "it may not have heard")

    def grade_orphans(self) -> None:
        """Responses whose grader is gone go to the least loaded replica that lives."""
        running = self._books.ledger.running()
        members = [member for member in self._books.members.of_role(Role.ROLLOUT) if member.usable]
        if members:
            best = min(members, key=lambda member: (len(running.get(member.holder, ())), member.slot))
            self._adopt(best.holder, self._books.ledger.adopt_ungraded(best.holder), "grading only")

    # --- versions that relays keep --------------------------------------------------------------------------------

    def kept(self) -> frozenset[int] | None:
        """Versions that some replica could load from its relay; None while a relay that lives has not told yet."""
        rollouts = self._books.members.of_role(Role.ROLLOUT)
        if any(not relay.told_held and not relay.gone for relay in self._relays()):
            now_s = self._books.clock.monotonic_s()
            if any(not m.told_held and now_s - m.since_s < SILENT_S for m in self._relays()):
                return None
        return frozenset[int]().union(*(self.kept_near(member) for member in rollouts))

    def kept_near(self, member: Member) -> frozenset[int]:
        """Versions that this replica's engine can load: on its machine's relay or, without one, on any."""
        relays = [relay for relay in self._relays() if not relay.gone]
        near = [relay for relay in relays if relay.register.machine == member.register.machine]
        newest = self._books.register.newest
        held = frozenset[int]().union(*(relay.held for relay in near or relays))
        return held | {newest.version} if newest is not None else held

    def restart_unkept(self) -> None:
        """Partials that wait for a version that is gone start again."""
        kept = self.kept()
        restarted = self._books.ledger.restart_unkept(kept) if kept is not None else []
        if restarted:
            tokens = sum(number for _, number in restarted)
            text = f"{len(restarted)} trajectories start again ({tokens} tokens): no relay has their version any more"
            self._books.journal.event("redirect", text)

    def _relays(self) -> list[Member]:
        return self._books.members.of_role(Role.RELAY)

    # --- commands -------------------------------------------------------------------------------------------------

    def _adopt(self, destination: Holder, samples: Sequence[Sample], reason: str) -> None:
        for version in sorted({sample.version for sample in samples if sample.version is not None}):
            groups = self._grants.of_samples(sample for sample in samples if sample.version == version)
            command = Command(kind=CommandKind.ADOPT, version=version, groups=groups, reason=reason)
            self._books.journal.command(destination.slot, command)

    def _cancel(self, source: Holder, moved: Sequence[Moved], reason: str) -> None:
        """Who generates one of these still should not waste its time: the source, and whoever had a poisoned one."""
        for holder in sorted({source, *(move.source for move in moved)}):
            theirs = [move for move in moved if move.source == holder]
            member = self._books.members.get(holder.slot)
            if theirs and member is not None and member.holder == holder:
                ids, terms = [str(move.sample.key) for move in theirs], [move.ended_term for move in theirs]
                self._books.journal.command(
                    holder.slot, Command(kind=CommandKind.CANCEL, ids=ids, terms=terms, reason=reason)
                )

    def _destinations(self, source: Holder) -> list[Destination]:
        running = self._books.ledger.running()
        return [
            Destination(
                member.holder,
                held[0].version if (held := running.get(member.holder)) else None,
                max(0, (member.max_running or self._books.spec.rollout.engine.max_running) - len(held or ())),
            )
            for member in self._books.members.of_role(Role.ROLLOUT)
            if member.usable and member.holder != source
        ]

    def _report_poison(self, moved: Sequence[Moved]) -> None:
        for move in moved:
            text = f"sample {move.sample.key} is set aside: {move.reason}"
            self._books.journal.event("poison", text)
            number = self._books.ledger.counters.poisoned_samples
            self._books.conditions[POISON] = f"{number} samples in all; the latest: {text}"


def _text(source: Holder, moved: Sequence[Moved], num_evals: int, reason: str) -> str:
    number = Counter(move.fate for move in moved)
    restarted_tokens = sum(move.restarted_tokens for move in moved)
    parts = [f"{number[Fate.MOVED]} trajectories redirected"]
    if number[Fate.PARKED]:
        parts.append(f"{number[Fate.PARKED]} kept for a replica that loads their version")
    parts.append(f"{number[Fate.RESTARTED]} restarted ({restarted_tokens} tokens)")
    if number[Fate.UNGRADED]:
        parts.append(f"{number[Fate.UNGRADED]} wait for a grader")
    if number[Fate.POISONED]:
        parts.append(f"{number[Fate.POISONED]} set aside")
    if num_evals:
        parts.append(f"{num_evals} evaluation samples restarted")
    return f"{source.slot} lost its work ({reason}): {', '.join(parts)}"
