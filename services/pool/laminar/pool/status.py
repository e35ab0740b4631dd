"""What people and dashboards see of the books: `GET /v1/status` and `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from laminar.core.samples import DiscardReason
from laminar.core.versions import VersionRow
from laminar.pool.books import Books
from laminar.shell.ledger_file import evaluation_rows
from laminar.wire.messages import (
    CheckpointInfo,
    EvaluationProgress,
    EvaluationRow,
    Histogram,
    JobStatus,
    LedgerCounts,
    PoolPhase,
    Role,
    StepRow,
    Visible,
)

CURVE_POINTS = 2000
"""Longer reward curves are thinned evenly."""
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def job_status(books: Books) -> JobStatus:
    """Everything that `laminar status` and the live view show."""
    now_s, identity = books.clock.monotonic_s(), books.identity
    newest = books.register.newest
    conditions = dict(books.conditions)
    if books.journal.store.condition is not None:
        reason, text = books.journal.store.condition
        conditions[reason] = text
    replicas = [member for member in books.members.of_role(Role.ROLLOUT) if member.load is not None]
    return JobStatus(
        job=identity.job.metadata.name,
        uid=identity.uid,
        generation=identity.generation,
        phase=books.phase,
        reason=books.failed_reason or books.stop_reason or "",
        steps=books.ledger.plan.steps,
        committed_step=books.ledger.committed_step,
        attempt=books.trained.attempt,
        newest=_visible(newest) if newest else None,
        epoch=books.chain.epoch,
        chain=[member.slot for member in books.chain.members],
        members=[member.view(now_s) for member in books.members.all()],
        loads={member.slot: member.load for member in replicas if member.load is not None},
        counts=ledger_counts(books),
        inherent=books.trained.steps.inherent,
        consumed=books.trained.steps.consumed,
        last_step=books.trained.steps.last,
        reward_curve=books.trained.steps.reward_curve(CURVE_POINTS),
        evaluations=evaluations(books),
        evaluating=_evaluating(books),
        checkpoints=[
            CheckpointInfo(step=row.step, attempt=row.attempt, path=row.path, manifest=dict(row.manifest))
            for row in books.trained.checkpoints.kept
        ],
        conditions=conditions,
        first_lease_wall_s=books.first_lease_wall_s,
        wall_s=books.clock.wall_s(),
        skipped_prompts=books.prompts.skipped,
        last_event_seq=books.journal.last_seq,
    )


def evaluations(books: Books) -> list[EvaluationRow]:
    """Results of the rounds that are done."""
    done = [round_ for point, round_ in sorted(books.rounds.items()) if books.round_done(point)]
    return [row for round_ in done for row in evaluation_rows(round_, books.register.row(round_.version).step)]


def _evaluating(books: Books) -> EvaluationProgress | None:
    round_ = books.round
    if round_ is None:
        return None
    return EvaluationProgress(
        point=round_.point.value, version=round_.version, num_done=round_.num_done, num_samples=len(round_.samples)
    )


def ledger_counts(books: Books) -> LedgerCounts:
    """The audit's numbers, as the pool counts them."""
    counters = books.ledger.counters
    return LedgerCounts(
        admitted=counters.admitted,
        consumed=counters.consumed,
        discarded={reason: number for reason, number in counters.discarded.items() if number},
        open=books.ledger.num_open,
        started_unconsumed_groups=len(books.ledger.groups),
        restarted_samples=counters.restarted_samples,
        restarted_tokens=counters.restarted_tokens,
        moved_samples=counters.moved_samples,
        parked_samples=counters.parked_samples,
        poisoned_samples=counters.poisoned_samples,
        filtered_groups=counters.filtered_groups,
        repeated=counters.repeated,
        refused=dict(counters.refused),
    )


def _visible(row: VersionRow) -> Visible:
    return Visible(version=row.version, step=row.step, digest=row.digest)


