"""Members: incarnations, silence by the pool's own clock, and command streams."""

from __future__ import annotations

import asyncio

import pytest

from laminar.core.samples import Holder
from laminar.pool.members import (
    MAX_COMMANDS,
    SILENT_S,
    TICK_S,
    CommandStream,
    Members,
    OlderLife,
    SupersededIncarnation,
    Unregistered,
)
from laminar.pool.restore import StoredMember
from laminar.wire.dataplane import Command, CommandKind
from laminar.wire.messages import Heartbeat, MemberState, Register, Role


def call(nonce: str = "a", life: int = 1) -> Register:
    return Register(slot="rollout-0", role=Role.ROLLOUT, index=0, life=life, nonce=nonce)


def beat(incarnation: int = 1) -> Heartbeat:
    return Heartbeat(slot="rollout-0", incarnation=incarnation, state=MemberState.IDLE)


def ticked(members: Members, from_s: float, to_s: float) -> list[str]:
    """The slots that turned suspect while the pool ticked on time."""
    slots: list[str] = []
    now_s = from_s
    while now_s < to_s:
        now_s += TICK_S
        slots += [member.slot for member in members.tick(now_s)]
    return slots


def test_a_repeated_registration_is_the_same_life_and_a_new_nonce_is_the_next() -> None:
    members = Members([], 0.0)
    assert members.join(call("a"), 0.0).member.incarnation == 1
    again = members.join(call("a"), 1.0)
    assert (again.member.incarnation, again.is_new) == (1, False)
    other = members.join(call("b"), 2.0)
    assert other.superseded is not None
    assert (other.member.incarnation, other.superseded.holder) == (2, Holder("rollout-0", 1))
    with pytest.raises(SupersededIncarnation) as refused:
        members.heard("rollout-0", 1, 3.0)
    assert refused.value.current == 2


def test_incarnations_go_on_after_a_restart_of_the_pool() -> None:
    members = Members([StoredMember(call("a"), 7, fenced=False)], 100.0)
    assert members.join(call("b"), 100.0).member.incarnation == 8


def test_a_process_of_an_earlier_life_cannot_take_the_slot_back() -> None:
    members = Members([], 0.0)
    members.join(call("a", life=2), 0.0)
    with pytest.raises(OlderLife):
        members.join(call("b", life=1), 0.0)


def test_three_silent_seconds_make_a_suspect_and_a_heartbeat_ends_it() -> None:
    members = Members([], 0.0)
    members.join(call(), 0.0)
    assert ticked(members, 0.0, SILENT_S) == []
    assert ticked(members, SILENT_S, SILENT_S + 1) == ["rollout-0"]
    member, _ = members.beat(beat(), SILENT_S + 1)
    assert not member.suspect


def test_time_in_which_the_pool_itself_did_not_run_counts_for_nobody() -> None:
    members = Members([], 0.0)
    members.join(call(), 0.0)
    assert ticked(members, 0.0, 1.0) == []
    assert members.tick(31.0) == [], "it was stopped for 30 s"
    assert ticked(members, 31.0, 32.5) == []
    assert ticked(members, 32.5, 34.0) == ["rollout-0"], "a full silent period of its own has passed"


def test_who_falls_silent_right_after_a_pause_of_the_pool_is_suspect_as_soon_as_ever() -> None:
    members = Members([], 0.0)
    members.join(call(), 0.0)
    members.tick(TICK_S)
    members.beat(beat(), 30.0)  # read before the late tick
    assert members.tick(30.0) == []
    assert ticked(members, 30.0, 30.0 + SILENT_S + 2 * TICK_S) == ["rollout-0"]


def test_a_restarted_pool_grants_a_full_silent_period_to_members_it_knows_from_its_store() -> None:
    members = Members([StoredMember(call(), 3, fenced=False)], 1000.0)
    assert ticked(members, 1000.0, 1000.0 + SILENT_S) == []
    assert ticked(members, 1000.0 + SILENT_S, 1004.0) == ["rollout-0"]


def test_a_fenced_life_is_refused_for_ever_also_after_a_restart() -> None:
    members = Members([], 0.0)
    members.join(call(), 0.0)
    assert members.fence("rollout-0", 1) is not None
    assert members.fence("rollout-0", 1) is None, "a repeated fence changes nothing"
    for each in (members, Members([StoredMember(call(), 1, fenced=True)], 0.0)):
        with pytest.raises(SupersededIncarnation):
            each.beat(beat(), 1.0)


def test_an_unknown_member_is_told_to_register() -> None:
    with pytest.raises(Unregistered):
        Members([], 0.0).beat(beat(), 0.0)


def test_a_replica_that_holds_samples_and_makes_no_progress_is_stalled() -> None:
    members = Members([], 0.0)
    member = members.join(call(), 0.0).member
    assert members.judge_progress(set(), 61.0, 60.0) == [], "an idle replica never stalls"
    assert members.judge_progress({member.holder}, 120.0, 60.0) == []
    assert members.judge_progress({member.holder}, 122.0, 60.0) == [member]
    assert members.judge_progress({member.holder}, 123.0, 60.0) == [], "it is said once"


def test_a_closed_command_stream_makes_a_suspect_unless_another_took_its_place() -> None:
    async def play() -> None:
        members = Members([], 0.0)
        members.join(call(), 0.0)
        first = members.open_stream("rollout-0", 1, 0.0)
        second = members.open_stream("rollout-0", 1, 1.0)
        assert first.closed
        assert members.close_stream("rollout-0", first, 0.0) is None
        gone = members.close_stream("rollout-0", second, 0.0)
        assert gone is not None and gone.suspect and not gone.usable

    asyncio.run(play())


def test_a_stream_that_ends_after_the_pool_stood_still_makes_no_suspect_but_silence_does() -> None:
    """Replicas give up a stream that brings no ping for 5 s: after a pause of the pool all of them do at once."""

    async def scenario() -> None:
        members = Members([], 0.0)
        members.join(call(), 0.0)
        members.tick(TICK_S)
        stream = members.open_stream("rollout-0", 1, TICK_S)
        assert members.close_stream("rollout-0", stream, 6.0) is None  # before the late tick
        stream = members.open_stream("rollout-0", 1, 6.0)
        members.tick(6.0)
        assert members.close_stream("rollout-0", stream, 6.1) is None  # after it
        assert ticked(members, 6.1, 15.0) == ["rollout-0"]

    asyncio.run(scenario())


def test_commands_are_delivered_in_order_and_a_reader_that_never_reads_is_cut_off() -> None:
    async def play() -> None:
        stream = CommandStream()
        assert await stream.take(0.0) == []
        for reason in "ab":
            stream.send(Command(kind=CommandKind.CANCEL, reason=reason))
        assert [command.reason for command in await stream.take(1.0)] == ["a", "b"]
        for _ in range(MAX_COMMANDS + 1):
            stream.send(Command(kind=CommandKind.PING))
        assert stream.closed

    asyncio.run(play())
