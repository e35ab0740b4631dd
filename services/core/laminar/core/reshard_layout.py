"""What each rank of a tensor- and expert-parallel engine takes of a version, as SGLang and vLLM lay it out.

- Column-parallel layers (q, k, v; gate, up) split the rows of their stored weight and are stacked in one tensor, each
  rank its share of q above its share of k above its share of v. Row-parallel layers (o, down) split the columns.
- Fewer KV heads than ranks: rank r holds head r // (ranks / heads), so neighbours hold the same one.
- Vocabulary tables are padded to a multiple of `vocab_pad` rows and split evenly; padding is never copied.
- Experts: ranks form `ep` groups of tp / ep neighbours; group g holds the g-th equal range of experts, stacked, and the
  group's ranks split each expert as a feed-forward is split. `ep = tp`: whole experts; `ep = 1`: all experts, split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laminar.core.reshard import (
    Copy,
    Coverage,
    Extent,
    ReshardError,
    TensorSpec,
    UnfitTensors,
    Window,
    copy_rectangle,
    match_names,
    sources_of,
    tally,
    targets_of,
)
from laminar.core.reshard_models import (
    EngineTensor,
    Model,
    Part,
    Split,
    engine_tensors,
    exempt_names,
    version_shapes,
)

VOCAB_PAD = 64
"""The engines' default: vocabulary tables then divide by every usual number of ranks."""


class Indivisible(ReshardError):
    """The model can't be split over so many ranks; an engine refuses it too."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How an engine spreads a model. `ep` divides `tp`."""

    tp: int = 1
    ep: int = 1
    vocab_pad: int = VOCAB_PAD

    def __post_init__(self) -> None:
        if min(self.tp, self.ep, self.vocab_pad) < 1 or self.tp % self.ep:
            raise ValueError(f"tp={self.tp}, ep={self.ep}, vocab_pad={self.vocab_pad}: positive, and ep divides tp")


@dataclass(frozen=True, slots=True)
class Padding:
    """Bytes of an engine's tensor that no version writes; the engine zeroed them when it started."""

    tensor: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Fills `targets` from a version: every byte by one copy, or it is padding. Writes are contiguous."""

    rank: int
    targets: tuple[TensorSpec, ...]
    copies: tuple[Copy, ...]
    padding: tuple[Padding, ...]
    coverage: Coverage


def plan_rank(model: Model, parallel: Parallel, rank: int, version: Sequence[TensorSpec]) -> RankPlan:
    """What `rank` reads of a version's whole tensors.

    Raises what `match_names` does if `version` is not the model's tensors, Indivisible if it can't be split so.
    """
    if not 0 <= rank < parallel.tp:
        raise ValueError(f"rank {rank} is not one of {parallel.tp}")
    exempt = exempt_names(version)
    found = match_names(version_shapes(model), version, tied=model.tied, exempt=exempt)
    targets: list[TensorSpec] = []
    copies: list[Copy] = []
    padding: list[Padding] = []
    updated: dict[str, tuple[str, ...]] = {}
    for tensor in engine_tensors(model):
        share = _share(tensor, parallel, rank)
        target = _target(tensor, share, found)
        fill = _fill(target, share, found)
        targets.append(target)
        copies.extend(fill)
        updated[target.name] = tuple(copy.tensor for copy in fill)
        written = sum(copy.total_bytes for copy in fill)
        if written < target.nbytes:
            padding.append(Padding(target.name, written, target.nbytes - written))
    plan = RankPlan(rank, tuple(targets), tuple(copies), tuple(padding), Coverage(updated, model.tied, exempt))
    _check_writes(plan)
    return plan


def plan_engine(model: Model, parallel: Parallel, version: Sequence[TensorSpec]) -> tuple[RankPlan, ...]:
    """All ranks' plans; together they read every byte of the version."""
    plans = tuple(plan_rank(model, parallel, rank, version) for rank in range(parallel.tp))
    read = sources_of(copy for plan in plans for copy in plan.copies)
    known = version_shapes(model)
    for tensor in version:
        if tensor.name in known:
            assert not tally(read.get(tensor.name, []), tensor.nbytes).missing_bytes, f"nobody reads {tensor.name}"
    return plans


def plan_return(plans: Sequence[RankPlan]) -> tuple[tuple[Copy, ...], ...]:
    """Per rank, the copies that put the whole tensors together again, as for comparing what was loaded with the source.

    Replicas are read from the first rank that has them, so each byte is written once.
    """
    taken: set[tuple[str, int, int, int]] = set()
    back: list[tuple[Copy, ...]] = []
    for plan in plans:
        mine = [copy for copy in plan.copies if _selection(copy) not in taken]
        taken.update(_selection(copy) for copy in mine)
        back.append(tuple(copy.inverse() for copy in mine))
    return tuple(back)


