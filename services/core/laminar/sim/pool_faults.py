"""Seeded runs of a whole job in virtual time, under kills, stops, evictions and a bad network.

    python -m laminar.sim.pool_faults --seeds 2000

After each event the promises are checked that the system makes: nothing lost, nothing twice, one version a
trajectory, batches immutable, what was acknowledged is kept; and at the end the job is complete. The same seed gives
the same run.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from laminar.core.decisions import Counters, LedgerPlan
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.ledger import Ledger
from laminar.core.prompts import sampling_seed
from laminar.core.samples import TERMINAL, Sample, SampleState, SealedBatch
from laminar.core.schedule import SCHEDULES, make_schedule
from laminar.sim.pool_disk import Disk
from laminar.sim.pool_replica import POSITIONS, TOKEN_BYTES, Habits, Replica
from laminar.sim.pool_service import Adopt, Cancel, Delivered, MakeLedger, PoolService, Relays, Setting
from laminar.sim.pool_trainer import Trainer
from laminar.sim.timeline import Link, Timeline

LIMIT_S = 1500.0
"""Virtual: an undisturbed run takes about 30 s."""
RETRY_S = 1.0


class Broken(AssertionError):
    """A promise does not hold."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a run came to; equal for equal seeds."""

    num_events: int
    ended_s: float
    num_faults: Counter[str]
    counters: Counters
    num_reloads: int
    """Times that a replica was told to load an older version for partials."""


