"""The publisher: a thread that brings each version to the master relay and keeps its bytes until the next is due.

    training thread   buffer() -> copy the weights -> submit()          (the only time training stands still)
    publisher thread  reserve -> hash -> hand over to the master -> wait until visible -> wait for the next
                                  ^ again, the same bytes, when the epoch or the master changes
    lookout thread                ends a hand-over to a master that is master no longer (laminar.trainer.lookout)

A visible version is still offered to every new master: if all relays that held it die together, nobody else has it,
and replicas would wait for it for ever.

There are two buffers: the thread keeps one while the training thread fills the other. A version that is still being
handed over makes the next one wait; one that lies in a master's memory but is not visible yet gives way to the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from laminar.shell.handover import HandedOver, HandOverRefused, best_chunk_bytes, hand_over
from laminar.shell.logs import fields
from laminar.shell.transport import Dial, PeerLost
from laminar.trainer.background import Background
from laminar.trainer.books import Books
from laminar.trainer.failures import AttemptSuperseded, InputFailure, TrainerFailure
from laminar.trainer.lookout import Lookout, Route
from laminar.wire.links import OfferVerdict
from laminar.wire.manifest import Manifest, TensorEntry, layout_bytes, make_manifest

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Until the relays have measured their links."""
ASK_S = 2.0
POLL_S = 0.5
"""Long-poll time while a version is not visible; also how late a newer version is noticed meanwhile."""
SILENCE_S = 10.0
"""A master that takes no byte for this long is lost; the driver's next epoch names another."""
VISIBLE_DEADLINE_S = 300.0
KEEP_CHECK_S = 1.0
"""How late a change of the chain is noticed once a version is visible."""


class HandOver(Protocol):
    """`laminar.shell.handover.hand_over`."""

    def __call__(
        self, address: str, token: str, job_uid: str, attempt: int, manifest: Manifest, chunks: bytearray,
        deadline_s: float, *, dial: Dial,
    ) -> HandedOver: ...  # fmt: skip


class AskChunkBytes(Protocol):
    """`laminar.shell.handover.best_chunk_bytes`."""

    def __call__(
        self, address: str, token: str, job_uid: str, attempt: int, weights_bytes: int, deadline_s: float, *,
        dial: Dial,
    ) -> int: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sender:
    """Who publishes."""

    job_uid: str
    token: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Publication:
    step: int
    buffer: bytearray


