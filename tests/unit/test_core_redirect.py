"""Redirect, kept versions, poison and tool segments: where a lost replica's trajectories go, one rule a test."""

from __future__ import annotations

import pytest

from laminar.core.decisions import Fate, Grant, LedgerPlan, Loss, Outcome, Refresh
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.leases import MAX_RELOADS
from laminar.core.ledger import Ledger
from laminar.core.redirect import Destination, Lost, plan_redirect
from laminar.core.samples import DiscardReason, Holder, Sample, SampleState, ToolSpan
from laminar.core.schedule import make_schedule
from laminar.core.versions import VersionRegister
from laminar.wire.codec import pack_logprobs, pack_tokens

A, B, C = (Holder(f"rollout-{index}", 1) for index in range(3))


class Scene:
    """A ledger with versions to publish and replicas that lease and stream."""

    def __init__(self, groups_per_lease: int = 1) -> None:
        plan = LedgerPlan(
            steps=9, prompts_per_step=4, samples_per_prompt=2, groups_per_lease=groups_per_lease, max_ahead_steps=2,
            num_prompts=20, seed=0, max_response_tokens=8,
        )  # fmt: skip
        self.register = VersionRegister()
        self.ledger = Ledger(plan, make_schedule("laminar"), self.register)
        self.version = -1

    def publish(self) -> int:
        parent = None if self.version < 0 else self.version
        self.version = self.register.reserve(1, self.version + 1, parent).version
        self.register.report_complete(self.version, f"d{self.version}", "relay-0", 1)
        return self.version

    def lease(self, holder: Holder, version: int, kept: frozenset[int] | None = frozenset()) -> list[Sample]:
        decision = self.ledger.lease(holder, version, 0.0, kept)
        assert isinstance(decision, Grant), decision
        return list(decision.samples)

    def stream(self, holder: Holder, samples: list[Sample], count: int = 3) -> None:
        for sample in samples:
            tokens = list(range(sample.length, sample.length + count))
            result = self.append(holder, sample, sample.length, tokens)
            assert result is Outcome.OK

    def append(
        self, holder: Holder, sample: Sample, offset: int, tokens: list[int], call: int | None = None
    ) -> Outcome:
        logprobs = pack_logprobs([0.0 if call is not None else -1.0] * len(tokens))
        writes = self.ledger.writes
        return writes.append(holder, sample.key, sample.term, offset, pack_tokens(tokens), logprobs, call).outcome

    def finish(self, holder: Holder, sample: Sample, reason: str = "stop") -> Outcome:
        return self.ledger.writes.finish(holder, sample.key, sample.term, sample.length, reason, "", 0.0).outcome

    def grade(self, holder: Holder, sample: Sample, reward: float = 1.0) -> Outcome:
        return self.ledger.writes.grade(holder, sample.key, sample.term, reward, {}, "").outcome


def lost(index: int, length: int, *, version: int = 4, ended: bool = False) -> Lost:
    return Lost(SampleKey(GroupKey(0, 0), index), version, length, ended)


@pytest.mark.parametrize(
    ("sample", "destinations", "kept", "fate", "to"),
    [
        (lost(0, 5), [Destination(A, 4, 1)], frozenset[int](), Fate.MOVED, A),
        (lost(0, 5), [Destination(A, 4, 1), Destination(B, 4, 2)], frozenset[int](), Fate.MOVED, B),
        (lost(0, 5), [Destination(A, 4, 1)], frozenset({4}), Fate.MOVED, A),
        (lost(0, 5), [Destination(A, 4, 0)], frozenset({4}), Fate.PARKED, None),
        (lost(0, 5), [Destination(A, 5, 9), Destination(B, None, 9)], frozenset({4, 5}), Fate.PARKED, None),
        (lost(0, 5), [Destination(A, 5, 9)], frozenset({5}), Fate.RESTARTED, None),
        (lost(0, 5), [], None, Fate.PARKED, None),
        (lost(0, 0), [], frozenset({4}), Fate.RESTARTED, None),
        (lost(0, 0), [Destination(A, 4, 1)], frozenset[int](), Fate.MOVED, A),
        (lost(0, 5, ended=True), [Destination(A, 5, 0)], frozenset[int](), Fate.MOVED, A),
        (lost(0, 5, ended=True), [], frozenset({4}), Fate.UNGRADED, None),
    ],
)
def test_same_version_with_room_comes_first_a_kept_version_second_a_restart_third(
    sample: Lost, destinations: list[Destination], kept: frozenset[int] | None, fate: Fate, to: Holder | None
) -> None:
    (decision,) = plan_redirect([sample], destinations, kept)
    assert (decision.fate, decision.to) == (fate, to)


