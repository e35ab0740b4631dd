"""What a replica writes of the samples it holds: tokens, ends, grades. Every call may be repeated.

A message is judged before anything changes: of a sample that was never admitted (unknown), that has ended (late), of
another term or life (superseded), out of place (gap), or against what is durable (mismatch). Each refusal is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.core.accounts import Accounts
from laminar.core.batches import Batches
from laminar.core.decisions import Outcome, WriteResult
from laminar.core.identity import SampleKey
from laminar.core.samples import DiscardReason, Holder, Sample, SampleEvent, SampleState, ToolSpan
from laminar.core.versions import VersionRegister

MAX_GENERATION_FAILURES = 3
"""Infrastructure failures after which a sample is given up as `failed`."""


class Writes:
    """Invariant: only the holder of a sample's current term changes it, and a partial never shrinks."""

    def __init__(self, accounts: Accounts, batches: Batches, register: VersionRegister) -> None:
        self._accounts, self._batches, self._register = accounts, batches, register

    def append(
        self, holder: Holder, key: SampleKey, term: int, offset: int, tokens: bytes, logprobs: bytes,
        tool_call: int | None = None,
    ) -> WriteResult:  # fmt: skip
        """Tokens [offset, offset + n), the model's or all of one tool call's. What is durable already must be equal;
        a gap is refused with the durable length."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if len(tokens) != len(logprobs) or len(tokens) % 4 or offset < 0:
            return self._refuse(Outcome.MISMATCH, sample.length)
        if offset > sample.length:
            return self._refuse(Outcome.GAP, sample.length)
        known = min(sample.length - offset, len(tokens) // 4)
        start = 4 * offset
        if bytes(sample.tokens[start : start + 4 * known]) != tokens[: 4 * known]:
            return self._refuse(Outcome.MISMATCH, sample.length)
        if not _is_of_kind(sample.tools, offset, offset + known, tool_call):
            return self._refuse(Outcome.MISMATCH, sample.length)
        new_tokens, new_logprobs = tokens[4 * known :], logprobs[4 * known :]
        if not new_tokens:
            return self._repeated(sample) if tokens else WriteResult(Outcome.OK, sample.length)
        too_much = sample.length + len(new_tokens) // 4 > self._accounts.plan.max_response_tokens
        if sample.state is not SampleState.LEASED or too_much:
            return self._refuse(Outcome.MISMATCH, sample.length)
        if tool_call is not None:
            _extend_span(sample.tools, sample.length, len(new_tokens) // 4, tool_call)
            self._accounts.touch(sample)
        self._accounts.extend(sample, new_tokens, new_logprobs)
        return WriteResult(Outcome.OK, sample.length)

    def finish(
        self, holder: Holder, key: SampleKey, term: int, length: int, reason: str, detail: str, now_wall_s: float
    ) -> WriteResult:
        """Generation ended. The first valid finish wins; "error" is an infrastructure failure: the sample restarts
        elsewhere, at most MAX_GENERATION_FAILURES times, and is never a reward of 0."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if sample.state is not SampleState.LEASED:
            return self._repeated(sample)
        if reason == "error":
            return self._fail(sample, detail)
        if length != sample.length:
            return self._refuse(Outcome.GAP, sample.length)
        sample.move_to(SampleEvent.FINISH)
        sample.finish_reason = reason
        sample.finished_wall_s = now_wall_s
        newest = self._register.newest
        assert newest is not None and sample.version is not None
        age = self._register.age(sample.version, newest.version)
        sample.inherent, sample.across_rollback = age.steps, age.across_rollback
        self._accounts.touch(sample)
        return WriteResult(Outcome.OK, sample.length)

    def decline(self, holder: Holder, key: SampleKey, term: int) -> WriteResult:
        """The replica has other weights by now and gives the sample back as it came: no failure of anybody's."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if sample.state is not SampleState.LEASED:
            return self._repeated(sample)
        self._accounts.park(sample)
        return WriteResult(Outcome.OK, sample.length)

    def grade(
        self, holder: Holder, key: SampleKey, term: int, reward: float | None, parts: Mapping[str, float], detail: str
    ) -> WriteResult:
        """The verdict; `reward` None: ungraded, left out of the group's statistics."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if sample.state is not SampleState.FINISHED:
            return self._refuse(Outcome.GAP, sample.length)
        if reward is None:
            self._accounts.discard(sample, DiscardReason.UNGRADED, detail)
        else:
            sample.move_to(SampleEvent.GRADE)
            sample.reward, sample.parts, sample.detail = reward, dict(parts), detail
            self._accounts.assign(sample, None)
        self._batches.settle(self._accounts.groups[key.group])
        return WriteResult(Outcome.OK, sample.length)

    def _fail(self, sample: Sample, detail: str) -> WriteResult:
        sample.failures += 1
        if sample.failures < MAX_GENERATION_FAILURES:
            self._accounts.restart(sample)
        else:
            self._accounts.discard(sample, DiscardReason.FAILED, detail)
            self._batches.settle(self._accounts.groups[sample.key.group])
        return WriteResult(Outcome.OK, 0)

    def _writable(self, holder: Holder, key: SampleKey, term: int) -> tuple[Sample | None, WriteResult]:
        sample = self._accounts.sample(key)
        if sample is None:
            plan, stream = self._accounts.plan, self._accounts.stream
            admitted = 0 <= key.index < plan.samples_per_prompt and stream.has_drawn(key.group)
            return None, self._refuse(Outcome.ENDED if admitted else Outcome.UNKNOWN, 0)
        if sample.state is SampleState.DISCARDED:
            return None, self._refuse(Outcome.ENDED, sample.length)
        if term > sample.term:
            return None, self._refuse(Outcome.UNKNOWN, sample.length)
        if sample.term == term and sample.state in (SampleState.GRADED, SampleState.BATCHED):
            return None, self._repeated(sample)
        if sample.term != term or sample.holder != holder:
            return None, self._refuse(Outcome.SUPERSEDED, sample.length)
        return sample, WriteResult(Outcome.OK, sample.length)

    def _repeated(self, sample: Sample) -> WriteResult:
        self._accounts.counters.repeated += 1
        return WriteResult(Outcome.OK, sample.length)

    def _refuse(self, outcome: Outcome, durable: int) -> WriteResult:
        self._accounts.counters.refused[outcome.value] += 1
        return WriteResult(outcome, durable)


def _is_of_kind(tools: list[ToolSpan], start: int, end: int, call: int | None) -> bool:
    """Whether the durable tokens [start, end) are all the model's (`call` None), or all of this call."""
    covered = 0
    for span in tools:
        overlap = min(end, span.start + span.length) - max(start, span.start)
        if overlap > 0 and span.call != call:
            return False
        covered += max(0, overlap)
    return call is None or covered == end - start


def _extend_span(tools: list[ToolSpan], start: int, length: int, call: int) -> None:
    last = tools[-1] if tools else None
    if last is not None and last.call == call and last.start + last.length == start:
        tools[-1] = ToolSpan(last.start, last.length + length, call)
    else:
        tools.append(ToolSpan(start, length, call))
