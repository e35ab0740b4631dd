"""Receiving side: versions from the chain's upstream, or from the trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from laminar.core.broadcast import LinkMeter
from laminar.core.chain import Standing, UpstreamVerdict
from laminar.core.identity import Epoch
from laminar.relay.counters import Counters
from laminar.relay.membership import Membership
from laminar.relay.serving import Credentials
from laminar.relay.store import TooLarge, VersionStore
from laminar.relay.uses import Incoming, VersionLost
from laminar.shell.feeding import BEAT_S, SLICE_S, Life
from laminar.shell.handover import PURPOSE
from laminar.shell.logs import fields
from laminar.shell.transport import (
    SILENCE_S,
    BadPeer,
    Conn,
    PeerLost,
    Refusal,
    prove_as_listener,
    recv_message,
    send_message,
)
from laminar.wire.codec import frame
from laminar.wire.links import (
    CHUNK_HEADER,
    FRAME_ABORT,
    FRAME_PING,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Beat,
    Hello,
    LinkKind,
    LinkVerdict,
    OfferVerdict,
    Stored,
    Welcome,
)
from laminar.wire.manifest import ChunkHash, Manifest, ManifestError, check_manifest, verify_hash

PART_BYTES = 512 << 10
"""Hashed as soon as it is there, while it lies in the core's cache (2 MiB and more of L2); larger parts are read twice
from memory, smaller ones cost more calls."""

log = logging.getLogger("laminar.relay")


class Beats:
    """The receiver's `Watch` while a version is under way: shows the sender that we live, and minds its silence.

    The beats come from the very thread that takes the bytes: if that hangs, they stop.
    """

    slice_s = SLICE_S

    def __init__(self, conn: Conn, tell_silence: Callable[[bool], None]) -> None:
        self.have = 0
        self._conn = conn
        self._tell_silence = tell_silence
        self._life = Life()
        self._told_s = self._looked_s = time.monotonic()
        self._moved = False
        self._is_silent = False

    def look(self, moved_bytes: int = 0) -> None:
        now_s = time.monotonic()
        self._moved = self._moved or moved_bytes > 0
        if now_s - self._looked_s < self.slice_s / 2:
            return
        self._looked_s = now_s
        if self._moved:
            self._moved = False
            self.heard()
        if now_s - self._told_s >= BEAT_S and self._conn.say(frame(Beat(have=self.have))):
            self._told_s = now_s
        if not self._is_silent and not self._life.look():
            self._is_silent = True
            self._tell_silence(True)

    def heard(self) -> None:
        """The sender lives."""
        self._life.heard()
        if self._is_silent:
            self._is_silent = False
            self._tell_silence(False)


class UpstreamServer:
    """`serve` runs one data connection, in its own thread."""

    def __init__(
        self,
        credentials: Credentials,
        membership: Membership,
        store: VersionStore,
        counters: Counters,
        meter: LinkMeter,
        pull: Callable[[Conn], None],
        on_change: Callable[[], None],
    ) -> None:
        self._credentials = credentials
        self._membership = membership
        self._store = store
        self._counters = counters
        self._meter = meter
        self._pull = pull
        self._on_change = on_change

    def serve(self, conn: Conn) -> None:
        """Raises PeerLost when the sender has gone, BadPeer when it breaks the rules."""
        prove_as_listener(conn, self._credentials.token, self._credentials.job_uid, PURPOSE)
        hello = recv_message(conn, Hello, SMALL_MESSAGE_BYTES)
        match hello.kind:
            case LinkKind.CHAIN:
                self._serve_chain(conn, hello)
            case LinkKind.HANDOVER:
                self._serve_trainer(conn, hello)
            case LinkKind.PULL:
                self._welcome(conn, LinkVerdict.ACCEPTED)
                self._pull(conn)

    def _serve_chain(self, conn: Conn, hello: Hello) -> None:
        verdict = self._membership.link_upstream(hello.slot, Standing(Epoch(hello.epoch), hello.bypass), conn)
        self._welcome(conn, LinkVerdict(verdict.value))
        if verdict is not UpstreamVerdict.ACCEPT:
            self._counters.declined(verdict.value)
            return
        what = fields(upstream=hello.slot, epoch=hello.epoch, bypass=hello.bypass)
        log.info("upstream linked", extra=what)
        lost = True
        try:
            while True:
                announced = recv_message(conn, Announce, MANIFEST_MESSAGE_BYTES, None)
                if announced.manifest is None:
                    lost = False
                    return
                self._take(conn, announced.manifest, None)
        finally:
            if self._membership.unlink_upstream(conn, lost=lost):
                log.warning("upstream lost", extra=what)
                self._on_change()

    def _serve_trainer(self, conn: Conn, hello: Hello) -> None:
        self._membership.admit_attempt(hello.attempt)
        # The trainer is a node of the pipeline as well: its link to the master is the first hop.
        num_nodes = 1 + max(1, len(self._membership.place.members))
        chunk_bytes = self._meter.chunk_bytes(num_nodes, hello.weights_bytes) if hello.weights_bytes > 0 else 0
        self._welcome(conn, LinkVerdict.ACCEPTED, chunk_bytes)
        announced = recv_message(conn, Announce, MANIFEST_MESSAGE_BYTES)
        if announced.manifest is None:
            return
        self._take(conn, announced.manifest, hello.attempt)

    def _welcome(self, conn: Conn, verdict: LinkVerdict, chunk_bytes: int = 0) -> None:
        current, held = self._membership.in_force, self._store.held()
        send_message(conn, Welcome(verdict=verdict, current=current, held=held, chunk_bytes=chunk_bytes))

    def _take(self, conn: Conn, manifest: Manifest, attempt: int | None) -> None:
        """One announced version; `attempt`: that of the trainer, None from the chain."""
        beats = Beats(conn, lambda silent: self._tell_silence(conn, silent=silent))
        try:
            check_manifest(manifest)
        except ManifestError as error:
            raise BadPeer(Refusal.MALFORMED, str(error)) from error
        answer = self._judge(manifest, attempt)
        if answer.verdict is not OfferVerdict.SEND:
            self._decline(conn, manifest, answer)
            return
        try:
            incoming = self._store.begin(manifest, conn.interrupt, beats.look)
        except TooLarge as error:
            self._decline(
                conn, manifest, Answer(verdict=OfferVerdict.TOO_LARGE, current=error.limit_bytes, detail=str(error))
            )
            return
        except VersionLost as error:
            raise PeerLost(str(error)) from error
        try:
            beats.have = incoming.have
            send_message(conn, Answer(verdict=OfferVerdict.SEND, have=incoming.have))
            beats.heard()
            if self._receive(conn, incoming, beats):
                incoming.complete()
                log.info("version complete", extra=fields(version=manifest.version, bytes=manifest.total_bytes))
                send_message(conn, self._stored(manifest))
        except VersionLost as error:
            raise PeerLost(str(error)) from error
        finally:
            incoming.leave()

    def _stored(self, manifest: Manifest) -> Stored:
        return Stored(
            version=manifest.version, digest=manifest.digest, byte_s=self._meter.byte_s, message_s=self._meter.message_s
        )

    def _tell_silence(self, conn: Conn, *, silent: bool) -> None:
        if self._membership.upstream_silent(conn, silent=silent):
            log.warning("upstream is silent" if silent else "upstream is heard again", extra=fields(peer=conn.peer))
            self._on_change()

    def _judge(self, manifest: Manifest, attempt: int | None) -> Answer:
        if manifest.job_uid != self._credentials.job_uid:
            return Answer(verdict=OfferVerdict.CONFLICT, detail=f"the weights are of job {manifest.job_uid}")
        highest = self._membership.admit_attempt(manifest.attempt if attempt is None else attempt)
        if attempt is not None:
            if attempt < highest:
                return Answer(
                    verdict=OfferVerdict.LOWER_ATTEMPT,
                    current=highest,
                    detail=f"attempt {attempt} is over: {highest} trains",
                )
            place = self._membership.place
            if not place.is_master:
                return Answer(
                    verdict=OfferVerdict.NOT_MASTER,
                    current=self._membership.in_force,
                    detail=f"{place.slot} is not master",
                )
        held = self._store.held()
        for item in held:
            if item.version == manifest.version:
                if item.digest == manifest.digest:
                    return Answer(verdict=OfferVerdict.HELD, current=item.version)
                detail = f"version {item.version} is here with digest {item.digest}, not {manifest.digest}"
                return Answer(verdict=OfferVerdict.CONFLICT, current=item.version, detail=detail)
        if held and held[-1].version > manifest.version:
            return Answer(verdict=OfferVerdict.SUPERSEDED, current=held[-1].version)
        return Answer(verdict=OfferVerdict.SEND)

    def _decline(self, conn: Conn, manifest: Manifest, answer: Answer) -> None:
        self._counters.declined(answer.verdict)
        level = logging.ERROR if answer.verdict in (OfferVerdict.TOO_LARGE, OfferVerdict.CONFLICT) else logging.INFO
        what = fields(version=manifest.version, verdict=answer.verdict, why=answer.detail)
        log.log(level, "version not taken", extra=what)
        send_message(conn, answer)

    def _receive(self, conn: Conn, incoming: Incoming, beats: Beats) -> bool:
        """The missing chunks, straight into the slot, each hashed as it arrives. False: the sender gave the version
        up."""
        manifest = incoming.manifest
        header = bytearray(CHUNK_HEADER.size)
        index = incoming.have
        while index < manifest.num_chunks:
            conn.recv_into(memoryview(header), SILENCE_S, beats)
            got, num_bytes = CHUNK_HEADER.unpack(header)
            if got in (FRAME_PING, FRAME_ABORT) and num_bytes == 0:
                if got == FRAME_ABORT:
                    return False
                continue
            with incoming.chunk(index) as place:
                if got != index or num_bytes != len(place):
                    what = f"chunk {got} of {num_bytes} bytes instead of chunk {index} of {len(place)}"
                    raise BadPeer(Refusal.MALFORMED, f"{conn.peer} sent {what}")
                self._receive_chunk(conn, manifest, index, place, beats)
            incoming.landed(index)
            index += 1
            beats.have = index
        return True

    def _receive_chunk(self, conn: Conn, manifest: Manifest, index: int, place: memoryview, beats: Beats) -> None:
        state = ChunkHash()
        for start in range(0, len(place), PART_BYTES):
            part = place[start : start + PART_BYTES]
            conn.recv_into(part, SILENCE_S, beats)
            state.update(part)
        try:
            verify_hash(manifest, index, state.digest())
        except ManifestError as error:
            raise BadPeer(Refusal.DAMAGED, str(error)) from error
