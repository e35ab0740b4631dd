"""Which relays the next list of the chain goes without, because their neighbours cannot reach them.

A lost link has two ends. A relay that the pool hears no more is gone. One that the pool still hears is *apart* from its
neighbour: the network between the two is broken, and taking members out cannot mend it. So the one that is apart from
more members is taken out, else the one behind; it comes back after a while, at a place beside members that can reach
it (`plan_chain`), and where there is no such place it stays out for longer and longer. Meanwhile the engines of its
machine copy from other relays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laminar.core.chain import Apart, ChainNode

REJOIN_AFTER_S = 5.0
"""Longer than the pool needs to suspect a silent member: one that hangs does not come back in between."""
REJOIN_MOST_S = 60.0
"""The wait doubles for one that is lost again soon after it came back. Each return is a new list, and the only way to
find out that the network is whole again."""
APART_S = 600.0
"""Two that could not reach each other are not made neighbours again for this long, while there is another place."""
MISSED_BEAT_S = 1.3
"""Members beat once a second."""
HEARD_AFTER_S = 0.5
"""A word of a lost relay that came this long after the news is no word that was on its way when it died."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What one relay says of its neighbours. `silent_s`: since the pool heard that relay itself."""

    slot: str
    incarnation: int
    epoch: int | None
    lost: tuple[str, ...]
    silent_s: float


@dataclass(frozen=True, slots=True)
class _Out:
    """Taken out, to come back at `until_s`; it had to wait `wait_s`."""

    until_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class _Doubt:
    """`lost` cannot be reached from `reporter`, by the news of `since_s`. It may be dead."""

    reporter: str
    lost: str
    incarnation: int
    since_s: float


class LostRelays:
    """A relay is believed about those behind it, for it has tried to reach them; the word of one behind about the one
    before counts only together with the pool's own silence, since a relay that was passed by loses its upstream, too.
    """

    def __init__(self) -> None:
        self._out: dict[tuple[str, int], _Out] = {}
        self._doubts: dict[tuple[str, str], _Doubt] = {}
        self._apart_s: dict[frozenset[str], float] = {}

    def observe(
        self, now_s: float, chain: Sequence[ChainNode], epoch: int, neighbourhoods: Iterable[Neighbourhood]
    ) -> None:
        """`chain`: the list of `epoch`, in force."""
        everybody = list(neighbourhoods)
        self._settle_doubts(now_s, everybody)
        self._forget(now_s)
        nodes = {node.slot: node for node in chain}
        places = {node.slot: index for index, node in enumerate(chain)}
        said = [each for each in everybody if each.epoch == epoch and each.slot in places]
        silent_s = {each.slot: each.silent_s for each in said}
        for each in said:
            for lost in sorted(set(each.lost) & places.keys()):
                if places[lost] > places[each.slot]:
                    self._lost_behind(now_s, nodes[each.slot], nodes[lost])
                elif silent_s.get(lost, 0.0) > MISSED_BEAT_S:
                    self._take_out(nodes[lost], now_s)

    def is_lost(self, slot: str, incarnation: int, now_s: float) -> bool:
        out = self._out.get((slot, incarnation))
        return out is not None and now_s < out.until_s

    def apart(self, now_s: float) -> Apart:
        """Pairs that live and could not reach each other of late."""
        return self._apart_since(now_s - APART_S)

    def _lost_behind(self, now_s: float, reporter: ChainNode, lost: ChainNode) -> None:
        if (reporter.slot, lost.slot) not in self._doubts:
            doubt = _Doubt(reporter.slot, lost.slot, lost.incarnation, now_s)
            self._doubts[reporter.slot, lost.slot] = doubt
        pairs = self._apart_since(now_s - REJOIN_MOST_S) | {frozenset((reporter.slot, lost.slot))}
        num_reporter, num_lost = (sum(node.slot in pair for pair in pairs) for node in (reporter, lost))
        self._take_out(reporter if num_reporter > num_lost else lost, now_s)

    def _settle_doubts(self, now_s: float, everybody: Sequence[Neighbourhood]) -> None:
        heard_s = {(each.slot, each.incarnation): now_s - each.silent_s for each in everybody}
        for key, doubt in list(self._doubts.items()):
            if heard_s.get((doubt.lost, doubt.incarnation), 0.0) > doubt.since_s + HEARD_AFTER_S:
                self._apart_s[frozenset(key)] = now_s
                del self._doubts[key]
            elif now_s > doubt.since_s + REJOIN_AFTER_S:
                del self._doubts[key]

    def _forget(self, now_s: float) -> None:
        self._apart_s = {pair: noted_s for pair, noted_s in self._apart_s.items() if noted_s >= now_s - APART_S}
        self._out = {key: out for key, out in self._out.items() if now_s < out.until_s + REJOIN_MOST_S}

    def _apart_since(self, since_s: float) -> Apart:
        return frozenset(pair for pair, noted_s in self._apart_s.items() if noted_s >= since_s)

    def _take_out(self, member: ChainNode, now_s: float) -> None:
        key = member.slot, member.incarnation
        before = self._out.get(key)
        if before is None:
            wait_s = REJOIN_AFTER_S
        elif now_s < before.until_s:
            wait_s = before.wait_s
        else:
            wait_s = min(REJOIN_MOST_S, 2 * before.wait_s)
        self._out[key] = _Out(now_s + wait_s, wait_s)
