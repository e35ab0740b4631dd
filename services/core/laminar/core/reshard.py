"""Plans which bytes go where: shards of the trainer -> whole tensors of a version -> tensors of an engine's ranks.

    FSDP shards (dim 0) --plan_shard--> whole Hugging Face tensors in the version's buffer --plan_rank--> one rank

Planning is pure; an executor follows a list of `Copy` and knows nothing of models. This module holds what both halves
share: copies, shards and the coverage report. `reshard_models` knows the architectures, `reshard_layout` the engines.

Two rules keep weights from going stale unnoticed: every parameter is either updated, tied or exempt *by name*, and
every byte of a destination is written exactly once or is named as padding.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NAMES_SHOWN = 5
"""A renamed prefix makes thousands of unknown names; five show the pattern."""


class ReshardError(ValueError):
    """These tensors can't be carried over as they are. Nothing was copied: planning comes before the first byte."""


class NothingMatched(ReshardError):
    """Not one tensor has a known name."""


class UnknownTensors(ReshardError):
    """Some tensors have names that nobody asked for; the message lists the nearest known ones."""


class MissingTensors(ReshardError):
    """A parameter would keep its old value."""


class UnfitTensors(ReshardError):
    """A tensor has the right name and another shape or dtype, or is listed twice."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A row-major tensor without gaps."""

    name: str
    dtype: str
    """As safetensors writes it, such as BF16. Only compared, never interpreted."""
    item_bytes: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.item_bytes * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0; a scalar is one row."""
        return self.item_bytes * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Runs:
    """`count` runs of equal length, each `src_stride` and `dst_stride` bytes after the one before."""

    count: int = 1
    src_stride: int = 0
    dst_stride: int = 0


ONE_RUN = Runs()


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of one tensor that become bytes of another. Offsets count from the start of each tensor."""

    tensor: str
    src_offset: int
    dst_tensor: str
    dst_offset: int
    nbytes: int
    """Of one run."""
    runs: Runs = ONE_RUN

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.runs.count

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """(source offset, destination offset, bytes) of each run, in ascending order."""
        for index in range(self.runs.count):
            yield (
                self.src_offset + index * self.runs.src_stride,
                self.dst_offset + index * self.runs.dst_stride,
                self.nbytes,
            )

    def inverse(self) -> Copy:
        """The same bytes the other way."""
        runs = Runs(self.runs.count, self.runs.dst_stride, self.runs.src_stride)
        return Copy(self.dst_tensor, self.dst_offset, self.tensor, self.src_offset, self.nbytes, runs)


@dataclass(frozen=True, slots=True)
class Window:
    """Where a rectangle of bytes begins in a matrix of bytes."""

    row_bytes: int
    first_row: int
    first_byte: int = 0
    """Within the row."""

    @property
    def offset(self) -> int:
        return self.first_row * self.row_bytes + self.first_byte


def copy_rectangle(tensor: str, src: Window, dst_tensor: str, dst: Window, num_rows: int, width_bytes: int) -> Copy:
    """`num_rows` pieces of `width_bytes` each, in as few runs as there can be: whole rows on both sides are one."""
    assert num_rows > 0 and width_bytes > 0, (tensor, num_rows, width_bytes)
    if num_rows == 1 or width_bytes == src.row_bytes == dst.row_bytes:
        return Copy(tensor, src.offset, dst_tensor, dst.offset, num_rows * width_bytes)
    runs = Runs(num_rows, src.row_bytes, dst.row_bytes)
    return Copy(tensor, src.offset, dst_tensor, dst.offset, width_bytes, runs)


# ------------------------------------------------------------------------------------------------ the trainer's side


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor of the version, and the one range of bytes in a trainer's whole tensor that it is.

    Most pieces are a whole parameter; one of fused expert weights is a range of it.
    """

    source: TensorSpec
    offset: int
    target: TensorSpec


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one trainer rank sends: source offsets are in the rank's own shard of each tensor."""

    rank: int
    copies: tuple[Copy, ...]

    @property
    def total_bytes(self) -> int:
        return sum(copy.total_bytes for copy in self.copies)


def shard_range(tensor: TensorSpec, rank: int, world: int) -> tuple[int, int]:
    """Bytes [start, end) of the whole tensor that `rank` of `world` holds.

    FSDP2 cuts dimension 0 into chunks of ceil(rows / world): the last one may be shorter, and ranks may have none.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world}")
    if not tensor.shape:
        raise UnfitTensors(f"{tensor.name} is a scalar: it has no dimension to shard")
    rows = tensor.shape[0]
    chunk = -(-rows // world)
    return min(rank * chunk, rows) * tensor.row_bytes, min((rank + 1) * chunk, rows) * tensor.row_bytes


def plan_shard(pieces: Iterable[Piece], rank: int, world: int) -> ShardPlan:
    """The ranks' plans together write each byte of each piece once, and each copy is one run."""
    copies: list[Copy] = []
    for piece in pieces:
        start, end = shard_range(piece.source, rank, world)
        first = max(start, piece.offset)
        last = min(end, piece.offset + piece.target.nbytes)
        if first < last:
            copies.append(Copy(piece.source.name, first - start, piece.target.name, first - piece.offset, last - first))
    return ShardPlan(rank, tuple(copies))


