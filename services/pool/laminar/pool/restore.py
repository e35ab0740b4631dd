"""The ledger file's rows as core objects again: what a restarted pool goes on from."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from laminar.core.checkpoints import CheckpointRow
from laminar.core.decisions import Counters
from laminar.core.evaluation import EvalPoint, EvaluationRound
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.prompts import StreamPosition
from laminar.core.samples import DiscardReason, Group, GroupState, Holder, Sample, SampleState, SealedBatch, ToolSpan
from laminar.core.versions import VersionRow, VersionState
from laminar.shell.ledger_file import crc, read_events, read_meta, read_rounds, read_steps, read_versions
from laminar.wire.messages import Event, Register, StepRow


class DamagedSegment(ValueError):
    """The disk has changed what was written."""


@dataclass(frozen=True, slots=True)
class StoredMember:
    register: Register
    incarnation: int
    fenced: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """Everything that has not ended, and the totals of what has."""

    meta: dict[str, str]
    members: list[StoredMember]
    versions: list[VersionRow]
    groups: list[Group]
    batches: list[SealedBatch]
    counters: Counters
    position: StreamPosition
    committed_step: int
    steps: list[StepRow]
    checkpoints: list[tuple[CheckpointRow, str]]
    rounds: dict[EvalPoint, EvaluationRound]
    events: list[Event]
    num_loads: int
    load_seq: int


def read_all(db: sqlite3.Connection) -> Stored:
    """One consistent picture; of an empty store, the start of a job."""
    meta = read_meta(db)
    committed_step = int(meta.get("committed_step", 0))
    pass_, _, cursor = meta.get("position", "0 0").partition(" ")
    num_loads, load_seq = db.execute("SELECT COUNT(*), COALESCE(MAX(seq), 0) FROM loads").fetchone()
    members = db.execute("SELECT register, incarnation, fenced FROM members ORDER BY slot")
    return Stored(
        meta=meta,
        members=[StoredMember(Register.model_validate_json(text), inc, bool(fenced)) for text, inc, fenced in members],
        versions=[
            VersionRow(row.version, row.step, row.parent, row.attempt, VersionState(row.state), row.digest)
            for row in read_versions(db)
        ],
        groups=_groups(db, "g.state IN ('open', 'ready', 'batched')", ()),
        batches=_batches(db, committed_step),
        counters=counters_of(json.loads(meta["counters"])) if "counters" in meta else Counters(),
        position=StreamPosition(int(pass_), int(cursor)),
        committed_step=committed_step,
        steps=read_steps(db),
        checkpoints=[
            (CheckpointRow(step, attempt, path, tuple(sorted(json.loads(manifest).items()))), state)
            for path, step, attempt, manifest, state in db.execute("SELECT * FROM checkpoints ORDER BY step, attempt")
        ],
        rounds=read_rounds(db),
        events=read_events(db),
        num_loads=num_loads,
        load_seq=load_seq,
    )


def consumed_after(db: sqlite3.Connection, step: int) -> list[tuple[SealedBatch, list[Group]]]:
    """The consumed batches later than `step`, with their groups in the sealed order."""
    groups = {group.key: group for group in _groups(db, "g.state = 'consumed' AND g.step > ?", (step,))}
    return [
        (batch, [groups[key] for key in batch.groups])
        for batch in _batches(db, step)
        if all(key in groups for key in batch.groups)
    ]


def counters_of(totals: dict[str, Any]) -> Counters:
    """Inverse of `rows.counters_json`."""
    return Counters(
        admitted=totals["admitted"],
        consumed=totals["consumed"],
        discarded=Counter(totals["discarded"]),
        restarted_samples=totals["restarted_samples"],
        restarted_tokens=totals["restarted_tokens"],
        moved_samples=totals["moved_samples"],
        parked_samples=totals.get("parked_samples", 0),
        poisoned_samples=totals.get("poisoned_samples", 0),
        filtered_groups=totals.get("filtered_groups", 0),
        refilled_groups=totals.get("refilled_groups", 0),
        repeated=totals.get("repeated", 0),
        refused=Counter(totals["refused"]),
    )


def _batches(db: sqlite3.Connection, after_step: int) -> list[SealedBatch]:
    rows = db.execute("SELECT step, groups FROM batches WHERE step > ? ORDER BY step", (after_step,))
    return [SealedBatch(step, tuple(GroupKey.parse(name) for name in json.loads(names))) for step, names in rows]


def _groups(db: sqlite3.Connection, where: str, values: tuple[int, ...]) -> list[Group]:
    """Groups with all their samples and tokens."""
    join = "JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt"
    parts = db.execute(
        f"SELECT s.pass, s.prompt, s.idx, s.tokens, s.logprobs, s.crc FROM segments s {join} WHERE {where} "
        "ORDER BY s.pass, s.prompt, s.idx, s.start",
        values,
    )
    tokens = _joined(parts)
    samples = defaultdict[GroupKey, list[Sample]](list)
    names = (
        "s.pass, s.prompt, s.idx, s.state, s.term, s.slot, s.incarnation, s.version, s.finish_reason, s.reward, "
        "s.parts, s.failures, s.restarts, s.moves, s.inherent, s.across_rollback, s.reason, s.detail, "
        "s.leased_wall_s, s.finished_wall_s, s.tools, s.lost_lives"
    )
    for row in db.execute(
        f"SELECT {names} FROM samples s {join} WHERE {where} ORDER BY s.pass, s.prompt, s.idx", values
    ):
        sample = _sample(row, tokens)
        samples[sample.key.group].append(sample)
    rows = db.execute(f"SELECT g.pass, g.prompt, g.state, g.ready_seq, g.step FROM groups g WHERE {where}", values)
    return [
        Group(GroupKey(pass_, prompt), samples[GroupKey(pass_, prompt)], GroupState(state), ready_seq, step)
        for pass_, prompt, state, ready_seq, step in rows
    ]


def _joined(
    parts: Iterable[tuple[int, int, int, bytes, bytes, int]],
) -> dict[SampleKey, tuple[bytearray, bytearray]]:
    joined: dict[SampleKey, tuple[bytearray, bytearray]] = {}
    for pass_, prompt, index, tokens, logprobs, crc_ in parts:
        key = SampleKey(GroupKey(pass_, prompt), index)
        if crc(tokens, logprobs) != crc_:
            raise DamagedSegment(f"a part of response {key} is not what was written")
        both = joined.setdefault(key, (bytearray(), bytearray()))
        both[0].extend(tokens)
        both[1].extend(logprobs)
    return joined


def _sample(row: Any, tokens: dict[SampleKey, tuple[bytearray, bytearray]]) -> Sample:
    (pass_, prompt, index, state, term, slot, incarnation, version, finish_reason, reward, parts, failures, restarts,
     moves, inherent, across_rollback, reason, detail, leased_wall_s, finished_wall_s, tools, lives) = row  # fmt: skip
    key = SampleKey(GroupKey(pass_, prompt), index)
    own = tokens.get(key, (bytearray(), bytearray()))
    return Sample(
        key, SampleState(state), term, Holder(slot, incarnation) if incarnation is not None else None, version,
        own[0], own[1], finish_reason, reward, json.loads(parts), failures, restarts, moves, inherent,
        bool(across_rollback), DiscardReason(reason) if reason else None, detail, leased_wall_s, finished_wall_s,
        [ToolSpan(*span) for span in json.loads(tools)],
        {Holder(slot, incarnation): bool(dead) for slot, incarnation, dead in json.loads(lives)},
    )  # fmt: skip
