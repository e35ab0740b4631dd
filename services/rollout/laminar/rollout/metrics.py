"""The agent's metrics, on the service's own registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from laminar.rollout.engine_messages import LoadResult, LoadState, LoadStatus
from laminar.wire.dataplane import GradeItem, Outcome, ProgressReply
from laminar.wire.messages import EngineLoad

_LOAD_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_LATE_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)


class RolloutMetrics:
    """What people plot of a replica. `load` is also what its heartbeats say."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter("laminar_rollout_tokens", "Generated tokens", registry=registry)
        self._running = Gauge("laminar_rollout_running", "Responses that are decoded now", registry=registry)
        self._waiting = Gauge("laminar_rollout_waiting", "Responses that wait for a slot", registry=registry)
        self._kv_used = Gauge("laminar_rollout_kv_used_tokens", "Tokens in the KV cache", registry=registry)
        self._kv_capacity = Gauge("laminar_rollout_kv_capacity_tokens", "Room of the KV cache", registry=registry)
        self._loads = Counter("laminar_rollout_loads", "Loads of weights", ["status"], registry=registry)
        self._load_s = Histogram(
            "laminar_rollout_load_seconds", "Load of weights, from the command to the end of the copy",
            registry=registry, buckets=_LOAD_BUCKETS_S,
        )  # fmt: skip
        self._late_s = Histogram(
            "laminar_rollout_engine_late_seconds", "Lateness of an emulated engine's events, the worst of each message",
            registry=registry, buckets=_LATE_BUCKETS_S,
        )  # fmt: skip
        self._refused = Counter(
            "laminar_rollout_refused", "Items that the pool refused", ["verdict"], registry=registry
        )
        self._grades = Counter("laminar_rollout_grades", "Graded responses", ["status"], registry=registry)
        self._engines = Counter("laminar_rollout_engine_starts", "Engines started", registry=registry)
        self._version = Gauge("laminar_rollout_version", "Live version of the weights, -1: none", registry=registry)
        self._version.set(-1)
        self._before_tokens = 0
        self.load = EngineLoad()

    def engine_started(self) -> None:
        """What it generates adds to what its predecessors have."""
        self._engines.inc()
        self._before_tokens = self.load.generated_tokens

    def engine_load(self, state: LoadState) -> None:
        load = EngineLoad(
            running=state.running,
            waiting=state.waiting,
            kv_used_tokens=state.kv_used_tokens,
            kv_capacity_tokens=state.kv_capacity_tokens,
            generated_tokens=self._before_tokens + state.generated_tokens,
        )
        self._tokens.inc(load.generated_tokens - self.load.generated_tokens)
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._kv_used.set(load.kv_used_tokens)
        self._kv_capacity.set(load.kv_capacity_tokens)
        if state.late_s:
            self._late_s.observe(state.late_s)
        self.load = load

    def loaded(self, result: LoadResult) -> None:
        self._loads.labels(result.status.value).inc()
        if result.status is LoadStatus.LOADED:
            self._load_s.observe(result.load_s)

    def live(self, version: int | None) -> None:
        self._version.set(-1 if version is None else version)

    def progress(self, reply: ProgressReply) -> None:
        for item in (*reply.appends, *reply.finishes, *reply.grades):
            if item.verdict is not Outcome.OK:
                self._refused.labels(item.verdict.value).inc()

    def graded(self, item: GradeItem) -> None:
        self._grades.labels(item.status).inc()
