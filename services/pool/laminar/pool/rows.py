"""Core objects as rows of the ledger file: written here, read back in `laminar.pool.restore`.

Rows are made at once, in the turn in which the core decided: its objects go on changing while the store writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laminar.core.checkpoints import CheckpointRow
from laminar.core.decisions import Counters
from laminar.core.evaluation import EvalSample, EvaluationRound
from laminar.core.identity import SampleKey
from laminar.core.prompts import StreamPosition
from laminar.core.samples import Group, Sample, SampleState, SealedBatch
from laminar.core.versions import VersionRow
from laminar.shell.ledger_file import crc
from laminar.wire.messages import EngineLoad, Event, Register, StepRow

Value = str | int | float | bytes | None


@dataclass(frozen=True, slots=True)
class Put:
    """Insert or replace one row; the values stand in the table's column order."""

    table: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class PutAll:
    """Rows that are not there yet."""

    table: str
    rows: Sequence[tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Delete:
    """Every row whose primary key begins with these values."""

    table: str
    key: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class DeleteAbove:
    """Every row whose integer primary key is greater."""

    table: str
    key: int


@dataclass(frozen=True, slots=True)
class DeleteBelow:
    """Every row whose integer primary key is smaller."""

    table: str
    key: int


@dataclass(frozen=True, slots=True)
class PruneStep:
    """The responses of a step can never be asked for again: their tokens go, their rows stay."""

    step: int


@dataclass(frozen=True, slots=True)
class FoldStep:
    """The rows of a consumed step, and of all that was discarded before it, go; how many there were stays."""

    step: int


@dataclass(frozen=True, slots=True)
class HalveLoads:
    """Every second point of the load curves goes."""


Op = Put | PutAll | Delete | DeleteAbove | DeleteBelow | PruneStep | FoldStep | HalveLoads


def meta(key: str, value: object) -> Put:
    return Put("meta", (key, str(value)))


def member(register: Register, incarnation: int, *, fenced: bool) -> Put:
    return Put("members", (register.slot, incarnation, int(fenced), register.model_dump_json()))


def version(row: VersionRow) -> Put:
    return Put("versions", (row.version, row.step, row.parent, row.attempt, row.state.value, row.digest))


def group(row: Group, prompt_text: str, answer: str, committed_step: int) -> Put:
    key = row.key
    values = (key.pass_, key.prompt, row.state.value, row.ready_seq, row.step, prompt_text, answer, committed_step)
    return Put("groups", values)


def sample(row: Sample) -> list[Op]:
    """A discarded sample's tokens are of no use to anybody: they go in the same transaction."""
    key = _sample_key(row.key)
    kept = row.state is not SampleState.DISCARDED
    put = Put(
        "samples",
        (
            *key, row.state.value, row.term, row.holder.slot if row.holder else None,
            row.holder.incarnation if row.holder else None, row.version, row.length, int(kept), row.finish_reason,
            row.reward, json.dumps(row.parts), row.failures, row.restarts, row.moves, row.inherent,
            int(row.across_rollback), row.reason.value if row.reason else None, row.detail, row.leased_wall_s,
            row.finished_wall_s, json.dumps([[t.start, t.length, t.call] for t in row.tools]),
            json.dumps([[life.slot, life.incarnation, int(dead)] for life, dead in row.lost_lives.items()]),
        ),
    )  # fmt: skip
    return [put] if kept else [Delete("segments", key), put]


def segments(appended: Iterable[tuple[SampleKey, int, bytes, bytes]]) -> PutAll:
    """Each: the sample, the place of the first token, packed tokens and log-probs."""
    return PutAll(
        "segments",
        [
            (key.group.pass_, key.group.prompt, key.index, start, tokens, logprobs, crc(tokens, logprobs))
            for key, start, tokens, logprobs in appended
        ],
    )


def cleared(key: SampleKey) -> Delete:
    return Delete("segments", _sample_key(key))


def batch(row: SealedBatch, now_wall_s: float) -> Put:
    return Put("batches", (row.step, json.dumps([str(key) for key in row.groups]), now_wall_s))


def step(row: StepRow) -> Put:
    return Put("steps", (row.step, row.model_dump_json()))


def checkpoint(row: CheckpointRow, state: str) -> Put:
    return Put("checkpoints", (row.path, row.step, row.attempt, json.dumps(dict(row.manifest)), state))


def round_(row: EvaluationRound) -> Put:
    return Put("rounds", (row.point.value, row.version))


def eval_sample(row: EvalSample) -> Put:
    holder = row.holder
    return Put(
        "eval_samples",
        (
            str(row.key), row.key.point.value, row.term, holder.slot if holder else None,
            holder.incarnation if holder else None, int(row.done), row.reward, row.length, row.finish_reason,
        ),
    )  # fmt: skip


def event(row: Event) -> Put:
    return Put("events", (row.seq, row.wall_s, row.kind, row.text))


def load(seq: int, now_wall_s: float, slot: str, version: int | None, row: EngineLoad) -> Put:
    return Put("loads", (seq, now_wall_s, slot, version, row.model_dump_json(exclude_defaults=True)))


def totals(counters: Counters, position: StreamPosition, committed_step: int) -> Sequence[Put]:
    """What is written with every change of the ledger."""
    return (
        meta("counters", json.dumps(counters_json(counters))),
        meta("position", f"{position.pass_} {position.cursor}"),
        meta("committed_step", committed_step),
    )


def counters_json(counters: Counters) -> dict[str, int | dict[str, int]]:
    return {
        "admitted": counters.admitted,
        "consumed": counters.consumed,
        "discarded": {reason: number for reason, number in counters.discarded.items() if number},
        "restarted_samples": counters.restarted_samples,
        "restarted_tokens": counters.restarted_tokens,
        "moved_samples": counters.moved_samples,
        "parked_samples": counters.parked_samples,
        "poisoned_samples": counters.poisoned_samples,
        "filtered_groups": counters.filtered_groups,
        "refilled_groups": counters.refilled_groups,
        "repeated": counters.repeated,
        "refused": dict(counters.refused),
    }


def _sample_key(key: SampleKey) -> tuple[int, int, int]:
    return key.group.pass_, key.group.prompt, key.index