class PoolRun:
    """The world of one seed."""

    def __init__(self, seed: int, make_ledger: MakeLedger = Ledger, *, answers_before_durable: bool = False) -> None:
        rng = self.rng = random.Random(seed)
        self.timeline, self.disk, self.relays = Timeline(), Disk(), Relays()
        max_tokens = rng.choice([6, 12])
        plan = LedgerPlan(
            steps=rng.randint(3, 5), prompts_per_step=2, samples_per_prompt=rng.randint(2, 3), groups_per_lease=2,
            max_ahead_steps=2, num_prompts=5, seed=seed, max_response_tokens=max_tokens,
            too_long=frozenset({4}) if rng.random() < 0.3 else frozenset(),
            max_refill_groups=rng.choice([None, 2]),
        )  # fmt: skip
        schedule = make_schedule(rng.choice(SCHEDULES))
        self.setting = Setting(plan, schedule, make_ledger, answers_before_durable)
        loss = rng.choice([0.0, 0.05, 0.2])
        self.link = Link(self.timeline, rng, loss=loss, duplicates=rng.choice([0.0, 0.1]))
        poison = SampleKey(GroupKey(0, rng.randrange(4)), 0) if rng.random() < 0.3 else None
        habits = Habits(
            length_of=lambda key: 1 + sampling_seed(seed, key) % (2 * max_tokens),
            reward_of=lambda key: [0.0, 1.0, 1.0, None][sampling_seed(seed + 1, key) % 4],
            poison=poison, max_tokens=max_tokens,
        )  # fmt: skip
        self.replicas = [
            Replica(f"rollout-{i}", self.timeline, rng, self, habits, lambda: self.relays.held) for i in range(3)
        ]
        self.pool: PoolService | None = None
        self.trainer = Trainer(self.timeline, self, plan.steps, self._judge_batch)
        self.faults: Counter[str] = Counter()
        self._seen: dict[int, tuple[SealedBatch, str]] = {}
        """Batches as they were delivered first."""
        self._bound: dict[tuple[SampleKey, int], int] = {}

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcomes:
        """Raises Broken."""
        self._start_pool()
        for replica in self.replicas:
            replica.start()
        self.trainer.start()
        faults_until_s = self.rng.uniform(10.0, 60.0)
        self._next_fault(faults_until_s)
        complete = self.timeline.run(LIMIT_S, lambda: self._complete, self.check)
        if not complete:
            raise Broken(f"not complete after {self.timeline.now_s:.0f} s: {self._where}")
        assert self.pool is not None
        if self.pool.ledger.num_open:
            raise Broken(f"{self.pool.ledger.num_open} samples are open at the end")
        counters = self.pool.ledger.counters
        num_reloads = sum(replica.num_reloads for replica in self.replicas)
        return Outcomes(self.timeline.num_events, self.timeline.now_s, self.faults, counters, num_reloads)

    @property
    def _complete(self) -> bool:
        return self.pool is not None and self.trainer.acknowledged_step >= self.setting.plan.steps

    @property
    def _where(self) -> str:
        if self.pool is None:
            return "the pool is away"
        states = Counter(s.state.value for g in self.pool.ledger.groups.values() for s in g.samples)
        versions = [(replica.slot, replica.up, replica.version) for replica in self.replicas]
        return f"step {self.pool.ledger.committed_step}, {dict(states)}, {versions}, relays hold {self.relays.newest}"

    def call(
        self, ask: Callable[[PoolService], object], take: Callable[[object], None], alive: Callable[[], bool]
    ) -> None:
        """Until it is answered, or the caller is gone. Every copy that arrives is served."""
        answered = False

        def arrive() -> None:
            if self.pool is not None:
                self.pool.serve(ask, lambda answer: _ignore(self.link.send(lambda: deliver(answer))))

        def deliver(answer: object) -> None:
            nonlocal answered
            if not answered and alive():
                answered = True
                take(answer)

        def attempt() -> None:
            if not answered and alive():
                self.link.send(arrive)
                self.timeline.after(RETRY_S, attempt)

        attempt()

    def _command(self, slot: str, command: Adopt | Cancel) -> bool:
        replica = next(each for each in self.replicas if each.slot == slot)
        life = replica.life
        return self.link.send(lambda: replica.hear(command, life))

    # --- pool and trainer ---------------------------------------------------------------------------------------------

    def _start_pool(self) -> None:
        self.pool = pool = PoolService(self.timeline, self.rng, self.setting, self.disk, self.relays, self._command)

        def tick() -> None:
            if pool is self.pool:
                pool.tick()
                self.timeline.after(0.25, tick)

        tick()

    def _kill_pool(self) -> None:
        if self.pool is not None:
            self.pool.dead = True
            self.pool = None
            self.timeline.after(self.rng.uniform(0.1, 5.0), self._start_pool)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _next_fault(self, until_s: float) -> None:
        def strike() -> None:
            if self.timeline.now_s < until_s:
                self._strike()
                self._next_fault(until_s)

        self.timeline.after(self.rng.expovariate(0.7), strike)

    def _strike(self) -> None:
        replica, rng = self.rng.choice(self.replicas), self.rng
        kind = rng.choice(["kill", "kill", "stop", "drain", "pool", "pool", "trainer", "relay"])
        self.faults[kind] += 1
        match kind:
            case "kill":
                replica.die(rng.uniform(0.2, 6.0))
            case "stop":
                replica.stop(rng.uniform(0.5, 8.0))
            case "drain":
                replica.drain(rng.uniform(0.2, 3.0))
            case "pool":
                self._kill_pool()
            case "trainer":
                self.trainer.start()
            case _:
                self.relays.newest = self.relays.newest[-1:]

    # --- promises -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After each event."""
        pool = self.pool
        if pool is None:
            return
        ledger = pool.ledger
        counters = ledger.counters
        if counters.admitted != counters.consumed + sum(counters.discarded.values()) + ledger.num_open:
            raise Broken(f"the equation does not hold: {counters}, {ledger.num_open} open")
        if ledger.committed_step < self.trainer.acknowledged_step:
            raise Broken(f"step {self.trainer.acknowledged_step} was acknowledged, {ledger.committed_step} is known")
        batched = [key for batch in ledger.batches.values() for key in batch.groups]
        if len(batched) != len(set(batched)):
            raise Broken(f"a group is in two batches: {batched}")
        limit = self.setting.plan.max_ahead_steps * self.setting.plan.prompts_per_step + len(batched)
        if len(ledger.groups) > limit:
            raise Broken(f"{len(ledger.groups)} groups are started")
        for group in ledger.groups.values():
            for sample in group.samples:
                self._check_sample(sample)

    def _check_sample(self, sample: Sample) -> None:
        if sample.length > self.setting.plan.max_response_tokens:
            raise Broken(f"{sample.key} has {sample.length} tokens")
        if sample.version is not None and sample.state not in TERMINAL:
            if self._bound.setdefault((sample.key, sample.restarts), sample.version) != sample.version:
                raise Broken(f"{sample.key} changed its version without a restart")
        if sample.tokens:
            first = int.from_bytes(sample.tokens[:TOKEN_BYTES], "little")
            last = int.from_bytes(sample.tokens[-TOKEN_BYTES:], "little")
            version = sample.version if sample.version is not None else -1
            if (first, last) != (version * POSITIONS, version * POSITIONS + sample.length - 1):
                raise Broken(f"{sample.key} of version {version} begins with {first} and ends with {last}")

    def _judge_batch(self, delivered: Delivered) -> None:
        """As the trainer sees it: whole, and the same whenever it is delivered."""
        batch, groups = delivered.batch, delivered.groups
        for sample in (sample for group in groups for sample in group.graded):
            tokens = [
                int.from_bytes(sample.tokens[start : start + TOKEN_BYTES], "little")
                for start in range(0, len(sample.tokens), TOKEN_BYTES)
            ]
            assert sample.version is not None
            if tokens != [sample.version * POSITIONS + position for position in range(len(tokens))]:
                raise Broken(f"{sample.key} of version {sample.version} in batch {batch.step} is {tokens}")
            if sample.state is not SampleState.BATCHED:
                raise Broken(f"{sample.key} is {sample.state} in batch {batch.step}")
        content = str([(s.key, s.version, bytes(s.tokens), s.reward) for g in groups for s in g.graded])
        if self._seen.setdefault(batch.step, (batch, content)) != (batch, content):
            raise Broken(f"batch {batch.step} has changed since it was delivered first")
        others = {key for step, (seen, _) in self._seen.items() if step != batch.step for key in seen.groups}
        if others & set(batch.groups):
            raise Broken(f"batch {batch.step} holds groups of another one: {others & set(batch.groups)}")


def _ignore(_: object) -> None:
    """An answer that is lost is asked for again."""


def run(seed: int, make_ledger: MakeLedger = Ledger, *, answers_before_durable: bool = False) -> Outcomes:
    """One whole job. Raises Broken, naming the seed."""
    try:
        return PoolRun(seed, make_ledger, answers_before_durable=answers_before_durable).run()
    except AssertionError as error:
        raise Broken(f"seed {seed}: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Seeded fault runs of the pool's policies")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    events = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        events += run(seed).num_events
    print(f"{arguments.seeds} seeds, {events} events: no promise broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
