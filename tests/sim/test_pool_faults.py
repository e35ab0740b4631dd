"""Seeded fault runs of the pool's policies in virtual time, and proof that they find what they are for.

More seeds: `LAMINAR_SIM_SEEDS=2000 pytest tests/sim/test_pool_faults.py`, or `python -m laminar.sim.pool_faults`.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from laminar.core.decisions import LedgerPlan, Outcome, WriteResult
from laminar.core.identity import SampleKey
from laminar.core.ledger import Ledger
from laminar.core.samples import Holder, Sample
from laminar.core.schedule import Schedule
from laminar.core.versions import VersionRegister
from laminar.core.writes import Writes
from laminar.sim.pool_faults import Broken, Outcomes, run

SEEDS = int(os.environ.get("LAMINAR_SIM_SEEDS", "0"))
"""0: as many as BUDGET_S allows, and FEWEST in any case."""
BUDGET_S = 25.0
FEWEST = 60
SEEDS_TO_FIND_A_BUG = 200


def test_no_promise_is_broken_by_kills_stops_evictions_restarts_and_a_bad_network() -> None:
    """Cases B2, B3, B15, C1, C5, D2: nothing lost, nothing twice, one version a trajectory, the job completes."""
    began_s, seed, outcomes = time.monotonic(), 0, list[Outcomes]()
    while seed < SEEDS if SEEDS else (seed < FEWEST or time.monotonic() < began_s + BUDGET_S):
        outcomes.append(run(seed))
        seed += 1
    happened: Counter[str] = Counter()
    for outcome in outcomes:
        counters = outcome.counters
        happened.update(outcome.num_faults)
        happened.update({f"refused {name}": number for name, number in counters.refused.items()})
        happened.update({f"discarded {name}": number for name, number in counters.discarded.items()})
        happened.update(
            moved=counters.moved_samples, parked=counters.parked_samples, restarted=counters.restarted_samples,
            poisoned=counters.poisoned_samples, filtered=counters.filtered_groups, repeated=counters.repeated,
            reloads=outcome.num_reloads,
        )  # fmt: skip
    expected = {
        "kill", "stop", "drain", "pool", "trainer", "relay", "moved", "parked", "restarted", "poisoned", "filtered",
        "repeated", "reloads", "refused superseded", "refused ended", "discarded ungraded",
        "discarded failed", "discarded tooLong",
    }  # fmt: skip
    assert expected <= {name for name, number in happened.items() if number}, "a fault that never strikes tests nothing"


def test_the_same_seed_is_the_same_run() -> None:
    for seed in range(5):
        assert run(seed) == run(seed)
    assert len({run(seed).ended_s for seed in range(5)}) == 5


class BlindToTerms(Writes):
    """A planted bug: whoever held a sample once may go on writing it."""

    def _writable(self, holder: Holder, key: SampleKey, term: int) -> tuple[Sample | None, WriteResult]:
        sample = self._accounts.sample(key)
        if sample is not None and sample.holder is not None:
            holder, term = sample.holder, sample.term
        return super()._writable(holder, key, term)


class Forgetful(Writes):
    """A planted bug: tokens are acknowledged that never reach the store's rows."""

    def append(
        self, holder: Holder, key: SampleKey, term: int, offset: int, tokens: bytes, logprobs: bytes,
        tool_call: int | None = None,
    ) -> WriteResult:  # fmt: skip
        result = super().append(holder, key, term, offset, tokens, logprobs, tool_call)
        if result.outcome is Outcome.OK and key.index == 0:
            self._accounts._appended = [item for item in self._accounts._appended if item[0] != key]
        return result


def with_writes(kind: type[Writes], plan: LedgerPlan, schedule: Schedule, register: VersionRegister) -> Ledger:
    ledger = Ledger(plan, schedule, register)
    ledger.writes = kind(ledger._accounts, ledger._batches, register)
    return ledger


@pytest.mark.parametrize("kind", [BlindToTerms, Forgetful])
def test_a_planted_bug_in_the_ledger_is_found(kind: type[Writes]) -> None:
    with pytest.raises(Broken, match=r"seed \d+: "):
        for seed in range(SEEDS_TO_FIND_A_BUG):
            run(seed, lambda plan, schedule, register: with_writes(kind, plan, schedule, register))


def test_a_planted_pool_that_answers_before_it_has_written_is_found() -> None:
    with pytest.raises(Broken, match=r"seed \d+: "):
        for seed in range(SEEDS_TO_FIND_A_BUG):
            run(seed, answers_before_durable=True)
