"""Who stands where in the relay chain, and whose data a relay accepts.

The driver plans the membership list (`plan_chain`), numbers it with an epoch and sends it to every relay; a relay
judges each incoming chain connection against the list it has (`judge_upstream`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from laminar.core.identity import Epoch, Incarnation, Version


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


class UpstreamVerdict(Enum):
    """What a relay answers to another that wants to send it versions."""

    ACCEPT = "accepted"
    LOWER_EPOCH = "lowerEpoch"
    """A later list, or a link of a later list, is in force here."""
    NOT_UPSTREAM = "notUpstream"
    """By the list of this very epoch somebody else stands before this relay."""


@dataclass(frozen=True, slots=True)
class Place:
    """A relay's own knowledge: the list in force and the epoch of the upstream link it holds, if any."""

    slot: str
    epoch: Epoch
    members: tuple[str, ...]
    """Slots, master first; empty before the first list."""
    linked_epoch: Epoch | None = None

    @property
    def index(self) -> int | None:
        """Position in the list, 0 = master; None: not a member."""
        return self.members.index(self.slot) if self.slot in self.members else None

    @property
    def is_master(self) -> bool:
        """True also means that no link of a later list has been accepted."""
        return self.index == 0 and (self.linked_epoch is None or self.linked_epoch <= self.epoch)

    @property
    def upstream(self) -> str | None:
        """The slot that sends to this one."""
        index = self.index
        return self.members[index - 1] if index else None

    @property
    def downstream(self) -> str | None:
        """The slot that this one sends to."""
        index = self.index
        return self.members[index + 1] if index is not None and index + 1 < len(self.members) else None


def judge_upstream(place: Place, offered_slot: str, offered_epoch: Epoch) -> UpstreamVerdict:
    """One upstream at a time: the one of the highest epoch, and within an epoch the one that the list names.

    An upstream of a later epoch is accepted before the list itself has arrived: the driver sent it that list.
    """
    in_force = place.epoch if place.linked_epoch is None else max(place.epoch, place.linked_epoch)
    if offered_epoch < in_force:
        return UpstreamVerdict.LOWER_EPOCH
    if offered_epoch == place.epoch and place.members and offered_slot != place.upstream:
        return UpstreamVerdict.NOT_UPSTREAM
    return UpstreamVerdict.ACCEPT


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
