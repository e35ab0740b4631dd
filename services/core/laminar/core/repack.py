"""Repack: empties replicas that only decode their tail onto others of the same version, so that they can refresh.

    snapshot (replicas, their running trajectories) -> plan_repack -> moves, each with its reason -> the executor:
    drain the source -> final appends -> still_fits? -> new terms at the destination -> the source refreshes, is leased

The algorithm is the paper's (section 5): candidates are replicas without queued work and with room; the one with the
least KV is emptied first, onto the candidate that will be fullest afterwards (best fit). Beyond it, a move has to pay:

    gain = min(R_source, R_destination) * step_base_s        replica-seconds saved
    cost = tokens to prefill again / prefill_tokens_per_s + move_overhead_s

R is the number of steps until a replica's last trajectory ends. A decode step takes step_base_s (reading the weights)
and a time for each token of KV. Apart, the two replicas take R_s * base + R_d * base and the time of their KV; merged,
max(R_s, R_d) * base and the same time of the same KV. So what a merge saves is min(R_s, R_d) readings of the weights:
nothing where one of the two ends soon, and little beside the prefill of very long contexts.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from laminar.core.identity import SampleKey, Version
from laminar.core.samples import Holder

REPACK_INTERVAL_S = 5.0
"""The paper's. A check also follows each publication at once."""
KV_CEILING = 0.99
"""The paper's C_max: a KV cache this full is full."""
_FEW = 64
"""So many bins are looked at one by one. Above, the search by fullness comes upon a partner after about as many: the
bins that may take the source by number are then at least this share of all."""

_LAST = 1 << 62
"""Above every `_Bin.order`."""


@dataclass(frozen=True, slots=True)
class RepackLimits:
    """What the plan keeps to, and what its arithmetic of gain and cost rests on."""

    batch_bound: int
    """The paper's B: trajectories of one replica with which decoding is still bound by memory, not by arithmetic."""
    step_base_s: float
    """Part of a decode step that does not depend on the batch: reading the weights, launches, all-reduces."""
    prefill_tokens_per_s: float
    move_overhead_s: float = 0.0
    """Of one emptied replica, the prefill aside: drain, final append, adoption."""
    refresh_s: float = 0.0
    """Load of a new version: all that a replica gains by being freed when there is nothing to lease."""
    kv_ceiling: float = KV_CEILING
    growth_tokens: int = 1024
    """Reserved for each trajectory beyond what it has, as far as it is expected to grow: half a minute of decoding of
    a 32B model. Longer, and destinations stand half empty for tokens that mostly never come."""
    max_moves: int = 3
    """Of one trajectory by repack in its life: each one computes its whole context again."""


@dataclass(frozen=True, slots=True)
class RunningTrajectory:
    """One unfinished response of a replica, whether it decodes or waits for a slot."""

    key: SampleKey
    kv_tokens: int
    """Prompt and response so far: what its KV holds, and what a move computes again."""
    expected_tokens: int
    """Estimate of what it generates yet (`laminar.core.lengths`); at most its budget."""
    moves: int = 0
    settled: bool = True
    """False: it has not generated a token since it moved here."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that generates, at one moment. Invariant: all its trajectories are bound to `version`."""

    holder: Holder
    version: Version
    kv_capacity_tokens: int
    kv_used_tokens: int
    """As the engine reports it: with shared prompts it is less than the sum over the trajectories."""
    kv_used_before_tokens: int | None
    """At the check before; None: this replica is new, or has been leased anew since."""
    num_waiting: int
    trajectories: tuple[RunningTrajectory, ...]
    usable: bool = True
    """False: suspect, draining, loading, or a move to or from it is under way."""


@dataclass(frozen=True, slots=True)
class RepackSnapshot:
    replicas: tuple[ReplicaLoad, ...]
    newest: Version
    """Newest visible version."""
    num_leases: int
    """Freed replicas that would be granted new groups now: startable groups by groups a lease, less idle replicas."""


class Stay(StrEnum):
    """Why a replica is not emptied."""

    NOT_USABLE = "notUsable"
    NOT_IN_TAIL = "notInTail"
    """The KV cache is full, or work is queued and the cache is not emptying."""
    TOO_MANY = "tooMany"
    """It runs B trajectories or more."""
    UNSETTLED = "unsettled"
    MOVED_OFTEN = "movedOften"
    NO_USE = "noUse"
    """Freed, it would get neither groups nor a newer version."""
    NO_ROOM = "noRoom"
    NO_GAIN = "noGain"
    """Computing the contexts again costs more than is saved, wherever there is room."""
    DESTINATION = "destination"
    """Others were moved onto it."""


@dataclass(frozen=True, slots=True)
class RepackMove:
    """Empty `source` onto `to`. Both are of `version`; `keys` are all of the source's trajectories."""

    source: Holder
    to: Holder
    version: Version
    keys: tuple[SampleKey, ...]
    gain_s: float
    cost_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RepackPlan:
    moves: tuple[RepackMove, ...]
    stays: tuple[tuple[Holder, Stay], ...]
    """Every replica with trajectories that is not emptied."""


