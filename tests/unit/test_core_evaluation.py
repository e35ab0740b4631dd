"""Evaluation rounds: shares between replicas, losses, results."""

from __future__ import annotations

from laminar.core.evaluation import EvalKey, EvalMode, EvalPlan, EvalPoint, EvaluationRound
from laminar.core.samples import Holder

A, B = Holder("rollout-0", 1), Holder("rollout-1", 2)
PLAN = EvalPlan("heldout", num_prompts=3, samples_per_prompt=2)


def start() -> EvaluationRound:
    return EvaluationRound.start(EvalPoint.FIRST, 0, [PLAN])


def test_keys_are_written_and_read_the_same() -> None:
    for key in PLAN.keys(EvalPoint.LAST):
        assert EvalKey.parse(str(key)) == key


def test_each_prompt_has_its_sampled_responses_and_one_greedy() -> None:
    keys = PLAN.keys(EvalPoint.FIRST)
    assert len(keys) == 9
    assert sum(key.mode is EvalMode.GREEDY for key in keys) == 3


def test_no_sample_is_granted_twice_while_it_is_held() -> None:
    round_ = start()
    first = round_.lease(A, 4)
    assert not {s.key for s in first} & {s.key for s in round_.lease(B, 100)}
    assert round_.lease(A, 4) == first, "a lost answer is given again"


def test_what_a_lost_replica_held_starts_again_under_a_new_term() -> None:
    round_ = start()
    sample = round_.lease(A, 1)[0]
    term = sample.term
    assert round_.lose(A) == 1
    assert not round_.grade(A, sample.key, term, 1.0)
    again = {s.key: s for s in round_.lease(B, 100)}[sample.key]
    assert again.term > term
    assert round_.grade(B, sample.key, again.term, 1.0)


def test_the_mean_is_over_prompts_and_leaves_ungraded_samples_out() -> None:
    round_ = start()
    rewards = {0: [1.0, 0.0], 1: [1.0, None], 2: [None, None]}
    for sample in round_.lease(A, 100):
        greedy = sample.key.mode is EvalMode.GREEDY
        assert round_.grade(A, sample.key, sample.term, 1.0 if greedy else rewards[sample.key.prompt][sample.key.index])
    assert round_.done
    by_mode = {result.mode: result for result in round_.results()}
    assert (by_mode[EvalMode.GREEDY].mean, by_mode[EvalMode.GREEDY].stderr) == (1.0, 0.0)
    sampled = by_mode[EvalMode.SAMPLED]
    assert (sampled.mean, sampled.num_items, sampled.num_graded) == (0.75, 6, 3)
    assert abs(sampled.stderr - 0.25) < 1e-9


def test_a_restored_round_goes_on_with_what_is_not_done() -> None:
    round_ = start()
    for sample in round_.lease(A, 4):
        round_.grade(A, sample.key, sample.term, 1.0)
    for sample in round_.samples.values():
        sample.holder = None
    again = EvaluationRound.restore(EvalPoint.FIRST, 0, round_.samples.values())
    assert again.num_done == 4
    assert len(again.lease(B, 100)) == 5
