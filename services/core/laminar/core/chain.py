"""Who stands where in the relay chain, and whose data a relay accepts.

The driver plans the membership list (`plan_chain`), numbers it with an epoch and sends it to every relay; a relay
judges each incoming chain connection against the list it has (`judge_upstream`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from laminar.core.identity import Epoch, Incarnation, Version

REJOIN_AFTER_S = 5.0
"""Longer than the pool needs to suspect a silent member: one that hangs does not come back in between."""
MISSED_BEAT_S = 1.3
"""Members beat once a second."""


@dataclass(frozen=True, slots=True)
class ChainNode:
    """One place in the membership list, master first. A relay that came back is another node: it lost its memory."""

    slot: str
    incarnation: Incarnation
    address: str
    """host:port of its chain listener."""
    machine: str


@dataclass(frozen=True, slots=True)
class RelayView:
    """A relay that is ready and heartbeating."""

    slot: str
    incarnation: Incarnation
    address: str
    machine: str
    newest: Version | None
    """Newest version that it holds whole and verified; None: none."""


def plan_chain(current: tuple[ChainNode, ...], ready: Sequence[RelayView]) -> tuple[ChainNode, ...] | None:
    """The next membership list, or None if `current` may stay.

    Members that are still ready keep their order; the others leave; new ones join at the tail, in the order of the
    topology (machine, slot). The master stays. If it is gone, the first that holds the newest complete version takes
    its place, since weights only flow down the chain. `ready` holds at most one view a slot.
    """
    views = {_identity(view): view for view in ready}
    assert len({view.slot for view in ready}) == len(ready), f"a slot is ready twice: {ready}"
    stay = [_node(views[_identity(node)]) for node in current if _identity(node) in views]
    known = {_identity(node) for node in current}
    joiners = sorted((view for view in ready if _identity(view) not in known), key=_topology)
    order = stay + [_node(view) for view in joiners]
    master_stays = bool(stay) and _identity(stay[0]) == _identity(current[0])
    if order and not master_stays:
        newest = max(_age(views[_identity(node)]) for node in order)
        master = next(node for node in order if _age(views[_identity(node)]) == newest)
        order = [master] + [node for node in order if node is not master]
    planned = tuple(order)
    return None if planned == current else planned


@dataclass(frozen=True, order=True, slots=True)
class Standing:
    """Which of two links counts more: the one of the later list; within a list, the one that passed more members by."""

    epoch: Epoch
    bypass: int = 0
    """Members between the two ends of the link that are passed by; 0: direct neighbours."""


class UpstreamVerdict(Enum):
    """What a relay answers to another that wants to send it versions."""

    ACCEPT = "accepted"
    LOWER_EPOCH = "lowerEpoch"
    """A later list, or a link of a later list, is in force here."""
    NOT_UPSTREAM = "notUpstream"
    """By the list of this very epoch this link does not join these two."""
    BYPASSED = "bypassed"
    """A member further up, which has passed the asking one by, sends here."""


@dataclass(frozen=True, slots=True)
class Place:
    """A relay's own knowledge: the list in force, and the links that brought it data.

    The epoch never goes back. The bypass count counts only while its link lasts: once that has ended, any member that
    the list puts before this one may send.
    """

    slot: str
    epoch: Epoch
    members: tuple[str, ...]
    """Slots, master first; empty before the first list."""
    linked: Standing | None = None
    """Of the upstream link in force; after it has ended, its epoch without its bypass count."""

    @property
    def index(self) -> int | None:
        """Position in the list, 0 = master; None: not a member."""
        return self.members.index(self.slot) if self.slot in self.members else None

    @property
    def in_force(self) -> Standing:
        """The highest standing that a list or an accepted link brought."""
        own = Standing(self.epoch)
        return own if self.linked is None else max(own, self.linked)

    @property
    def is_master(self) -> bool:
        """True also means that no link of a later list has been accepted."""
        return self.index == 0 and self.in_force.epoch <= self.epoch

    @property
    def upstream(self) -> str | None:
        """The slot before this one."""
        return self.member_before(0)

    def member_before(self, bypass: int) -> str | None:
        """The slot that sends to this one when `bypass` members between them are passed by."""
        index = self.index
        wanted = -1 if index is None else index - 1 - bypass
        return self.members[wanted] if wanted >= 0 and bypass >= 0 else None

    @property
    def behind(self) -> tuple[str, ...]:
        """Whom this relay may send to, the neighbour first."""
        index = self.index
        return () if index is None else self.members[index + 1 :]

    def unlinked(self) -> Place:
        """The upstream link has ended."""
        return self if self.linked is None else replace(self, linked=Standing(self.linked.epoch))

    def standing_towards(self, slot: str) -> Standing | None:
        """Of a link from here to `slot`; None: by the list in force it does not stand behind this relay."""
        return Standing(self.epoch, self.behind.index(slot)) if slot in self.behind else None


def judge_upstream(place: Place, offered_slot: str, offered: Standing) -> UpstreamVerdict:
    """One upstream at a time: the highest standing, if it joins the members that the list says.

    So a relay that was stopped, and wakes, does not take the place of the one that passed it by. An upstream of a
    later epoch is accepted before the list itself has arrived: the driver sent it that list.
    """
    in_force = place.in_force
    if offered.epoch < in_force.epoch:
        return UpstreamVerdict.LOWER_EPOCH
    if offered.epoch == place.epoch and place.members and offered_slot != place.member_before(offered.bypass):
        return UpstreamVerdict.NOT_UPSTREAM
    if offered < in_force:
        return UpstreamVerdict.BYPASSED
    return UpstreamVerdict.ACCEPT


def may_bypass(place: Place, *, has_upstream: bool) -> bool:
    """Only a relay that is fed may pass a lost neighbour by.

    One that was itself passed by (stopped for a while, then back) sees its neighbour leave for the other upstream; if
    it then reached past that neighbour with a higher standing, it would cut the rest of the chain off from the data.
    """
    return place.is_master or (place.index is not None and has_upstream)


class Walk:
    """Which member a relay sends to: the neighbour, or whoever stands behind the lost ones. Starts at the neighbour.

    Those passed by are knocked at until the next list, and fed beside the target if they answer: it may have been a
    short stop, or only the link that was lost. After the last member it begins again at the neighbour.
    """

    def __init__(self, behind: tuple[str, ...]) -> None:
        self._behind = behind
        self._position = 0

    @property
    def target(self) -> str | None:
        return self._behind[self._position] if self._behind else None

    @property
    def passed(self) -> tuple[str, ...]:
        """Members between this relay and its target."""
        return self._behind[: self._position]

    def renew(self, behind: tuple[str, ...]) -> bool:
        """A new list. True: the target stays, since it is now the neighbour."""
        stays = bool(behind) and behind[0] == self.target
        self._behind, self._position = behind, 0
        return stays

    def pass_by(self) -> bool:
        """The target is lost. True: there is another to try at once; False: back at the neighbour, after a pause."""
        self._position = (self._position + 1) % max(1, len(self._behind))
        return self._position > 0


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What one relay says of its neighbours. `silent_s`: since the pool heard that relay itself."""

    slot: str
    epoch: int | None
    lost: tuple[str, ...]
    silent_s: float


