"""All links of one relay down the chain: the one to its target, and one to each member that it has passed by.

A member is passed by when its link is lost, which says little about the member itself: it may have been stopped for a
moment, or only its last word was lost. So it is knocked at until the next list and fed beside the target if it
answers. Each relay still has one upstream; only this one sends twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from laminar.relay.downstream import DownstreamLink
from laminar.relay.membership import Membership

MAX_BESIDE = 8
"""Each is a thread and shares this relay's link. Whoever is left out waits for the next list."""


class DownstreamLinks:
    """Thread-safe. Life: (`renew` after each list | `follow_walk` after each bypass)* -> `cut` -> `join`.

    `make(slot)` makes the link to a member that was passed by, `make(None)` the one to the target.
    """

    def __init__(self, membership: Membership, make: Callable[[str | None], DownstreamLink]) -> None:
        self._membership = membership
        self._make = make
        self._lock = threading.Lock()
        self._main: DownstreamLink | None = None
        self._beside: dict[str, DownstreamLink] = {}
        self._leaving: list[DownstreamLink] = []
        self._is_cut = False

    def renew(self) -> None:
        """A new list is in force: a link to the same neighbour stays, all others end with a goodbye."""
        aim = self._membership.downstream
        with self._lock:
            self._sweep()
            for slot in list(self._beside):
                self._leave(self._beside.pop(slot))
            if self._main is not None:
                if aim is not None and self._main.is_alive() and self._main.member == aim[0]:
                    self._main.kick()
                    return
                self._leave(self._main)
                self._main = None
            if aim is not None and not self._is_cut:
                self._main = self._make(None)
                self._main.start()

    def follow_walk(self) -> None:
        """The target has moved on, or back to the neighbour. Called by the link to it."""
        passed = [member.slot for member, _ in self._membership.passed_by][:MAX_BESIDE]
        with self._lock:
            self._sweep()
            for slot in [slot for slot in self._beside if slot not in passed]:
                self._leave(self._beside.pop(slot))
            for slot in passed:
                if slot not in self._beside and not self._is_cut:
                    self._beside[slot] = self._make(slot)
                    self._beside[slot].start()

    def cut(self) -> None:
        """Breaks all connections; no link starts any more."""
        with self._lock:
            self._is_cut = True
            for link in self._all():
                link.cut()

    def join(self) -> None:
        """Waits for all threads; after `cut`."""
        with self._lock:
            links = self._all()
            self._main, self._beside, self._leaving = None, {}, []
        for link in links:
            link.join()

    # --- with the lock held ---

    def _all(self) -> list[DownstreamLink]:
        return [*self._leaving, *self._beside.values(), *([] if self._main is None else [self._main])]

    def _leave(self, link: DownstreamLink) -> None:
        link.stop()
        self._leaving.append(link)

    def _sweep(self) -> None:
        for link in [link for link in self._leaving if not link.is_alive()]:
            link.join()
            self._leaving.remove(link)
