"""The relay's numbers for Prometheus, read from the data plane when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laminar.relay.plane import PlaneView


class PlaneCollector(Collector):
    """One consistent view a scrape."""

    def __init__(self, view: Callable[[], PlaneView]) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        view = self._view()
        counters = view.counters
        newest = view.held[-1].version if view.held else -1
        yield _gauge("laminar_relay_epoch", "Epoch of the chain that this relay acts on; -1: none", view.epoch)
        yield _gauge("laminar_relay_chain_depth", "Members of the chain", len(view.members))
        position = -1 if view.index is None else view.index
        yield _gauge("laminar_relay_position", "Place in the chain, 0 = master; -1: not a member", position)
        yield _gauge("laminar_relay_versions_held", "Complete versions in memory", len(view.held))
        yield _gauge("laminar_relay_newest_version", "Newest complete version; -1: none", newest)
        lag = "From the manifest's arrival to the last verified byte, of the newest version"
        yield _gauge("laminar_relay_publication_lag_seconds", lag, counters.publication_lag_s)
        yield _counter("laminar_relay_received_bytes", "Verified bytes received", counters.received_bytes)
        yield _counter("laminar_relay_forwarded_bytes", "Bytes sent down the chain", counters.forwarded_bytes)
        yield _counter("laminar_relay_versions_completed", "Versions completed", counters.completed_versions)
        yield _counter(
            "laminar_relay_versions_aborted", "Versions given up while they came in", counters.aborted_versions
        )
        yield _counter("laminar_relay_versions_superseded", "Dropped before forwarding", counters.superseded_versions)
        reused = counters.slots_reused_under_reader
        yield _counter("laminar_relay_slots_reused_under_reader", "Slots taken from a slow reader", reused)
        yield _counter("laminar_relay_bypasses", "Lost neighbours passed by within an epoch", counters.bypasses)
        resumed = "Half versions that another upstream went on with"
        yield _counter("laminar_relay_versions_resumed", resumed, counters.resumed_versions)
        overdue = "Readers that held a slot for longer than readDeadlineSeconds"
        yield _counter("laminar_relay_readers_overdue", overdue, counters.reader_deadlines)
        yield _counter("laminar_relay_pulled_bytes", "Bytes sent to engines by TCP", counters.pulled_bytes)
        speed = "Bytes a second of the version that went down the chain last, while it went"
        yield _gauge("laminar_relay_forward_bytes_per_second", speed, counters.forward_bytes_per_s)
        yield _gauge("laminar_relay_link_byte_seconds", "T_b of the slowest link from here on; 0: unknown", view.byte_s)
        slowest = "T_s of the slowest link from here on; 0: unknown"
        yield _gauge("laminar_relay_link_message_seconds", slowest, view.message_s)
        yield _labelled("laminar_relay_connections_refused", "Connections closed", "reason", counters.refused)
        yield _labelled("laminar_relay_versions_declined", "Announced, not taken", "verdict", counters.declined)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