def test_the_longest_partials_get_the_room() -> None:
    plan = plan_redirect([lost(0, 2), lost(1, 9), lost(2, 5)], [Destination(A, 4, 2)])
    assert [(p.key.index, p.fate) for p in plan] == [(1, Fate.MOVED), (2, Fate.MOVED), (0, Fate.RESTARTED)]


def test_a_partial_of_a_kept_version_continues_on_the_next_idle_replica_which_loads_it() -> None:
    scene = Scene()
    v0 = scene.publish()
    samples = scene.lease(A, v0)
    scene.stream(A, samples)
    v1, kept = scene.publish(), frozenset({0, 1})
    fates = {m.fate for m in scene.ledger.lose(A, [Destination(B, v1, 9)], "lost", kept=kept)}
    assert fates == {Fate.PARKED}
    assert scene.ledger.unfinished_versions() == [v0], "relays are asked to retain it"
    assert scene.ledger.lease(B, v1, 0.0, kept) == Refresh(v0, num_parked=2)
    assert isinstance(scene.ledger.lease(C, v1, 0.0, kept), Grant), "one replica is enough for one lease of them"
    again = scene.lease(B, v0, kept)
    assert again == samples and {(s.version, s.length) for s in again} == {(v0, 3)}
    scene.stream(B, again)
    for sample in again:
        assert (scene.finish(B, sample), scene.grade(B, sample)) == (Outcome.OK, Outcome.OK)
    assert scene.ledger.lease(B, v0, 0.0, kept) == Refresh(v1), "then it is as any other replica"
    counters = scene.ledger.counters
    assert (counters.parked_samples, counters.restarted_samples, counters.restarted_tokens) == (2, 0, 0)


def test_partials_of_the_newest_version_wait_for_whoever_has_it() -> None:
    scene = Scene()
    v0 = scene.publish()
    samples = scene.lease(A, v0)
    scene.stream(A, samples)
    scene.ledger.lose(A, [], "lost", kept=frozenset({v0}))
    assert scene.lease(B, v0) == samples


def test_more_partials_than_a_lease_holds_are_loaded_by_several_replicas() -> None:
    scene = Scene(groups_per_lease=3)
    v0 = scene.publish()
    scene.stream(A, scene.lease(A, v0))
    v1, kept = scene.publish(), frozenset({0, 1})
    scene.ledger.lose(A, [], "lost", kept=kept)
    small = scene.ledger
    assert small.lease(B, v1, 0.0, kept) == Refresh(v0, num_parked=6)
    assert isinstance(small.lease(C, v1, 0.0, kept), Grant)
    # The first one is lost on the way: another takes its place.
    small.lose(B, [], "lost", kept=kept)
    small.lose(C, [], "lost", kept=kept)
    assert small.lease(C, v1, 0.0, kept) == Refresh(v0, num_parked=6)


def test_a_version_that_no_replica_manages_to_load_is_given_up() -> None:
    scene = Scene()
    v0 = scene.publish()
    samples = scene.lease(A, v0)
    scene.stream(A, samples)
    v1, kept = scene.publish(), frozenset({0, 1})
    scene.ledger.lose(A, [], "lost", kept=kept)
    for _ in range(MAX_RELOADS):
        assert scene.ledger.lease(B, v1, 0.0, kept) == Refresh(v0, num_parked=2)
    assert scene.lease(B, v1, kept) == samples, "the last failure makes them start again, with the weights at hand"
    assert scene.ledger.counters.restarted_tokens == 6


def test_partials_start_again_once_no_relay_has_their_version_and_not_while_that_is_unknown() -> None:
    scene = Scene()
    v0 = scene.publish()
    samples = scene.lease(A, v0)
    scene.stream(A, samples)
    v1 = scene.publish()
    scene.ledger.lose(A, [], "lost", kept=None)
    assert {s.is_parked for s in samples} == {True}
    assert isinstance(scene.ledger.lease(B, v1, 0.0, None), Grant), "others go on meanwhile"
    assert scene.ledger.restart_unkept(frozenset({0, 1})) == []
    restarted = scene.ledger.restart_unkept(frozenset({1}))
    assert [(s, tokens) for s, tokens in restarted] == [(samples[0], 3), (samples[1], 3)]
    assert {(s.state, s.version, s.length) for s in samples} == {(SampleState.PENDING, None, 0)}
    assert set(scene.ledger.drain().cleared) == {s.key for s in samples}