class BooksCollector(Collector):
    """Reads the books when asked: between scrapes it costs nothing."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def collect(self) -> Iterable[Metric]:
        books, status = self._books, job_status(self._books)
        yield _staleness("laminar_inherent_staleness", "Steps behind the newest version at the end", status.inherent)
        yield _staleness("laminar_consumed_staleness", "Steps behind the step that used it", status.consumed)
        yield from _totals(status.counts)
        last = status.last_step
        for name, text, value in (
            ("laminar_committed_step", "Last committed training step", status.committed_step),
            ("laminar_steps", "Steps of the job", status.steps),
            ("laminar_reward", "Mean reward of the last step", last.reward_mean if last else 0.0),
            ("laminar_version", "Newest visible version", status.newest.version if status.newest else -1),
            (
                "laminar_versions_burned",
                "Versions whose trainer died before they were complete",
                books.register.num_burned,
            ),
            ("laminar_trainer_stall_seconds", "Training stood still for the last publication", _stall_s(last)),
            ("laminar_chain_epoch", "Epoch of the relay chain", status.epoch),
            ("laminar_trainer_attempt", "Attempt of the trainer", status.attempt),
            ("laminar_open_samples", "Admitted samples that have not ended", status.counts.open),
            ("laminar_started_groups", "Started, unconsumed groups", status.counts.started_unconsumed_groups),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))
        yield _by_label("laminar_phase", "1 for the phase that the job is in", "phase", {
            phase.value: float(phase is status.phase) for phase in PoolPhase
        })  # fmt: skip
        yield _by_label("laminar_kv_utilisation", "KV cache in use, 0 to 1", "slot", {
            slot: load.kv_used_tokens / max(1, load.kv_capacity_tokens) for slot, load in status.loads.items()
        })  # fmt: skip
        yield _by_label("laminar_running_samples", "Samples that the engine decodes", "slot", {
            slot: float(load.running) for slot, load in status.loads.items()
        })  # fmt: skip
        yield _by_label("laminar_suspect", "1 for a suspect member", "slot", {
            member.slot: float(member.suspect) for member in status.members
        })  # fmt: skip
        tokens = CounterMetricFamily("laminar_response_tokens", "Tokens of responses that steps consumed")
        tokens.add_metric((), books.trained.steps.response_tokens)
        yield tokens


def _stall_s(last: StepRow | None) -> float:
    return 0.0 if last is None else sum(last.stats.get(name, 0.0) for name in ("stall_s", "handover_wait_s"))


def _totals(counts: LedgerCounts) -> Iterable[Metric]:
    for name, text, value in (
        ("laminar_samples_admitted", "Samples whose group was drawn", counts.admitted),
        ("laminar_samples_restarted", "Samples started again from the prompt", counts.restarted_samples),
        ("laminar_tokens_restarted", "Tokens lost by restarts", counts.restarted_tokens),
        ("laminar_samples_moved", "Samples moved with their partial", counts.moved_samples),
        ("laminar_samples_parked", "Partials kept until a replica had their version", counts.parked_samples),
        ("laminar_samples_poisoned", "Samples set aside because replicas died of them", counts.poisoned_samples),
        ("laminar_groups_filtered", "Groups of equal rewards that were dropped", counts.filtered_groups),
        ("laminar_writes_repeated", "Writes that said again what was known", counts.repeated),
    ):
        total = CounterMetricFamily(name, text)
        total.add_metric((), value)
        yield total
    # Goes down when a trainer restores an older checkpoint, so it is no counter.
    yield GaugeMetricFamily("laminar_samples_consumed", "Samples used by the surviving steps", value=counts.consumed)
    discarded = {reason.value: float(counts.discarded.get(reason.value, 0)) for reason in DiscardReason}
    yield _by_label("laminar_samples_discarded", "Samples given up", "reason", discarded)
    refused = {verdict: float(number) for verdict, number in counts.refused.items()}
    yield _by_label("laminar_writes_refused", "Writes of replicas that were refused", "verdict", refused)


def _by_label(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value_of, value in values.items():
        family.add_metric([value_of], value)
    return family


def _staleness(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    """Of the surviving lineage, so it may go down."""
    counts = histogram.counts
    buckets = [
        (str(float(top)), float(sum(n for value, n in counts.items() if value <= top))) for top in STALENESS_BUCKETS
    ]
    buckets.append(("+Inf", float(sum(counts.values()))))
    family = HistogramMetricFamily(name, text)
    family.add_metric((), buckets, sum_value=float(sum(value * n for value, n in counts.items())))
    return family
