"""One host of a test network: the data plane of a relay, and a trainer's publisher, driven by JSON lines on stdin.

    standin_host.py SLOT ADDRESS HANDOFF       ADDRESS: IPv4 or IPv6, of this network namespace

Answers each line with one on stdout.
"""

import json
import random
import socket
import sys
import threading
import time
from typing import Any

from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.feeding import Feed
from laminar.shell.handover import PURPOSE, HandOverRefused, hand_over
from laminar.shell.process import die_with_parent
from laminar.shell.transport import (
    PeerLost,
    connect,
    listen_tcp,
    listen_unix,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.links import SMALL_MESSAGE_BYTES, Hello, LinkKind, OfferVerdict, Welcome
from laminar.wire.manifest import Manifest, layout, make_manifest
from laminar.wire.messages import ChainEpoch

TOKEN, UID = "token", "uid"
SIZE = 4 << 20
CHUNK_BYTES = 64 << 10
CHUNK_PAUSE_S = 0.03


def weights(version: int) -> tuple[Manifest, bytes]:
    buffer = random.Random(version).randbytes(SIZE)
    made = make_manifest(
        job_uid=UID, version=version, step=version, attempt=1, tensors=layout([("w", "U8", (SIZE,))]), buffer=buffer,
        chunk_bytes=CHUNK_BYTES,
    )  # fmt: skip
    return made, buffer


class Publisher:
    """Hands one version over, chunk by chunk with pauses if `paced`; tells how that ended."""

    def __init__(self) -> None:
        self.outcome = "idle"
        self._thread = threading.Thread()

    def start(self, master: str, version: int, paced: bool) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        self.outcome = "busy"
        self._thread = threading.Thread(target=self._run, args=(master, version, paced))
        self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, master: str, version: int, paced: bool) -> None:
        manifest, buffer = weights(version)
        try:
            if paced:
                self._send_paced(master, manifest, memoryview(buffer))
            else:
                hand_over(master, TOKEN, UID, 1, manifest, buffer, 2.0)
            self.outcome = "sent"
        except (PeerLost, HandOverRefused) as error:
            self.outcome = f"lost: {error}"

    def _send_paced(self, master: str, manifest: Manifest, buffer: memoryview) -> None:
        conn = connect(master, 2.0)
        try:
            prove_as_client(conn, TOKEN, UID, PURPOSE)
            send_message(conn, Hello(kind=LinkKind.HANDOVER, slot="trainer", attempt=1))
            recv_message(conn, Welcome, SMALL_MESSAGE_BYTES)
            feed = Feed(conn)
            answer = feed.announce(manifest)
            if answer.verdict is not OfferVerdict.SEND:
                raise PeerLost(f"not sent: {answer.verdict}")
            for index in range(answer.have, manifest.num_chunks):
                start, end = manifest.chunk_range(index)
                feed.send_chunk(index, buffer[start:end])
                ends_s = time.monotonic() + CHUNK_PAUSE_S
                while time.monotonic() < ends_s:
                    time.sleep(0.01)
                    feed.linger()
            feed.stored()
        finally:
            conn.close()


def view_of(plane: DataPlane) -> dict[str, Any]:
    view = plane.view()
    assert plane.failure is None, plane.failure
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("data-")]
    return {
        "epoch": view.epoch,
        "held": [held.version for held in view.held],
        "lost": list(view.lost_neighbours),
        "received_bytes": view.counters.received_bytes,
        "bypasses": view.counters.bypasses,
        "data_conns": len(threads) - 1,
        "downstream": view.downstream,
    }


def main() -> None:
    die_with_parent()
    slot, host, handoff = sys.argv[1:]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = listen_tcp(socket.create_server((host, 0), family=family))
    plane = DataPlane(slot, Credentials(TOKEN, UID), StoreSizes(2), listener, listen_unix(handoff), lambda: None)
    plane.start()
    publisher = Publisher()
    print(json.dumps({"address": listener.address}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "members" in ask:
            plane.apply_epoch(ChainEpoch.model_validate(ask))
        if "publish" in ask:
            publisher.start(ask["master"], ask["publish"], ask["paced"])
        print(json.dumps({**view_of(plane), "publisher": publisher.outcome}), flush=True)
    publisher.join()
    plane.close()


if __name__ == "__main__":
    main()