def test_a_sample_that_was_given_back_is_no_failure_and_keeps_its_tokens() -> None:
    """An adoption that meets a replica which is loading other weights."""
    scene = Scene()
    v0 = scene.publish()
    sample = scene.lease(A, v0)[0]
    scene.stream(A, [sample])
    term = sample.term
    assert scene.ledger.writes.decline(A, sample.key, term).outcome is Outcome.OK
    assert (sample.is_parked, sample.length, sample.failures) == (True, 3, 0)
    assert scene.ledger.writes.decline(A, sample.key, term).outcome is Outcome.SUPERSEDED


def test_no_trajectory_exceeds_its_budget_after_a_redirect() -> None:
    scene = Scene()
    v0 = scene.publish()
    (sample, _) = scene.lease(A, v0)
    scene.stream(A, [sample], 6)
    scene.ledger.lose(A, [Destination(B, v0, 9)], "lost")
    assert scene.append(B, sample, 6, [6, 7]) is Outcome.OK
    assert scene.append(B, sample, 8, [8]) is Outcome.MISMATCH
    assert sample.length == scene.ledger.plan.max_response_tokens


# --- poison -------------------------------------------------------------------------------------------------------


def dead_with(scene: Scene, holder: Holder) -> list[Sample]:
    samples = scene.lease(holder, scene.version)
    scene.ledger.lose(holder, [], "dead", loss=Loss.DEAD)
    return samples


def test_a_sample_that_ran_in_two_lives_when_they_died_is_set_aside_and_counted() -> None:
    scene = Scene()
    scene.publish()
    samples = dead_with(scene, A)
    assert {s.state for s in samples} == {SampleState.PENDING}, "one death condemns nobody"
    scene.lease(B, scene.version)
    moved = scene.ledger.lose(B, [], "dead", loss=Loss.DEAD)
    assert [(m.fate, m.source) for m in moved] == [(Fate.POISONED, B)] * 2
    assert {(s.state, s.reason) for s in samples} == {(SampleState.DISCARDED, DiscardReason.FAILED)}
    assert "rollout-0#1, rollout-1#1" in samples[0].detail
    counters = scene.ledger.counters
    assert (counters.poisoned_samples, counters.discarded) == (2, {DiscardReason.FAILED: 2})
    assert scene.ledger.groups == {}, "the group is gone; another prompt is drawn"


@pytest.mark.parametrize("second", [Loss.SUSPECT, Loss.LEFT])
def test_suspicion_and_leaving_are_no_deaths(second: Loss) -> None:
    scene = Scene()
    scene.publish()
    samples = dead_with(scene, A)
    scene.lease(B, scene.version)
    scene.ledger.lose(B, [], "lost", loss=second)
    assert {s.state for s in samples} == {SampleState.PENDING}


def test_a_suspects_death_is_held_against_what_it_ran_even_if_that_runs_elsewhere_by_now() -> None:
    scene = Scene()
    scene.publish()
    samples = dead_with(scene, A)
    assert scene.lease(B, scene.version) == samples
    scene.ledger.lose(B, [], "suspect", loss=Loss.SUSPECT)
    assert scene.lease(C, scene.version) == samples
    moved = scene.ledger.lose(B, [], "a new incarnation registered", loss=Loss.DEAD)
    assert [(m.fate, m.source, m.ended_term) for m in moved] == [(Fate.POISONED, C, s.term) for s in samples]


def test_a_suspect_that_is_heard_again_absolves_what_it_ran() -> None:
    scene = Scene()
    scene.publish()
    samples = dead_with(scene, A)
    scene.lease(B, scene.version)
    scene.ledger.lose(B, [], "suspect", loss=Loss.SUSPECT)
    scene.ledger.absolve(B)
    scene.ledger.lose(B, [], "a new incarnation registered", loss=Loss.DEAD)
    assert {s.state for s in samples} == {SampleState.PENDING}


def test_a_sample_that_has_been_generated_since_did_not_kill_anything() -> None:
    scene = Scene()
    scene.publish()
    samples = dead_with(scene, A)
    scene.lease(B, scene.version)
    for sample in samples:
        scene.stream(B, [sample])
        scene.finish(B, sample)
    moved = scene.ledger.lose(B, [], "dead", loss=Loss.DEAD)
    assert {m.fate for m in moved} == {Fate.UNGRADED}