def check_engine(plan: RankPlan, live: Sequence[TensorSpec], exempt: Mapping[str, str] | None = None) -> Coverage:
    """The report for an engine's real parameters: each is updated by the plan, tied, or in `exempt` with a reason.

    Raises what `match_names` does: the plan must write all of them, and they must have its shapes and dtypes.
    """
    exempt = exempt or {}
    targets = {target.name: target for target in plan.targets}
    shapes = {name: target.shape for name, target in targets.items()}
    found = match_names(shapes, live, tied=plan.coverage.tied, exempt=exempt)
    for name, tensor in found.items():
        if (tensor.dtype, tensor.item_bytes) != (targets[name].dtype, targets[name].item_bytes):
            raise UnfitTensors(f"{name} is {tensor.dtype} in the engine and {targets[name].dtype} in the version")
    names = {tensor.name for tensor in live}
    tied = {name: owner for name, owner in plan.coverage.tied.items() if name in names}
    return Coverage(
        plan.coverage.updated, tied, {name: why for name, why in exempt.items() if name in names - found.keys()}
    )


# ------------------------------------------------------------------------------------------------ one tensor


@dataclass(frozen=True, slots=True)
class _Cut:
    """The rectangle of a stored tensor that a rank takes, and the rows that it fills with padding."""

    part: Part
    first_row: int
    num_rows: int
    num_target_rows: int
    first_column: int
    num_columns: int


def _share(tensor: EngineTensor, parallel: Parallel, rank: int) -> list[list[_Cut]]:
    """The rank's cuts, one list an expert (one list in all for a tensor that isn't of experts)."""
    if not tensor.per_expert:
        return [[_cut(part, parallel, parallel.tp, rank) for part in stack] for stack in tensor.stacks]
    group_size = parallel.tp // parallel.ep
    num_local = _divide(len(tensor.stacks), parallel.ep, f"experts of {tensor.name}")
    first = rank // group_size * num_local
    mine = tensor.stacks[first : first + num_local]
    return [[_cut(part, parallel, group_size, rank % group_size) for part in stack] for stack in mine]


def _cut(part: Part, parallel: Parallel, num_ranks: int, rank: int) -> _Cut:
    rows = part.shape[0]
    columns = part.shape[1] if len(part.shape) > 1 else 1
    match part.split:
        case Split.WHOLE:
            return _Cut(part, 0, rows, rows, 0, columns)
        case Split.ROWS:
            share = _divide(part.num_units, num_ranks, part.name) * (rows // part.num_units)
            return _Cut(part, rank * share, share, share, 0, columns)
        case Split.COLUMNS:
            share = _divide(part.num_units, num_ranks, part.name) * (columns // part.num_units)
            return _Cut(part, 0, rows, rows, rank * share, share)
        case Split.KV_HEADS:
            replicas = 1 if num_ranks < part.num_units else _divide(num_ranks, part.num_units, part.name)
            share = _divide(part.num_units * replicas, num_ranks, part.name) * (rows // part.num_units)
            return _Cut(part, rank // replicas * share, share, share, 0, columns)
        case Split.VOCABULARY:
            padded = -(-rows // parallel.vocab_pad) * parallel.vocab_pad
            share = _divide(padded, num_ranks, f"{part.name}, padded to {padded} rows,")
            first, last = min(rank * share, rows), min((rank + 1) * share, rows)
            return _Cut(part, first, last - first, share, 0, columns)


def _divide(units: int, num_ranks: int, what: str) -> int:
    if units % num_ranks:
        raise Indivisible(f"{what}: {units} can't be split evenly by {num_ranks}")
    return units // num_ranks


def _target(tensor: EngineTensor, share: list[list[_Cut]], found: Mapping[str, TensorSpec]) -> TensorSpec:
    types = {(found[part.name].dtype, found[part.name].item_bytes) for part in tensor.parts}
    if len(types) > 1:
        raise UnfitTensors(f"{tensor.name} is made of tensors of several dtypes: {sorted(types)}")
    [(dtype, item_bytes)] = types
    rows = sum(cut.num_target_rows for cut in share[0])
    shape = (rows, *(share[0][0].num_columns,) * (len(share[0][0].part.shape) - 1))
    return TensorSpec(tensor.name, dtype, item_bytes, (len(share), *shape) if tensor.per_expert else shape)


def _fill(target: TensorSpec, share: list[list[_Cut]], found: Mapping[str, TensorSpec]) -> list[Copy]:
    """Top to bottom, one copy a cut."""
    copies: list[Copy] = []
    row = 0
    for cut in (cut for stack in share for cut in stack):
        source = found[cut.part.name]
        width = cut.num_columns * source.item_bytes
        if cut.num_rows and width:
            src = Window(source.row_bytes, cut.first_row, cut.first_column * source.item_bytes)
            copies.append(copy_rectangle(source.name, src, target.name, Window(width, row), cut.num_rows, width))
        row += cut.num_target_rows
    return copies


def _selection(copy: Copy) -> tuple[str, int, int, int]:
    """Two ranks with the same selection of a tensor hold replicas: cuts are equal or disjoint."""
    return copy.tensor, copy.src_offset, copy.nbytes, copy.runs.count


def _check_writes(plan: RankPlan) -> None:
    written = targets_of(plan.copies)
    for item in plan.padding:
        written.setdefault(item.tensor, []).append(Extent(item.offset, item.nbytes))
    for target in plan.targets:
        found = tally(written.get(target.name, []), target.nbytes)
        assert not found.missing_bytes and not found.repeated_bytes, (target, found)