# ------------------------------------------------------------------------------------------------ coverage by name


@dataclass(frozen=True, slots=True)
class Coverage:
    """What became of every name. The three never overlap."""

    updated: Mapping[str, tuple[str, ...]]
    """Parameter -> the tensors that its bytes come from, in the order in which they lie in it; none: all padding."""
    tied: Mapping[str, str]
    """Name -> the parameter that carries its value."""
    exempt: Mapping[str, str]
    """Name -> why it needs no update."""


def match_names(
    known: Mapping[str, tuple[int, ...]],
    offered: Sequence[TensorSpec],
    *,
    tied: Mapping[str, str],
    exempt: Mapping[str, str],
) -> dict[str, TensorSpec]:
    """The offered tensors by name, those that are tied or exempt left out; `known` maps each name to its shape.

    Raises NothingMatched, UnknownTensors, MissingTensors or UnfitTensors: `offered` must be all of `known`, each once.
    """
    twice = sorted(name for name, count in Counter(tensor.name for tensor in offered).items() if count > 1)
    if twice:
        raise UnfitTensors(f"{len(twice)} tensors are listed twice: {_some(twice)}")
    matched = {tensor.name: tensor for tensor in offered if tensor.name in known}
    named = known.keys() | tied.keys() | exempt.keys()
    unknown = [tensor.name for tensor in offered if tensor.name not in named]
    missing = [name for name in known if name not in matched]
    if not matched:
        found = _nearest(unknown, known) or "nothing"
        raise NothingMatched(f"none of {len(known)} parameters is among {len(offered)} tensors; there is {found}")
    if unknown:
        also = f"; and {len(missing)} parameters are missing: {_some(missing)}" if missing else ""
        names = _nearest(unknown, missing or known)
        raise UnknownTensors(f"{len(unknown)} tensors have unknown names: {names}{also}")
    if missing:
        raise MissingTensors(f"{len(missing)} parameters of {len(known)} are not there: {_some(missing)}")
    unfit = [
        f"{name} has shape {list(tensor.shape)}, not {list(known[name])}"
        for name, tensor in matched.items()
        if tensor.shape != known[name]
    ]
    if unfit:
        raise UnfitTensors(f"{len(unfit)} tensors do not fit: {_some(unfit)}")
    return matched


def _nearest(names: Sequence[str], known: Iterable[str]) -> str:
    """The first few names, each with the known ones that look most like it (a search over all of `known`)."""
    told: list[str] = []
    for name in names[:NAMES_SHOWN]:
        near = difflib.get_close_matches(name, known, n=2)
        told.append(f"{name} (nearest: {' or '.join(near)})" if near else f"{name} (nothing is near it)")
    return ", ".join(told) + _rest(names)


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:NAMES_SHOWN]) + _rest(items)


def _rest(items: Sequence[str]) -> str:
    return f", and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""


# ------------------------------------------------------------------------------------------------ coverage by bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one tensor: `count` runs of `nbytes`, `stride` apart."""

    offset: int
    nbytes: int
    count: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """How often the bytes of a tensor are touched."""

    missing_bytes: int
    repeated_bytes: int


def sources_of(copies: Iterable[Copy]) -> dict[str, list[Extent]]:
    """What `copies` read, by tensor."""
    found: defaultdict[str, list[Extent]] = defaultdict(list)
    for copy in copies:
        found[copy.tensor].append(Extent(copy.src_offset, copy.nbytes, copy.runs.count, copy.runs.src_stride))
    return dict(found)


def targets_of(copies: Iterable[Copy]) -> dict[str, list[Extent]]:
    """What `copies` write, by tensor."""
    return sources_of(copy.inverse() for copy in copies)


def tally(extents: Sequence[Extent], total_bytes: int) -> Tally:
    """Bytes of [0, total_bytes) in no extent, and those in more than one (counted each time after the first)."""
    shapes = {(extent.count, extent.stride) for extent in extents}
    if len(shapes) == 1:
        [(count, stride)] = shapes
        in_one_row = all(extent.offset + extent.nbytes <= stride for extent in extents)
        if count > 1 and count * stride == total_bytes and in_one_row:
            # Every row looks the same: one stands for thousands.
            row = tally([Extent(extent.offset, extent.nbytes) for extent in extents], stride)
            return Tally(row.missing_bytes * count, row.repeated_bytes * count)
    missing = repeated = end = 0
    for first, last in sorted(_intervals(extents)):
        assert 0 <= first < last <= total_bytes, (first, last, total_bytes)
        missing += max(first - end, 0)
        repeated += max(min(end, last) - first, 0)
        end = max(end, last)
    return Tally(missing + total_bytes - end, repeated)


def _intervals(extents: Iterable[Extent]) -> Iterator[tuple[int, int]]:
    for extent in extents:
        if extent.stride == extent.nbytes:
            yield extent.offset, extent.offset + extent.nbytes * extent.count
            continue
        for index in range(extent.count):
            first = extent.offset + index * extent.stride
            yield first, first + extent.nbytes
