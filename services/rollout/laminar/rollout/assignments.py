"""What an agent knows of the samples it was granted: pure bookkeeping, no sockets and no clocks.

    granted -> generating -> ended -> graded -> acknowledged        (each arrow but the last is an engine's or
                  |            |         |                           grader's event; any state may be dropped by
                  +------------+---------+--> dropped                a verdict, a CANCEL or a newer term)

Invariant: of each sample it keeps every token until the pool has acknowledged its end, so it can always send
again from where the pool says it stands. Events that name another (sample, term) than the one assigned are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from laminar.rollout.engine_messages import Ended, EngineRequest, RequestKey, TokenBlock
from laminar.rollout.grader_messages import GradeTask
from laminar.wire.codec import num_items
from laminar.wire.dataplane import (
    AppendItem,
    FinishItem,
    GradeItem,
    GroupGrant,
    ItemReply,
    Outcome,
    ProgressCall,
    ProgressReply,
    SampleGrant,
)

TOKEN_BYTES = 8
"""One token and its log-prob, packed."""
CALL_LIMIT_BYTES = 8 * 2**20
"""Of one progress call: 1 M tokens, far below what the pool's shell takes."""
BUFFER_LIMIT_BYTES = 64 * 2**20
"""8 M tokens that the pool has not got: minutes of its absence, then decoding pauses."""
_ITEM_BYTES = 128
"""About what names and framing of one item take."""
_GIVEN_BACK = frozenset({"error", "declined"})
"""Ends after which another replica generates the sample: nothing is graded here."""


@dataclass(frozen=True, slots=True)
class Who:
    """Who signs the calls."""

    slot: str
    incarnation: int


@dataclass(slots=True)
class Admission:
    """What follows from a grant: for the engine, and for the graders."""

    requests: list[EngineRequest] = field(default_factory=list[EngineRequest])
    aborts: list[RequestKey] = field(default_factory=list[RequestKey])
    """Older terms of samples that were granted anew."""
    gradings: list[GradeTask] = field(default_factory=list[GradeTask])


