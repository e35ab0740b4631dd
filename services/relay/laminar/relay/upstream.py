"""Receiving side: versions from the chain's upstream, or from the trainer."""

from __future__ import annotations

import logging

from laminar.core.chain import UpstreamVerdict
from laminar.relay.counters import Counters
from laminar.relay.membership import Membership
from laminar.relay.serving import Credentials
from laminar.relay.store import Incoming, TooLarge, VersionLost, VersionStore
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
from laminar.wire.links import (
    CHUNK_HEADER,
    FRAME_ABORT,
    FRAME_PING,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Hello,
    LinkKind,
    LinkVerdict,
    OfferVerdict,
    Stored,
    Welcome,
)
from laminar.wire.manifest import Manifest, ManifestError, check_manifest, verify_chunk

log = logging.getLogger("laminar.relay")


class UpstreamServer:
    """`serve` runs one data connection, in its own thread."""

    def __init__(
        self, credentials: Credentials, membership: Membership, store: VersionStore, counters: Counters
    ) -> None:
        self._credentials = credentials
        self._membership = membership
        self._store = store
        self._counters = counters

    def serve(self, conn: Conn) -> None:
        """Raises PeerLost when the sender has gone, BadPeer when it breaks the rules."""
        prove_as_listener(conn, self._credentials.token, self._credentials.job_uid, PURPOSE)
        hello = recv_message(conn, Hello, SMALL_MESSAGE_BYTES)
        match hello.kind:
            case LinkKind.CHAIN:
                self._serve_chain(conn, hello)
            case LinkKind.HANDOVER:
                self._serve_trainer(conn, hello)

    def _serve_chain(self, conn: Conn, hello: Hello) -> None:
        verdict = self._membership.link_upstream(hello.slot, hello.epoch, conn)
        self._welcome(conn, LinkVerdict(verdict.value))
        if verdict is not UpstreamVerdict.ACCEPT:
            self._counters.declined(verdict.value)
            return
        log.info("upstream linked", extra=fields(upstream=hello.slot, epoch=hello.epoch))
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
                log.warning("upstream lost", extra=fields(upstream=hello.slot))

    def _serve_trainer(self, conn: Conn, hello: Hello) -> None:
        self._welcome(conn, LinkVerdict.ACCEPTED)
        announced = recv_message(conn, Announce, MANIFEST_MESSAGE_BYTES)
        if announced.manifest is None:
            return
        self._take(conn, announced.manifest, hello.attempt)

    def _welcome(self, conn: Conn, verdict: LinkVerdict) -> None:
        send_message(conn, Welcome(verdict=verdict, current=self._membership.in_force, held=self._store.held()))

    def _take(self, conn: Conn, manifest: Manifest, attempt: int | None) -> None:
        """One announced version; `attempt`: that of the trainer, None from the chain."""
        try:
            check_manifest(manifest)
        except ManifestError as error:
            raise BadPeer(Refusal.MALFORMED, str(error)) from error
        answer = self._judge(manifest, attempt)
        if answer.verdict is not OfferVerdict.SEND:
            self._decline(conn, manifest, answer)
            return
        try:
            incoming = self._store.begin(manifest, conn.interrupt)
        except TooLarge as error:
            self._decline(
                conn, manifest, Answer(verdict=OfferVerdict.TOO_LARGE, current=error.limit_bytes, detail=str(error))
            )
            return
        except VersionLost as error:
            raise PeerLost(str(error)) from error
        try:
            send_message(conn, answer)
            if self._receive(conn, incoming):
                incoming.complete()
                log.info("version complete", extra=fields(version=manifest.version, bytes=manifest.total_bytes))
                send_message(conn, Stored(version=manifest.version, digest=manifest.digest))
        except VersionLost as error:
            raise PeerLost(str(error)) from error
        finally:
            incoming.leave()

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

    def _receive(self, conn: Conn, incoming: Incoming) -> bool:
        """All chunks, straight into the slot, each hashed as it arrives. False: the sender gave the version up."""
        manifest = incoming.manifest
        header = bytearray(CHUNK_HEADER.size)
        index = 0
        while index < manifest.num_chunks:
            conn.recv_into(memoryview(header), SILENCE_S)
            got, num_bytes = CHUNK_HEADER.unpack(header)
            if got in (FRAME_PING, FRAME_ABORT) and num_bytes == 0:
                if got == FRAME_ABORT:
                    return False
                continue
            with incoming.chunk(index) as place:
                if got != index or num_bytes != len(place):
                    what = f"chunk {got} of {num_bytes} bytes instead of chunk {index} of {len(place)}"
                    raise BadPeer(Refusal.MALFORMED, f"{conn.peer} sent {what}")
                conn.recv_into(place, SILENCE_S)
                try:
                    verify_chunk(manifest, index, place)
                except ManifestError as error:
                    raise BadPeer(Refusal.DAMAGED, str(error)) from error
            incoming.landed(index)
            index += 1
        return True
