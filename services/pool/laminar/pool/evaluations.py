"""What replicas lease, write and lose of evaluations. Their samples are named `eval/...` on the wire.

Responses are not kept while they grow: an evaluation sample whose replica is lost starts again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from laminar.core.decisions import Loss, Outcome
from laminar.core.evaluation import EvalKey, EvalSample, EvaluationRound
from laminar.core.losses import MAX_DEATHS
from laminar.core.samples import Holder
from laminar.core.writes import MAX_GENERATION_FAILURES
from laminar.pool.books import Books
from laminar.wire.codec import num_items
from laminar.wire.dataplane import AppendItem, FinishItem, GradeItem, ItemReply

EVAL_PREFIX = "eval/"
LEASES_OF_RUNNING = 2
"""An evaluation lease holds this many times what the engine decodes together: no slot idles, and replicas share."""


@dataclass(frozen=True, slots=True)
class EvalVerdict:
    """A grade that counted: for the watch over broken rewards."""

    finish_reason: str
    reward: float | None


class Evaluations:
    """Decides on the rounds in the books; the caller commits before it answers."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._failures: Counter[EvalKey] = Counter()
        self._deaths: Counter[EvalKey] = Counter()

    def lease(self, round_: EvaluationRound, holder: Holder, max_running: int) -> list[EvalSample]:
        return round_.lease(holder, LEASES_OF_RUNNING * max_running)

    def append(self, item: AppendItem, holder: Holder) -> ItemReply:
        owner = self._owner(item.id, item.term, holder)
        verdict = Outcome.OK if owner else Outcome.SUPERSEDED
        return ItemReply(id=item.id, verdict=verdict, durable=item.offset + num_items(item.tokens))

    def finish(self, item: FinishItem, holder: Holder) -> ItemReply:
        owner = self._owner(item.id, item.term, holder)
        if owner is None:
            return ItemReply(id=item.id, verdict=Outcome.SUPERSEDED)
        round_, key = owner
        if item.reason == "error":
            self._failures[key] += 1
            if self._failures[key] >= MAX_GENERATION_FAILURES:
                round_.grade(holder, key, item.term, None)
                return ItemReply(id=item.id, verdict=Outcome.OK)
        reason = "error" if item.reason == "declined" else item.reason
        round_.finish(holder, key, item.term, item.length, reason)
        return ItemReply(id=item.id, verdict=Outcome.OK, durable=item.length)

    def grade(self, item: GradeItem, holder: Holder, reward: float | None) -> tuple[ItemReply, EvalVerdict | None]:
        owner = self._owner(item.id, item.term, holder)
        if owner is None or not owner[0].grade(holder, owner[1], item.term, reward):
            return ItemReply(id=item.id, verdict=Outcome.SUPERSEDED), None
        finish_reason = owner[0].samples[owner[1]].finish_reason
        return ItemReply(id=item.id, verdict=Outcome.OK), EvalVerdict(finish_reason, reward)

    def lose(self, source: Holder, loss: Loss) -> int:
        """What `source` held starts again; the number of samples. One that was running in too many lives when they
        died counts as ungraded."""
        number = 0
        for round_ in self._books.rounds.values():
            held = round_.held_by(source)
            if loss is not Loss.LEFT:
                # A suspicion counts as well: an evaluation must end, and a sample of it may be left out.
                for sample in held:
                    self._deaths[sample.key] += not sample.finish_reason
                    if self._deaths[sample.key] > MAX_DEATHS:
                        round_.grade(source, sample.key, sample.term, None)
            round_.lose(source)
            number += len(held)
        return number

    def _owner(self, id_: str, term: int, holder: Holder) -> tuple[EvaluationRound, EvalKey] | None:
        """The evaluation in which this life of a replica may write this sample now."""
        try:
            key = EvalKey.parse(id_)
        except ValueError:
            return None
        round_ = self._books.rounds.get(key.point)
        return (round_, key) if round_ is not None and round_.owns(holder, key, term) else None