class LostRelays:
    """Members that their neighbours cannot reach, though the pool may still hear them: the next list goes without them.

    A relay is believed about those behind it, for it has tried to reach them; the word of one behind about the one
    before counts only together with the pool's own silence, since a relay that was passed by loses its upstream, too.
    """

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, int], float] = {}

    def observe(
        self, now_s: float, chain: Sequence[ChainNode], epoch: int, neighbourhoods: Iterable[Neighbourhood]
    ) -> None:
        places = {node.slot: index for index, node in enumerate(chain)}
        said = [each for each in neighbourhoods if each.epoch == epoch and each.slot in places]
        silent_s = {each.slot: each.silent_s for each in said}
        for each in said:
            for lost in each.lost:
                if lost not in places:
                    continue
                behind = places[lost] > places[each.slot]
                if behind or silent_s.get(lost, 0.0) > MISSED_BEAT_S:
                    self._until_s[lost, chain[places[lost]].incarnation] = now_s + REJOIN_AFTER_S

    def is_lost(self, slot: str, incarnation: int, now_s: float) -> bool:
        return now_s < self._until_s.get((slot, incarnation), -math.inf)


def _identity(member: ChainNode | RelayView) -> tuple[str, Incarnation, str]:
    return member.slot, member.incarnation, member.address


def _node(view: RelayView) -> ChainNode:
    return ChainNode(view.slot, view.incarnation, view.address, view.machine)


def _age(view: RelayView) -> int:
    return -1 if view.newest is None else view.newest


def _topology(view: RelayView) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    return _natural(view.machine), _natural(view.slot)


def _natural(name: str) -> list[tuple[int, str]]:
    """relay-10 comes after relay-2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]