# --- tool segments -------------------------------------------------------------------------------------------------


def test_results_of_tools_are_recorded_and_preserved_over_a_redirect() -> None:
    scene = Scene()
    v0 = scene.publish()
    sample = scene.lease(A, v0)[0]
    assert scene.append(A, sample, 0, [1, 2]) is Outcome.OK
    assert scene.append(A, sample, 2, [7, 7], call=0) is Outcome.OK
    assert scene.append(A, sample, 2, [7, 7, 8], call=0) is Outcome.OK, "an overlap of the same kind"
    assert scene.append(A, sample, 5, [3]) is Outcome.OK
    assert sample.tools == [ToolSpan(2, 3, 0)]
    scene.ledger.lose(A, [Destination(B, v0, 9)], "lost")
    assert (sample.tools, sample.length) == ([ToolSpan(2, 3, 0)], 6)
    assert scene.append(B, sample, 6, [9], call=1) is Outcome.OK
    assert sample.tools == [ToolSpan(2, 3, 0), ToolSpan(6, 1, 1)]
    assert sample.key in {s.key for s in scene.ledger.drain().samples}, "its row says so"


@pytest.mark.parametrize(
    ("offset", "tokens", "call"),
    [(2, [7, 7], None), (2, [7, 7], 1), (0, [1, 2], 0), (1, [2, 7], 0), (1, [2, 7], None)],
)
def test_tokens_that_change_whose_they_are_are_a_mismatch(offset: int, tokens: list[int], call: int | None) -> None:
    scene = Scene()
    sample = scene.lease(A, scene.publish())[0]
    scene.append(A, sample, 0, [1, 2])
    scene.append(A, sample, 2, [7, 7], call=0)
    assert scene.append(A, sample, offset, tokens, call) is Outcome.MISMATCH


def test_a_restart_forgets_the_results_of_tools_too() -> None:
    scene = Scene()
    sample = scene.lease(A, scene.publish())[0]
    scene.append(A, sample, 0, [7], call=0)
    scene.finish(A, sample, "error")
    assert (sample.tools, sample.length) == ([], 0)


# --- what is answered to whom ----------------------------------------------------------------------------------------


def test_late_repeated_superseded_and_unknown_messages_are_told_apart_and_counted() -> None:
    scene = Scene()
    v0 = scene.publish()
    first, second = scene.lease(A, v0)
    ledger, writes = scene.ledger, scene.ledger.writes
    scene.stream(A, [first, second])
    assert scene.append(A, first, 0, [0, 1]) is Outcome.OK
    assert ledger.counters.repeated == 1
    scene.finish(A, first)
    assert scene.finish(A, first) is Outcome.OK and ledger.counters.repeated == 2
    writes.grade(A, first.key, first.term, None, {}, "")
    answers = {
        Outcome.ENDED: writes.grade(A, first.key, first.term, 1.0, {}, ""),
        Outcome.SUPERSEDED: writes.append(B, second.key, second.term, 0, b"", b""),
        Outcome.UNKNOWN: writes.append(A, second.key, second.term + 1, 0, b"", b""),
        Outcome.GAP: writes.append(A, second.key, second.term, 9, b"", b""),
    }
    assert {outcome: answer.outcome for outcome, answer in answers.items()} == {o: o for o in answers}
    never = SampleKey(GroupKey(0, next(p for p in range(20) if GroupKey(0, p) not in ledger.groups)), 0)
    for key in (never, SampleKey(first.key.group, 99), SampleKey(GroupKey(7, 0), 0), SampleKey(GroupKey(-1, 0), 0)):
        assert writes.finish(A, key, 1, 0, "stop", "", 0.0).outcome is Outcome.UNKNOWN
    assert ledger.counters.refused == {"ended": 1, "superseded": 1, "unknown": 5, "gap": 1}


def test_a_message_about_a_group_that_has_left_memory_is_late_not_unknown() -> None:
    scene = Scene()
    v0 = scene.publish()
    samples = scene.lease(A, v0)
    for sample in samples:
        scene.finish(A, sample)
        scene.ledger.writes.grade(A, sample.key, sample.term, None, {}, "")
    assert scene.ledger.groups == {}
    assert {scene.grade(A, sample) for sample in samples} == {Outcome.ENDED}