@dataclass(slots=True)
class _Sample:
    key: RequestKey
    prompt: str
    answer: str
    tokens: bytearray
    logprobs: bytearray
    durable: int
    """Tokens that the pool has for good; results of tools among them are known to it as such."""
    end: Ended | None = None
    end_acknowledged: bool = False
    grade: GradeItem | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // 4

    @property
    def num_unsent(self) -> int:
        return self.length - self.durable

    @property
    def has_result(self) -> bool:
        """An end or a grade waits to be sent."""
        return (self.end is not None and not self.end_acknowledged) or self.grade is not None

    def append_item(self, limit_bytes: int) -> AppendItem:
        """The next tokens to send, as many as fit into `limit_bytes` (at least one)."""
        first = self.durable
        count = min(self.num_unsent, max(1, limit_bytes // TOKEN_BYTES))
        part = slice(4 * first, 4 * (first + count))
        return AppendItem(
            id=self.key.sample,
            term=self.key.term,
            offset=first,
            tokens=bytes(self.tokens[part]),
            logprobs=bytes(self.logprobs[part]),
        )


class Assignments:
    """The samples of one incarnation."""

    def __init__(
        self, who: Who, *, call_limit_bytes: int = CALL_LIMIT_BYTES, buffer_limit_bytes: int = BUFFER_LIMIT_BYTES
    ) -> None:
        self._who = who
        self._call_limit_bytes = call_limit_bytes
        self._buffer_limit_bytes = buffer_limit_bytes
        self._samples: dict[str, _Sample] = {}

    @property
    def num_generating(self) -> int:
        return sum(sample.end is None for sample in self._samples.values())

    @property
    def num_unacknowledged(self) -> int:
        """Samples whose end the pool does not know yet: until it does, it takes them for running."""
        return sum(not sample.end_acknowledged for sample in self._samples.values())

    @property
    def num_grading(self) -> int:
        """Responses whose grade is still to come or to be told."""
        return sum(s.end is not None and s.end.reason not in _GIVEN_BACK for s in self._samples.values())

    @property
    def num_open(self) -> int:
        """Samples that still wait for something."""
        return len(self._samples)

    @property
    def unsent_bytes(self) -> int:
        """Tokens that only this process has."""
        return TOKEN_BYTES * sum(sample.num_unsent for sample in self._samples.values())

    @property
    def has_results(self) -> bool:
        """An end or a grade waits to be sent."""
        return any(sample.has_result for sample in self._samples.values())

    @property
    def has_unsent(self) -> bool:
        """Anything waits to be sent."""
        return any(sample.num_unsent or sample.has_result for sample in self._samples.values())

    def wants_pause(self, *, paused: bool) -> bool:
        """Whether decoding should stand still: from the buffer's limit on, until half of it is free again."""
        limit_bytes = self._buffer_limit_bytes // 2 if paused else self._buffer_limit_bytes
        return self.unsent_bytes > limit_bytes

    def admit(self, groups: Iterable[GroupGrant], temperature: float, *, decline: str = "") -> Admission:
        """Takes granted or adopted samples. A repeated grant changes nothing; a newer term replaces the older.

        With `decline`, those still to be generated cannot be generated here, for that reason: they are given back as
        they came, and the pool moves them. Those that have ended are graded in any case.
        """
        admission = Admission()
        for group in groups:
            for grant in group.samples:
                if self._is_new(grant, admission):
                    self._admit(group, grant, temperature, decline, admission)
        return admission

    def append(self, block: TokenBlock) -> None:
        """New tokens of the engine."""
        sample = self._find(block.key)
        if sample is not None:
            assert block.offset == sample.length, f"{block.key}: tokens at {block.offset}, expected {sample.length}"
            sample.tokens += block.tokens
            sample.logprobs += block.logprobs

    def end(self, ended: Ended) -> GradeTask | None:
        """The engine is done with a sample; what is to be graded, if anything is."""
        sample = self._find(ended.key)
        if sample is None or sample.end is not None:
            return None
        assert ended.length == sample.length, f"{ended.key}: ends at {ended.length}, has {sample.length}"
        sample.end = ended
        return None if ended.reason in _GIVEN_BACK else _grading(sample)

    def grade(self, item: GradeItem) -> None:
        """A grader's verdict."""
        sample = self._find(RequestKey(item.id, item.term))
        if sample is not None:
            sample.grade = item

    def cancel(self, ids: Sequence[str], terms: Sequence[int]) -> list[RequestKey]:
        """Forgets these samples up to their term; what the engine shall abort."""
        aborts: list[RequestKey] = []
        for name, term in zip(ids, terms, strict=True):
            sample = self._samples.get(name)
            if sample is not None and sample.key.term <= term:
                aborts += self._drop(sample)
        return aborts

    def next_call(self, *, everything: bool) -> ProgressCall | None:
        """What to send now: results with the tokens they need, and with `everything` all other new tokens too.

        None: nothing. What exceeds the call's limit stays for the next one.
        """
        appends: list[AppendItem] = []
        finishes: list[FinishItem] = []
        grades: list[GradeItem] = []
        room_bytes = self._call_limit_bytes
        for sample in sorted(self._samples.values(), key=lambda sample: not sample.has_result):
            if room_bytes <= 0 or not (sample.has_result or everything):
                break
            sent = sample.durable
            if sample.num_unsent:
                item = sample.append_item(room_bytes)
                appends.append(item)
                sent += num_items(item.tokens)
                room_bytes -= _ITEM_BYTES + TOKEN_BYTES * num_items(item.tokens)
            if sample.has_result and sent == sample.length:
                room_bytes -= _ITEM_BYTES
                if sample.end is not None and not sample.end_acknowledged:
                    finishes.append(_finish(sample.end))
                if sample.grade is not None:
                    grades.append(sample.grade)
        if not (appends or finishes or grades):
            return None
        return ProgressCall(
            slot=self._who.slot, incarnation=self._who.incarnation, appends=appends, finishes=finishes, grades=grades
        )

    def settle(self, call: ProgressCall, reply: ProgressReply) -> list[RequestKey]:
        """The pool's verdicts on `call`; returns what the engine shall abort."""
        aborts: list[RequestKey] = []
        for item, answer in zip(call.appends, reply.appends, strict=True):
            aborts += self._settle(item.id, item.term, answer)
        for item, answer in zip(call.finishes, reply.finishes, strict=True):
            aborts += self._settle(item.id, item.term, answer)
            sample = self._find(RequestKey(item.id, item.term))
            if sample is not None and answer.verdict is Outcome.OK:
                sample.end_acknowledged = True
                if item.reason in _GIVEN_BACK:
                    self._drop(sample)
        for item, answer in zip(call.grades, reply.grades, strict=True):
            sample = self._find(RequestKey(item.id, item.term))
            if sample is None or not sample.end_acknowledged:
                continue  # its end was refused in this very call: both are sent again
            aborts += self._settle(item.id, item.term, answer)
            if answer.verdict is Outcome.OK:
                self._drop(sample)
        return aborts

    def _settle(self, name: str, term: int, answer: ItemReply) -> list[RequestKey]:
        sample = self._find(RequestKey(name, term))
        if sample is None:
            return []
        match answer.verdict:
            case Outcome.OK:
                # A grade's or a repeated call's answer may name less than is known to be durable.
                sample.durable = max(sample.durable, min(answer.durable, sample.length))
                return []
            case Outcome.GAP:
                sample.durable = min(answer.durable, sample.length)
                return []
            case Outcome.SUPERSEDED | Outcome.ENDED | Outcome.MISMATCH | Outcome.UNKNOWN:
                return self._drop(sample)

    def _is_new(self, grant: SampleGrant, admission: Admission) -> bool:
        known = self._samples.get(grant.id)
        if known is None:
            return True
        if known.key.term >= grant.term:
            return False
        admission.aborts += self._drop(known)
        return True

    def _admit(
        self, group: GroupGrant, grant: SampleGrant, temperature: float, decline: str, admission: Admission
    ) -> None:
        sample = self._add(group, grant)
        if grant.finish_reason:
            sample.end = Ended(key=sample.key, length=sample.length, reason=grant.finish_reason)
            sample.end_acknowledged = True
            admission.gradings.append(_grading(sample))
        elif decline:
            sample.end = Ended(key=sample.key, length=sample.length, reason="declined", detail=decline)
        else:
            admission.requests.append(
                EngineRequest(
                    key=sample.key,
                    prompt=group.prompt_tokens,
                    response=grant.tokens,
                    max_new_tokens=grant.max_new_tokens,
                    seed=grant.seed,
                    temperature=temperature,
                    greedy=grant.greedy,
                )
            )

    def _add(self, group: GroupGrant, grant: SampleGrant) -> _Sample:
        sample = _Sample(
            key=RequestKey(grant.id, grant.term),
            prompt=group.prompt_text,
            answer=group.answer,
            tokens=bytearray(grant.tokens),
            logprobs=bytearray(grant.logprobs),
            durable=num_items(grant.tokens),
        )
        self._samples[grant.id] = sample
        return sample

    def _find(self, key: RequestKey) -> _Sample | None:
        sample = self._samples.get(key.sample)
        return sample if sample is not None and sample.key == key else None

    def _drop(self, sample: _Sample) -> list[RequestKey]:
        """Forgets it; its key if the engine still generates it."""
        del self._samples[sample.key.sample]
        return [sample.key] if sample.end is None else []


def _finish(ended: Ended) -> FinishItem:
    return FinishItem(
        id=ended.key.sample, term=ended.key.term, length=ended.length, reason=ended.reason, detail=ended.detail
    )


def _grading(sample: _Sample) -> GradeTask:
    assert sample.end is not None
    return GradeTask(sample.key, sample.prompt, bytes(sample.tokens), sample.answer, sample.end.reason)
