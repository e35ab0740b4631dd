"""The agent's books: every token is kept until the pool has its end, and late events change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.rollout.assignments import Assignments, Who
from laminar.rollout.engine_messages import Ended, RequestKey, TokenBlock
from laminar.wire.codec import pack_logprobs, pack_tokens, unpack_tokens
from laminar.wire.dataplane import (
    GradeItem,
    GroupGrant,
    ItemReply,
    Outcome,
    ProgressCall,
    ProgressReply,
    SampleGrant,
)


def group(*samples: SampleGrant) -> GroupGrant:
    return GroupGrant(
        group="0/1", prompt_tokens=pack_tokens([5, 6]), prompt_text="2+2=", answer="4", samples=list(samples)
    )


def grant(name: str = "a", term: int = 1, tokens: list[int] | None = None, **changes: Any) -> SampleGrant:
    had = tokens or []
    return SampleGrant(
        id=name, index=0, term=term, seed=9, max_new_tokens=20,
        tokens=pack_tokens(had), logprobs=pack_logprobs([-0.5] * len(had)), **changes,
    )  # fmt: skip


def block(offset: int, tokens: list[int], name: str = "a", term: int = 1) -> TokenBlock:
    return TokenBlock(
        key=RequestKey(name, term), offset=offset, tokens=pack_tokens(tokens),
        logprobs=pack_logprobs([-1.0] * len(tokens)),
    )  # fmt: skip


def ended(length: int, reason: str = "stop", name: str = "a", term: int = 1) -> Ended:
    return Ended(key=RequestKey(name, term), length=length, reason=reason)


def book_with(*samples: SampleGrant, call_limit_bytes: int = 2**20) -> Assignments:
    book = Assignments(Who("rollout-0", 4), call_limit_bytes=call_limit_bytes)
    book.admit([group(*samples)], temperature=0.7)
    return book


def take(book: Assignments, *, everything: bool = True) -> ProgressCall:
    call = book.next_call(everything=everything)
    assert call is not None
    return call


def accept(call: ProgressCall, **verdicts: Outcome) -> ProgressReply:
    """The answer of a pool that makes everything durable, or says what `verdicts` says of a sample."""

    def replies(items: list) -> list[ItemReply]:
        return [ItemReply(id=item.id, verdict=verdicts.get(item.id, Outcome.OK), durable=10**6) for item in items]

    return ProgressReply(appends=replies(call.appends), finishes=replies(call.finishes), grades=replies(call.grades))


def sent_tokens(call: ProgressCall) -> dict[str, tuple[int, list[int]]]:
    return {item.id: (item.offset, unpack_tokens(item.tokens)) for item in call.appends}


def test_a_sample_goes_from_grant_to_acknowledged_grade() -> None:
    book = book_with(grant())
    book.append(block(0, [7, 8]))
    call = take(book)
    assert (call.slot, call.incarnation) == ("rollout-0", 4)
    assert sent_tokens(call) == {"a": (0, [7, 8])}
    assert book.settle(call, accept(call)) == []
    assert book.next_call(everything=True) is None
    book.append(block(2, [1]))
    task = book.end(ended(3))
    assert task is not None
    assert (unpack_tokens(task.tokens), task.prompt, task.answer, task.finish_reason) == (
        [7, 8, 1],
        "2+2=",
        "4",
        "stop",
    )
    assert book.num_generating == 0
    call = take(book, everything=False)
    assert sent_tokens(call) == {"a": (2, [1])}
    assert [(item.length, item.reason) for item in call.finishes] == [(3, "stop")]
    book.settle(call, accept(call))
    book.grade(GradeItem(id="a", term=1, status="ok", reward=1.0, parts={"answer": 1.0}))
    call = take(book, everything=False)
    assert (call.appends, call.finishes, len(call.grades)) == ([], [], 1)
    book.settle(call, accept(call))
    assert book.num_open == 0


def test_tokens_alone_wait_for_the_call_that_carries_everything() -> None:
    book = book_with(grant("a"), grant("b"))
    book.append(block(0, [7], "a"))
    book.append(block(0, [8], "b"))
    assert book.next_call(everything=False) is None
    book.end(ended(1, name="b"))
    assert sent_tokens(take(book, everything=False)) == {"b": (0, [8])}


def test_tokens_that_are_not_durable_yet_are_sent_again() -> None:
    book = book_with(grant())
    book.append(block(0, [7, 8, 9]))
    call = take(book)
    book.settle(call, ProgressReply(appends=[ItemReply(id="a", verdict=Outcome.OK, durable=1)]))
    assert sent_tokens(take(book)) == {"a": (1, [8, 9])}


def test_a_gap_is_filled_from_where_the_pool_stands_even_before_the_grant() -> None:
    book = book_with(grant(tokens=[1, 2, 3]))
    book.append(block(3, [4]))
    book.end(ended(4))
    call = take(book)
    assert sent_tokens(call) == {"a": (3, [4])}
    gap = ItemReply(id="a", verdict=Outcome.GAP, durable=2)
    book.settle(call, ProgressReply(appends=[gap], finishes=[gap]))
    again = take(book)
    assert sent_tokens(again) == {"a": (2, [3, 4])}
    assert len(again.finishes) == 1


def test_a_grade_outlives_the_refusal_of_its_end_in_the_same_call() -> None:
    book = book_with(grant())
    book.append(block(0, [4]))
    book.end(ended(1))
    book.grade(GradeItem(id="a", term=1, status="ok", reward=1.0))
    call = take(book)
    gap, unknown = ItemReply(id="a", verdict=Outcome.GAP), ItemReply(id="a", verdict=Outcome.UNKNOWN)
    book.settle(call, ProgressReply(appends=[gap], finishes=[gap], grades=[unknown]))
    again = take(book)
    assert (len(again.appends), len(again.finishes), len(again.grades)) == (1, 1, 1)


@pytest.mark.parametrize("verdict", [Outcome.SUPERSEDED, Outcome.MISMATCH, Outcome.UNKNOWN])
def test_a_refused_sample_is_aborted_and_forgotten(verdict: Outcome) -> None:
    book = book_with(grant("a"), grant("b"))
    book.append(block(0, [7], "a"))
    book.append(block(0, [7], "b"))
    call = take(book)
    assert book.settle(call, accept(call, a=verdict)) == [RequestKey("a", 1)]
    assert (book.num_generating, book.num_open) == (1, 1)
    book.append(block(1, [8], "a"))
    assert book.end(ended(2, name="a")) is None
    assert not book.has_unsent


def test_a_repeated_grant_changes_nothing_and_a_newer_term_replaces_the_older() -> None:
    book = book_with(grant())
    book.append(block(0, [7]))
    assert book.admit([group(grant())], 0.7).requests == []
    moved = book.admit([group(grant(term=3, tokens=[7, 8]))], 0.7)
    assert moved.aborts == [RequestKey("a", 1)]
    assert [(item.key, unpack_tokens(item.response)) for item in moved.requests] == [(RequestKey("a", 3), [7, 8])]
    book.append(block(1, [9]))  # the engine's late word on term 1
    assert not book.has_unsent
    book.append(block(2, [9], term=3))
    assert sent_tokens(take(book)) == {"a": (2, [9])}


def test_a_verdict_on_an_old_term_does_not_touch_the_new_one() -> None:
    book = book_with(grant())
    book.append(block(0, [7]))
    call = take(book)
    book.admit([group(grant(term=2))], 0.7)
    assert book.settle(call, accept(call, a=Outcome.SUPERSEDED)) == []
    assert book.num_generating == 1


def test_a_cancel_reaches_up_to_its_term() -> None:
    book = book_with(grant("a", term=2), grant("b", term=2))
    assert book.cancel(["a", "b", "c"], [1, 2, 9]) == [RequestKey("b", 2)]
    assert book.num_open == 1


def test_a_finished_sample_is_only_graded() -> None:
    book = Assignments(Who("rollout-0", 4))
    admission = book.admit([group(grant(tokens=[7, 1], finish_reason="stop"))], 0.7)
    assert admission.requests == []
    assert [unpack_tokens(task.tokens) for task in admission.gradings] == [[7, 1]]
    assert not book.has_unsent
    book.grade(GradeItem(id="a", term=1, status="ungraded", detail="it hung"))
    call = take(book)
    assert (call.finishes, [item.status for item in call.grades]) == ([], ["ungraded"])
    book.settle(call, accept(call))
    assert book.num_open == 0


def test_what_cannot_be_generated_here_is_given_back_as_it_came_without_a_grade() -> None:
    book = Assignments(Who("rollout-0", 4))
    ended_elsewhere = grant("b", tokens=[7, 1], finish_reason="stop")
    admission = book.admit([group(grant(tokens=[7]), ended_elsewhere)], 0.7, decline="another version")
    assert (admission.requests, [task.key.sample for task in admission.gradings]) == ([], ["b"])
    call = take(book, everything=False)
    assert [(item.reason, item.length, item.detail) for item in call.finishes] == [("declined", 1, "another version")]
    book.settle(call, accept(call))
    assert (book.num_open, book.num_unacknowledged) == (1, 0)
    failing = book_with(grant())
    assert failing.end(ended(0, reason="error")) is None


def test_a_call_stays_below_its_limit_and_an_end_waits_for_its_last_token() -> None:
    book = book_with(grant(), call_limit_bytes=80)
    book.append(block(0, list(range(15))))
    book.end(ended(15))
    first = take(book)
    assert sent_tokens(first) == {"a": (0, list(range(10)))}
    assert first.finishes == []
    book.settle(first, ProgressReply(appends=[ItemReply(id="a", verdict=Outcome.OK, durable=10)]))
    second = take(book)
    assert sent_tokens(second) == {"a": (10, list(range(10, 15)))}
    assert len(second.finishes) == 1


def test_the_buffer_counts_what_only_this_process_has() -> None:
    book = book_with(grant(tokens=[1, 2]))
    book.append(block(2, [3, 4, 5]))
    assert book.unsent_bytes == 24
    call = take(book)
    book.settle(call, accept(call))
    assert book.unsent_bytes == 0


def test_decoding_pauses_at_the_buffers_limit_and_goes_on_when_half_of_it_is_free() -> None:
    book = Assignments(Who("rollout-0", 4), buffer_limit_bytes=80)
    book.admit([group(grant())], 0.7)
    book.append(block(0, list(range(10))))
    assert not book.wants_pause(paused=False)
    book.append(block(10, [1]))
    assert book.wants_pause(paused=False)
    call = take(book)
    book.settle(call, ProgressReply(appends=[ItemReply(id="a", verdict=Outcome.OK, durable=5)]))
    assert book.wants_pause(paused=True)
    book.settle(call, ProgressReply(appends=[ItemReply(id="a", verdict=Outcome.OK, durable=6)]))
    assert not book.wants_pause(paused=True)