@dataclass(slots=True)
class _Bin:
    """A candidate while the plan is made: what it holds, and what has been planned onto it."""

    replica: ReplicaLoad
    order: int
    ceiling_tokens: float
    load_tokens: int
    """With the reserve for growth."""
    num: int
    steps_left: int
    prefill_tokens: int
    may_leave: Stay | None
    """None: it may be emptied."""
    received: bool = False

    def fullness(self, source: _Bin) -> tuple[float, int]:
        """With `source` in it; of equals, the later one."""
        return (self.load_tokens + source.load_tokens) / self.ceiling_tokens, self.order


def plan_repack(snapshot: RepackSnapshot, limits: RepackLimits) -> RepackPlan:
    """Which replicas to empty now, and onto which. Pure: the same snapshot gives the same plan.

    No source is a destination, no destination a source. After the moves have been made, and before anything else
    changes, a second plan is empty.
    """
    stays: dict[Holder, Stay] = {}
    by_version: defaultdict[Version, list[_Bin]] = defaultdict(list)
    for order, replica in enumerate(sorted(snapshot.replicas, key=lambda replica: replica.holder)):
        if not replica.trajectories:
            continue
        reason = _not_a_candidate(replica, limits)
        if reason is None:
            by_version[replica.version].append(_bin(replica, order, limits))
        else:
            stays[replica.holder] = reason
    moves: list[RepackMove] = []
    num_leases = snapshot.num_leases
    # The oldest version first: its replicas have the most to gain from a refresh.
    for version in sorted(by_version):
        group = _Group(by_version[version], limits, newer=version < snapshot.newest)
        made = group.empty(num_leases)
        num_leases = max(0, num_leases - len(made))
        moves += made
        stays |= group.stays
    return RepackPlan(tuple(moves), tuple(sorted(stays.items())))


def still_fits(move: RepackMove, source: ReplicaLoad, to: ReplicaLoad, limits: RepackLimits) -> bool:
    """Asked again when the move is executed: may all that `source` holds now go to `to` as it is now?"""
    if source.version != move.version or to.version != move.version or not to.usable:
        return False
    trajectories = (*source.trajectories, *to.trajectories)
    room = limits.kv_ceiling * to.kv_capacity_tokens
    return len(trajectories) <= limits.batch_bound and _reserved(trajectories, limits) <= room


def _not_a_candidate(replica: ReplicaLoad, limits: RepackLimits) -> Stay | None:
    """The paper's test of the tail: KV in ramp-down or an empty queue, not full, and fewer than B."""
    if not replica.usable:
        return Stay.NOT_USABLE
    before = replica.kv_used_before_tokens
    falling = before is not None and replica.kv_used_tokens < before
    full = replica.kv_used_tokens >= limits.kv_ceiling * replica.kv_capacity_tokens
    if full or not (falling or replica.num_waiting == 0):
        return Stay.NOT_IN_TAIL
    return None if len(replica.trajectories) < limits.batch_bound else Stay.TOO_MANY


def _bin(replica: ReplicaLoad, order: int, limits: RepackLimits) -> _Bin:
    may_leave: Stay | None = None
    growth, max_moves = limits.growth_tokens, limits.max_moves
    load = prefill = steps = 0
    # One pass: this runs for every trajectory of the fleet.
    for trajectory in replica.trajectories:
        kv, expected = trajectory.kv_tokens, trajectory.expected_tokens
        prefill += kv
        load += kv + (expected if expected < growth else growth)
        if expected > steps:
            steps = expected
        if trajectory.moves >= max_moves:
            may_leave = Stay.MOVED_OFTEN
        if not trajectory.settled:
            may_leave = Stay.UNSETTLED
    return _Bin(
        replica=replica, order=order, ceiling_tokens=limits.kv_ceiling * replica.kv_capacity_tokens, load_tokens=load,
        num=len(replica.trajectories), steps_left=steps, prefill_tokens=prefill, may_leave=may_leave,
    )  # fmt: skip


def _reserved(trajectories: Iterable[RunningTrajectory], limits: RepackLimits) -> int:
    return sum(each.kv_tokens + min(each.expected_tokens, limits.growth_tokens) for each in trajectories)


