"""This relay's knowledge of the chain, and its fences: epoch, upstream, attempt."""

from __future__ import annotations

import threading
from dataclasses import replace

from laminar.core.chain import Place, UpstreamVerdict, judge_upstream
from laminar.core.identity import Epoch
from laminar.shell.transport import Conn
from laminar.wire.messages import ChainEpoch, ChainMember

NO_EPOCH = Epoch(-1)


class LowerEpoch(Exception):
    """A list that is not the newest. `current`: the epoch in force."""

    def __init__(self, current: int, detail: str) -> None:
        super().__init__(detail)
        self.current = current


class Membership:
    """Thread-safe. Invariants: epoch and attempt only grow; at most one upstream connection is in force."""

    def __init__(self, slot: str) -> None:
        self._lock = threading.Lock()
        self._place = Place(slot=slot, epoch=NO_EPOCH, members=())
        self._list: tuple[ChainMember, ...] = ()
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
    def downstream(self) -> ChainMember | None:
        """The member that this relay sends to."""
        with self._lock:
            slot = self._place.downstream
            return next((member for member in self._list if member.slot == slot), None)

    @property
    def lost(self) -> list[str]:
        """Neighbours that went away in this epoch and have not come back."""
        with self._lock:
            return sorted(self._lost)

    @property
    def in_force(self) -> int:
        """The highest epoch that a list or an accepted upstream link brought."""
        with self._lock:
            return self._in_force()

    def apply(self, epoch: ChainEpoch) -> bool:
        """Takes a new list; True: this relay is master no more, and what a trainer still sends does not count.

        The same list again changes nothing. Raises LowerEpoch for a lower epoch, or for another list of this epoch.
        """
        with self._lock:
            current = self._in_force()
            if epoch.epoch < current:
                raise LowerEpoch(current, f"epoch {epoch.epoch} is lower than {current}")
            members = tuple(epoch.members)
            if epoch.epoch == self._place.epoch:
                if members != self._list:
                    raise LowerEpoch(current, f"epoch {epoch.epoch} has another list here")
                return False
            before = self._place
            slots = tuple(member.slot for member in members)
            self._place = replace(before, epoch=Epoch(epoch.epoch), members=slots)
            self._list = members
            self._lost.clear()
            upstream = self._place.upstream
            if self._upstream is not None and self._upstream[0] != upstream:
                self._upstream[1].interrupt()
                self._upstream = None
            return before.is_master and not self._place.is_master

    def link_upstream(self, slot: str, epoch: int, conn: Conn) -> UpstreamVerdict:
        """Judges a neighbour that wants to send; an accepted one takes the place of the one before."""
        with self._lock:
            verdict = judge_upstream(self._place, slot, Epoch(epoch))
            if verdict is UpstreamVerdict.ACCEPT:
                if self._upstream is not None:
                    self._upstream[1].interrupt()
                self._upstream = (slot, conn)
                highest = max(epoch, self._place.linked_epoch or NO_EPOCH)
                self._place = replace(self._place, linked_epoch=Epoch(highest))
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
            return lost

    def downstream_linked(self, slot: str) -> None:
        with self._lock:
            self._lost.discard(slot)

    def downstream_lost(self, slot: str) -> bool:
        """True: this is news about a neighbour in force."""
        with self._lock:
            if slot != self._place.downstream or slot in self._lost:
                return False
            self._lost.add(slot)
            return True

    def admit_attempt(self, attempt: int) -> int:
        """The highest attempt heard of, this one included: a lower one than that is fenced off."""
        with self._lock:
            self._highest_attempt = max(self._highest_attempt, attempt)
            return self._highest_attempt

    def _in_force(self) -> int:
        linked = self._place.linked_epoch
        return max(self._place.epoch, NO_EPOCH if linked is None else linked)