class Publisher:
    """Owner: rank 0's training thread. Life of a publication: submitted -> handed over -> visible | given way.

    Invariant: the bytes of the newest publication that was taken up stay unchanged until the next one is.
    """

    def __init__(
        self,
        make_books: Callable[[], Books],
        sender: Sender,
        entries: list[TensorEntry],
        parent: int | None,
        hand_over: HandOver = hand_over,
        ask_chunk_bytes: AskChunkBytes = best_chunk_bytes,
    ) -> None:
        self._make_books = make_books
        self._sender = sender
        self._entries = entries
        self._parent = parent
        self._hand_over = hand_over
        self._ask_chunk_bytes = ask_chunk_bytes
        self._chunk_bytes = CHUNK_BYTES
        self._digest = ""
        self._buffers = (bytearray(layout_bytes(entries)), bytearray(layout_bytes(entries)))
        self._changed = threading.Condition()
        self._pending: Publication | None = None
        self._current: Publication | None = None
        self._handed_over = True
        self._visible_step: int | None = None
        self._submitted_step: int | None = None
        self._closing = False
        self._lookout = Lookout(make_books)
        self._thread = Background("publisher", self._run, self._wake)

    def buffer(self) -> bytearray:
        """The buffer to fill next. Waits while the earlier publication is still being handed over."""
        with self._changed:
            self._wait(lambda: self._pending is None and self._handed_over, None)
            taken = self._current.buffer if self._current is not None else None
            return self._buffers[1] if taken is self._buffers[0] else self._buffers[0]

    def submit(self, step: int, buffer: bytearray) -> None:
        """Publishes a buffer of `buffer()`, now filled, as the weights of `step`. Returns at once."""
        with self._changed:
            assert self._pending is None, "fill a buffer of buffer() first"
            self._pending = Publication(step, buffer)
            self._submitted_step = step
            self._handed_over = False
            self._changed.notify_all()

    def wait_visible(self, deadline_s: float = VISIBLE_DEADLINE_S) -> None:
        """Returns when the last submitted version is visible. Raises TrainerFailure after `deadline_s`."""
        with self._changed:
            if not self._wait(lambda: self._visible_step == self._submitted_step, deadline_s):
                raise TrainerFailure(
                    f"The weights of step {self._submitted_step} did not become visible within {deadline_s:.0f} s: no "
                    f"relay holds them. The next attempt publishes them again."
                )

    def check(self) -> None:
        """Raises what ended the thread, e.g. Conflict: a newer attempt trains."""
        self._thread.check()

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after what it is doing; a version that is not visible yet is left as it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._lookout.close()

    def _wait(self, condition: Callable[[], bool], deadline_s: float | None) -> bool:
        """Under the lock: until `condition` holds (True) or the deadline has passed (False). Raises as `check`."""
        ends_s = None if deadline_s is None else time.monotonic() + deadline_s
        while not condition():
            self._thread.check()
            left_s = 1.0 if ends_s is None else min(1.0, ends_s - time.monotonic())
            if left_s <= 0:
                return False
            self._changed.wait(left_s)
        return True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        with self._make_books() as books:
            while (publication := self._next()) is not None:
                self._deliver(books, publication)

    def _next(self) -> Publication | None:
        with self._changed:
            while self._pending is None and not self._closing:
                self._changed.wait()
            self._current, self._pending = self._pending, None
            return self._current

    def _deliver(self, books: Books, publication: Publication) -> None:
        reserved = books.reserve(publication.step, self._parent)
        route, held_by = Route(reserved.epoch, reserved.master), None
        self._plan_chunks(reserved.version, route)
        manifest = self._manifest(publication, reserved.version)
        self._parent = reserved.version
        while True:
            if route.master and route != held_by and self._send(route, manifest, publication.buffer):
                held_by = route
                self._mark_handed_over()
            view = books.publication(reserved.version, route.epoch, POLL_S)
            if view.visible:
                self._mark_visible(publication.step)
            if self._may_leave(handed_over=view.visible or held_by is not None):
                return
            if view.visible:
                self._rest()
            route = Route(view.epoch, view.master)

    def _plan_chunks(self, version: int, route: Route) -> None:
        """The cut of the next version, by the master's knowledge of the links; once cut, a version stays so."""
        if not route.master:
            return
        sender, weights_bytes = self._sender, len(self._buffers[0])
        try:
            with self._lookout.watch(version, route) as line:
                asked = self._ask_chunk_bytes(
                    route.master, sender.token, sender.job_uid, sender.attempt, weights_bytes, ASK_S, dial=line.dial
                )
        except PeerLost:
            return  # the next master knows another number, or none: any cut is right
        if asked and not 2 / 3 < asked / self._chunk_bytes < 3 / 2:
            log.info("chunk size", extra=fields(chunk_bytes=asked, before=self._chunk_bytes))
            self._chunk_bytes = asked

    def _manifest(self, publication: Publication, version: int) -> Manifest:
        manifest = make_manifest(
            job_uid=self._sender.job_uid, version=version, step=publication.step, attempt=self._sender.attempt,
            tensors=self._entries, buffer=publication.buffer, chunk_bytes=self._chunk_bytes,
        )  # fmt: skip
        log.info("publishing", extra=fields(version=version, step=publication.step, digest=manifest.digest))
        if manifest.digest == self._digest:
            log.warning(
                "the published weights equal the version before: no group was used, or the updates are below the "
                "precision of the published dtype",
                extra=fields(version=version, step=publication.step),
            )
        self._digest = manifest.digest
        return manifest

    def _send(self, route: Route, manifest: Manifest, buffer: bytearray) -> bool:
        """Whether the master at `route` holds the version now. False: ask the pool for the next master."""
        sender = self._sender
        try:
            with self._lookout.watch(manifest.version, route) as line:
                outcome = self._hand_over(
                    route.master, sender.token, sender.job_uid, sender.attempt, manifest, buffer, SILENCE_S,
                    dial=line.dial,
                )  # fmt: skip
        except PeerLost as error:
            log.warning("the master relay was lost", extra=fields(master=route.master, epoch=route.epoch, error=error))
            return False
        except HandOverRefused as error:
            if not error.is_final:
                log.info("this relay is not the master", extra=fields(master=route.master, epoch=route.epoch))
                return False
            raise refusal(error, manifest) from error
        log.info("handed over", extra=fields(version=manifest.version, master=route.master, outcome=outcome))
        return True

    def _mark_handed_over(self) -> None:
        with self._changed:
            self._handed_over = self._pending is None
            self._changed.notify_all()

    def _mark_visible(self, step: int) -> None:
        with self._changed:
            self._visible_step = step
            self._handed_over = self._pending is None
            self._changed.notify_all()

    def _rest(self) -> None:
        """Until there is something new to publish, or it is time to look at the chain again."""
        with self._changed:
            if self._pending is None and not self._closing:
                self._changed.wait(KEEP_CHECK_S)

    def _may_leave(self, *, handed_over: bool) -> bool:
        """A newer publication waits and this one was handed over at least once; or the owner closes."""
        with self._changed:
            return self._closing or (handed_over and self._pending is not None)


def refusal(error: HandOverRefused, manifest: Manifest) -> TrainerFailure:
    """What a final refusal of the master means for this attempt."""
    match error.verdict:
        case OfferVerdict.LOWER_ATTEMPT:
            return AttemptSuperseded(f"The relays already follow trainer attempt {error.current}: {error}.")
        case OfferVerdict.TOO_LARGE:
            return InputFailure(
                f"The weights ({manifest.total_bytes / 2**20:.1f} MiB) do not fit the relays' slots: {error}."
            )
        case _:
            return TrainerFailure(f"The master relay refused version {manifest.version}: {error}.")