class _Group:
    """The candidates of one version. Invariant: both indices hold exactly the bins that have not been emptied."""

    def __init__(self, bins: list[_Bin], limits: RepackLimits, *, newer: bool) -> None:
        self._bins = sorted(bins, key=lambda each: (each.replica.kv_used_tokens, each.order))
        self._limits = limits
        self._newer = newer
        self._by_order = {each.order: each for each in bins}
        self._shelves: defaultdict[float, list[tuple[int, int]]] = defaultdict(list)
        """(load, order) by ceiling: among bins of one size, the fullest afterwards is the fullest now."""
        self._by_num: list[tuple[int, int]] = []
        """(number of trajectories, order)"""
        for each in bins:
            self._put(each)
        self.stays: dict[Holder, Stay] = {}

    def empty(self, num_leases: int) -> list[RepackMove]:
        """Moves, with at most `num_leases` of them earning by new groups."""
        moves: list[RepackMove] = []
        sources = self._bins
        while sources:
            left: list[_Bin] = []
            before = len(moves)
            for source in sources:
                move = self._place(source, earns_groups=len(moves) < num_leases)
                if isinstance(move, RepackMove):
                    moves.append(move)
                else:
                    self.stays[source.replica.holder] = move
                    left.append(source)
            # What was moved may keep a destination busy for longer, and a merge with it pay now.
            sources = left if len(moves) > before else []
        for move in moves:
            self.stays.pop(move.source, None)
        return moves

    def _place(self, source: _Bin, *, earns_groups: bool) -> RepackMove | Stay:
        limits = self._limits
        if source.received:
            return Stay.DESTINATION
        if source.may_leave is not None:
            return source.may_leave
        if not (earns_groups or self._newer):
            return Stay.NO_USE
        cost_s = source.prefill_tokens / limits.prefill_tokens_per_s + limits.move_overhead_s
        most_s = float("inf") if earns_groups else limits.refresh_s
        if min(most_s, source.steps_left * limits.step_base_s) <= cost_s:
            return Stay.NO_GAIN
        best = self._best_fit(source, cost_s)
        if isinstance(best, Stay):
            return best
        gain_s = min(most_s, limits.step_base_s * min(source.steps_left, best.steps_left))
        self._merge(source, best)
        return RepackMove(
            source=source.replica.holder, to=best.replica.holder, version=source.replica.version,
            keys=tuple(each.key for each in source.replica.trajectories), gain_s=gain_s, cost_s=cost_s,
            reason="room for new groups" if earns_groups else "a newer version to load",
        )  # fmt: skip

    def _best_fit(self, source: _Bin, cost_s: float) -> _Bin | Stay:
        """The bin that is fullest with the source, among those with room where the move pays."""
        num_fitting = bisect_right(self._by_num, (self._limits.batch_bound - source.num, _LAST))
        if num_fitting == 0:
            return Stay.NO_ROOM
        if num_fitting <= _FEW:
            few = (self._by_order[order] for _, order in self._by_num[:num_fitting])
            return self._fullest(source, cost_s, sorted(few, key=lambda each: each.fullness(source), reverse=True))
        found: list[_Bin] = []
        had_room = False
        for ceiling_tokens, shelf in self._shelves.items():
            end = bisect_right(shelf, (int(ceiling_tokens) - source.load_tokens, _LAST))
            each = self._fullest(source, cost_s, (self._by_order[order] for _, order in reversed(shelf[:end])))
            if isinstance(each, _Bin):
                found.append(each)
            had_room |= each is not Stay.NO_ROOM
        if found:
            return max(found, key=lambda each: each.fullness(source))
        return Stay.NO_GAIN if had_room else Stay.NO_ROOM

    def _fullest(self, source: _Bin, cost_s: float, fullest_first: Iterable[_Bin]) -> _Bin | Stay:
        limits = self._limits
        had_room = False
        for each in fullest_first:
            if each is source or each.num + source.num > limits.batch_bound:
                continue
            if each.load_tokens + source.load_tokens > each.ceiling_tokens:
                continue
            had_room = True
            if each.steps_left * limits.step_base_s > cost_s:
                return each
        return Stay.NO_GAIN if had_room else Stay.NO_ROOM

    def _merge(self, source: _Bin, to: _Bin) -> None:
        self._take_off(source)
        self._take_off(to)
        to.load_tokens += source.load_tokens
        to.num += source.num
        to.steps_left = max(to.steps_left, source.steps_left)
        to.received = True
        self._put(to)

    def _put(self, each: _Bin) -> None:
        insort(self._shelves[each.ceiling_tokens], (each.load_tokens, each.order))
        insort(self._by_num, (each.num, each.order))

    def _take_off(self, each: _Bin) -> None:
        _remove(self._shelves[each.ceiling_tokens], (each.load_tokens, each.order))
        _remove(self._by_num, (each.num, each.order))


def _remove(places: list[tuple[int, int]], place: tuple[int, int]) -> None:
    index = bisect_right(places, place) - 1
    assert places[index] == place, "a bin is not where its load says"
    del places[index]


def candidates(replicas: Sequence[ReplicaLoad], limits: RepackLimits) -> list[Holder]:
    """Replicas in their tail: what a metric counts."""
    return [
        replica.holder for replica in replicas if replica.trajectories and _not_a_candidate(replica, limits) is None
    ]
