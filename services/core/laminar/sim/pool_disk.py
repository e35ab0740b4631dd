"""What a pool's store holds, as rows: a crash leaves exactly what was written, and a restart reads it back.

Same order as the real store: restarts erase tokens, then tokens, groups, samples and totals, all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace

from laminar.core.decisions import Changes, Counters
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.ledger import Ledger
from laminar.core.prompts import StreamPosition
from laminar.core.samples import Group, GroupState, Sample, SampleState, SealedBatch
from laminar.core.versions import VersionRow

_LIVE = (GroupState.OPEN, GroupState.READY, GroupState.BATCHED)


@dataclass(frozen=True, slots=True)
class Transaction:
    """Rows as they were when they were decided; later changes of the objects do not reach them."""

    cleared: tuple[SampleKey, ...]
    appended: tuple[tuple[SampleKey, int, bytes, bytes], ...]
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]
    batches: tuple[SealedBatch, ...]
    versions: tuple[VersionRow, ...]
    incarnations: dict[str, int]
    attempt: int
    checkpoint_step: int
    counters: Counters
    position: StreamPosition
    committed_step: int


def transaction(
    ledger: Ledger,
    changes: Changes,
    batches: Iterable[SealedBatch],
    versions: Iterable[VersionRow],
    incarnations: dict[str, int],
    attempt: int,
    checkpoint_step: int,
) -> Transaction:
    """All that one commit writes."""
    counters = ledger.counters
    return Transaction(
        tuple(changes.cleared),
        tuple(changes.appended),
        tuple(replace(group, samples=[]) for group in changes.groups),
        tuple(_row(sample) for sample in changes.samples),
        tuple(batches),
        tuple(replace(row, complete_on=set(row.complete_on)) for row in versions),
        dict(incarnations),
        attempt,
        checkpoint_step,
        replace(counters, discarded=copy(counters.discarded), refused=copy(counters.refused)),
        ledger.stream_position,
        ledger.committed_step,
    )


def _row(sample: Sample) -> Sample:
    """Tokens are stored apart."""
    return replace(
        sample, tokens=bytearray(), logprobs=bytearray(), tools=list(sample.tools), lost_lives=dict(sample.lost_lives)
    )


@dataclass(slots=True)
class Disk:
    """Survives every process."""

    groups: dict[GroupKey, Group] = field(default_factory=dict[GroupKey, Group])
    samples: dict[SampleKey, Sample] = field(default_factory=dict[SampleKey, Sample])
    segments: dict[SampleKey, list[tuple[int, bytes, bytes]]] = field(
        default_factory=dict[SampleKey, list[tuple[int, bytes, bytes]]]
    )
    batches: dict[int, SealedBatch] = field(default_factory=dict[int, SealedBatch])
    versions: dict[int, VersionRow] = field(default_factory=dict[int, VersionRow])
    incarnations: dict[str, int] = field(default_factory=dict[str, int])
    attempt: int = 0
    checkpoint_step: int = 0
    counters: Counters = field(default_factory=Counters)
    position: StreamPosition = StreamPosition()
    committed_step: int = 0

    def write(self, rows: Transaction) -> None:
        """All or nothing."""
        for key in rows.cleared:
            self.segments.pop(key, None)
        for key, start, tokens, logprobs in rows.appended:
            self.segments.setdefault(key, []).append((start, tokens, logprobs))
        self.groups.update({group.key: group for group in rows.groups})
        for sample in rows.samples:
            self.samples[sample.key] = sample
            if sample.state is SampleState.DISCARDED:
                self.segments.pop(sample.key, None)
        self.batches.update({batch.step: batch for batch in rows.batches})
        self.versions.update({row.version: row for row in rows.versions})
        self.incarnations, self.attempt, self.checkpoint_step = rows.incarnations, rows.attempt, rows.checkpoint_step
        self.counters, self.position, self.committed_step = rows.counters, rows.position, rows.committed_step

    def live_groups(self) -> list[Group]:
        """Those that have not ended, with their samples and tokens."""
        return [self.group(key) for key, group in self.groups.items() if group.state in _LIVE]

    def group(self, key: GroupKey) -> Group:
        samples: list[Sample] = []
        while (sample := SampleKey(key, len(samples))) in self.samples:
            samples.append(self.sample(sample))
        return replace(self.groups[key], samples=samples)

    def sample(self, key: SampleKey) -> Sample:
        row = self.samples[key]
        tokens, logprobs = bytearray(), bytearray()
        for start, some_tokens, some_logprobs in sorted(self.segments.get(key, [])):
            assert start == len(tokens) // 4, f"segments of {key} do not join"
            tokens += some_tokens
            logprobs += some_logprobs
        return replace(
            row, tokens=tokens, logprobs=logprobs, tools=list(row.tools), lost_lives=dict(row.lost_lives),
            parts=dict(row.parts),
        )  # fmt: skip

    def consumed_after(self, step: int) -> list[tuple[SealedBatch, list[Group]]]:
        """Batches to be trained again, in order."""
        steps = [k for k in sorted(self.batches) if step < k <= self.committed_step]
        return [(self.batches[k], [self.group(key) for key in self.batches[k].groups]) for k in steps]
