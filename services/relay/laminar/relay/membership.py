"""This relay's knowledge of the chain, and its fences: epoch, upstream, attempt."""

from __future__ import annotations

import threading
from dataclasses import replace

from laminar.core.chain import Place, Standing, UpstreamVerdict, Walk, judge_upstream, may_bypass
from laminar.core.identity import Epoch
from laminar.shell.transport import Conn, PeerLost
from laminar.wire.codec import frame
from laminar.wire.links import Replaced
from laminar.wire.messages import ChainEpoch, ChainMember

NO_EPOCH = Epoch(-1)
_REPLACED = frame(Replaced())


class LowerEpoch(Exception):
    """A list that is not the newest. `current`: the epoch in force."""

    def __init__(self, current: int, detail: str) -> None:
        super().__init__(detail)
        self.current = current


class Membership:
    """Thread-safe. Invariants: epoch and attempt only grow; at most one upstream connection is in force, that of the
    highest standing; within an epoch the target only moves away from lost members. Every member that lives and can be
    reached by the nearest living one before it gets the data, without a new list: as its target, or beside it."""

    def __init__(self, slot: str) -> None:
        self._lock = threading.Lock()
        self._place = Place(slot=slot, epoch=NO_EPOCH, members=())
        self._list: tuple[ChainMember, ...] = ()
        self._walk = Walk(())
        self._upstream: tuple[str, Conn] | None = None
        self._highest_attempt = -1
        self._lost: set[str] = set()

    @property
    def place(self) -> Place:
        with self._lock:
            return self._place

    @property
    def members(self) -> tuple[ChainMember, ...]:
        with self._lock:
            return self._list

    @property
    def downstream(self) -> tuple[ChainMember, Standing] | None:
        """The member that this relay sends to now, and the standing of that link."""
        with self._lock:
            slot = self._walk.target
            return None if slot is None else self._aim(slot)

    @property
    def passed_by(self) -> tuple[tuple[ChainMember, Standing], ...]:
        """Members that this relay has passed by, to be fed beside the target if they live."""
        with self._lock:
            return tuple(self._aim(slot) for slot in self._walk.passed)

    @property
    def lost(self) -> list[str]:
        """Neighbours that went away in this epoch and have not come back to their place in the chain."""
        with self._lock:
            return sorted(self._lost)

    @property
    def in_force(self) -> int:
        """The highest epoch that a list or an accepted upstream link brought."""
        with self._lock:
            return self._place.in_force.epoch

    def apply(self, epoch: ChainEpoch) -> bool:
        """Takes a new list; True: this relay is master no more, and what a trainer still sends does not count.

        The same list again changes nothing. Raises LowerEpoch for a lower epoch, or for another list of this epoch.
        """
        with self._lock:
            current = self._place.in_force.epoch
            if epoch.epoch < current:
                raise LowerEpoch(current, f"epoch {epoch.epoch} is lower than {current}")
            members = tuple(epoch.members)
            if epoch.epoch == self._place.epoch and members != self._list:
                raise LowerEpoch(current, f"epoch {epoch.epoch} has another list here")
            self._highest_attempt = max(self._highest_attempt, epoch.attempt)
            if epoch.epoch == self._place.epoch:
                return False
            before = self._place
            slots = tuple(member.slot for member in members)
            self._place = replace(before, epoch=Epoch(epoch.epoch), members=slots)
            self._list = members
            self._walk.renew(self._place.behind)
            self._lost.clear()
            self._judge_held_upstream()
            return before.is_master and not self._place.is_master

    def link_upstream(self, slot: str, offered: Standing, conn: Conn) -> UpstreamVerdict:
        """Judges a neighbour that wants to send; an accepted one takes the place of the one before."""
        with self._lock:
            verdict = judge_upstream(self._place, slot, offered)
            if verdict is UpstreamVerdict.ACCEPT:
                self._part_from_upstream()
                self._upstream = (slot, conn)
                self._place = replace(self._place, linked=offered)
                self._lost.discard(slot)
            return verdict

    def unlink_upstream(self, conn: Conn, *, lost: bool) -> bool:
        """The connection has ended; `lost`: without a goodbye. True: a neighbour in force was lost."""
        with self._lock:
            if self._upstream is None or self._upstream[1] is not conn:
                return False
            if lost:
                self._lost.add(self._upstream[0])
            self._upstream = None
            self._place = self._place.unlinked()
            return lost

    def upstream_silent(self, conn: Conn, *, silent: bool) -> bool:
        """Neither bytes nor pings come from it, or they come again. True: that is news about the neighbour in force."""
        with self._lock:
            if self._upstream is None or self._upstream[1] is not conn:
                return False
            slot = self._upstream[0]
            if (slot in self._lost) == silent:
                return False
            (self._lost.add if silent else self._lost.discard)(slot)
            return True

    def downstream_linked(self, slot: str) -> None:
        with self._lock:
            self._lost.discard(slot)

    def downstream_lost(self, slot: str) -> bool:
        """True: this is news about a member behind this relay."""
        with self._lock:
            if slot not in self._place.behind or slot in self._lost:
                return False
            self._lost.add(slot)
            return True

    def pass_by(self, slot: str) -> bool:
        """The target `slot` is lost. True: there is another target now, to be tried at once."""
        with self._lock:
            if self._walk.target != slot:
                return self._walk.target is not None
            # Asked of the connection itself: woken after a stop, our own threads may not have noticed its end yet.
            has_upstream = self._upstream is not None and self._upstream[1].is_open()
            if not may_bypass(self._place, has_upstream=has_upstream):
                return False
            return self._walk.pass_by()

    def admit_attempt(self, attempt: int) -> int:
        """The highest attempt heard of, this one included: a lower one than that is fenced off."""
        with self._lock:
            self._highest_attempt = max(self._highest_attempt, attempt)
            return self._highest_attempt

    # --- with the lock held ---

    def _aim(self, slot: str) -> tuple[ChainMember, Standing]:
        standing = self._place.standing_towards(slot)
        assert standing is not None, f"{slot} is not behind {self._place}"
        return next(member for member in self._list if member.slot == slot), standing

    def _judge_held_upstream(self) -> None:
        """After a new list: the link stays if it joins the members that this list says."""
        if self._upstream is None:
            return
        linked = self._place.linked
        same_epoch = linked is not None and linked.epoch == self._place.epoch
        bypass = linked.bypass if same_epoch and linked is not None else 0
        if self._upstream[0] != self._place.member_before(bypass):
            self._part_from_upstream()

    def _part_from_upstream(self) -> None:
        if self._upstream is None:
            return
        conn = self._upstream[1]
        self._upstream = None
        self._place = self._place.unlinked()
        try:
            # Or it would take us for lost and pass us by.
            conn.say(_REPLACED)
        except PeerLost:
            pass  # then it is lost itself
        conn.interrupt()
