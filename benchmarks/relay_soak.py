"""Publications under churn: relays are killed, stopped, taken out and put back while readers, some slow, read.

    python benchmarks/relay_soak.py --quick      500 small and 10 large publications
    python benchmarks/relay_soak.py              10,000 small and 200 large ones

Real relay processes (data plane only) on loopback; faults come from one seeded generator, so the schedule, though not
its timing, repeats. Every read is hashed against what was published. One JSON line a quantity.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.handoff import SlotReused, VersionGone, open_version
from laminar.shell.handover import HandOverRefused, hand_over
from laminar.shell.pulling import pull_version
from laminar.shell.transport import PeerLost, listen_tcp, listen_unix
from laminar.wire.manifest import Manifest, chunk_hash, digest_of, layout, make_manifest
from laminar.wire.messages import ChainEpoch, ChainMember

TOKEN, UID = "token", "soak"
SIZES = StoreSizes(keep_versions=2, read_deadline_s=0.2)
NUM_RELAYS = 4
NUM_READERS = 3
FAULT_EVERY_S = 0.5
HEAL_S = 30.0
STOP_MOST_S = 1.0


def emit(metric: str, value: float, unit: str, target: str, *, ok: bool) -> None:
    line = dict(bench="relay_soak", metric=metric, value=round(value, 4), unit=unit, target=target, reference="")
    print(json.dumps({**line, "ok": ok}), flush=True)


# --- a relay process ----------------------------------------------------------------------------------------------


def node(slot: str, fd: int, handoff: str) -> None:
    """Obeys one JSON line at a time on stdin, answers each with one on stdout."""
    listener = listen_tcp(socket.socket(fileno=fd))
    plane = DataPlane(slot, Credentials(TOKEN, UID), SIZES, listener, listen_unix(handoff), lambda: None)
    plane.start()
    print("{}", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if "epoch" in ask:
            plane.apply_epoch(ChainEpoch.model_validate(ask))
        view = plane.view()
        assert plane.failure is None, plane.failure
        answer = {
            "held": [held.version for held in view.held],
            "lost": list(view.lost_neighbours),
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "slots": Path("/proc/self/maps").read_text().count("memfd:laminar-slot"),
            "bypasses": view.counters.bypasses,
            "resumed": view.counters.resumed_versions,
            "reused": view.counters.slots_reused_under_reader,
        }
        print(json.dumps(answer), flush=True)
    plane.close()


@dataclass
class Relay:
    """One slot: its listening socket stays, its processes come and go. `lock` guards the conversation."""

    index: int
    folder: Path
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    process: subprocess.Popen[str] | None = None
    life: int = 0
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def slot(self) -> str:
        return f"relay-{self.index}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    @property
    def handoff(self) -> str:
        return str(self.folder / f"{self.index}.sock")

    def start(self) -> None:
        self.life += 1
        fd = self.listener.fileno()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--node", self.slot, "--fd", str(fd), "--handoff", self.handoff],
            pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._read() is not None, "a relay does not start"

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """None: it is gone."""
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._forget()

    def _forget(self) -> None:
        assert self.process is not None
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was left in the buffer has nobody to go to
        self.process = None

    def close(self) -> int:
        """Ends it in order; its exit code."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.listener.close()
        return code


# --- the world around them ------------------------------------------------------------------------------------------


@dataclass
class Tally:
    reads: int = 0
    overtaken: int = 0
    mixed: int = 0
    kills: int = 0
    stops: int = 0
    leaves: int = 0
    bypasses: int = 0
    resumed: int = 0
    reused: int = 0


class World:
    """Plays the driver, the trainer, the engines and the evil. Faults come in one thread, one at a time."""

    def __init__(self, folder: Path, num_bytes: int, chunk_bytes: int, seed: int) -> None:
        self.num_bytes, self.chunk_bytes = num_bytes, chunk_bytes
        self.random = random.Random(seed)
        self.noise = random.Random(seed).randbytes(num_bytes)
        self.relays = [Relay(index, folder) for index in range(NUM_RELAYS)]
        self.tally = Tally()
        self.manifests: dict[int, Manifest] = {}
        self.epoch = 0
        self.chain: list[Relay] = []
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        for relay in self.relays:
            relay.start()
        self.publish_list(self.relays)

    def publish_list(self, chain: list[Relay]) -> None:
        """Members that run, in this order, master first; the one with the newest version if the master changes."""
        views = {relay.index: relay.ask({}) for relay in chain if not relay.stopped}
        if chain and (not self.chain or chain[0] is not self.chain[0]):
            newest = max(chain, key=lambda relay: max((views.get(relay.index) or {"held": []})["held"], default=-1))
            chain = [newest, *(relay for relay in chain if relay is not newest)]
        with self.lock:
            self.epoch += 1
            self.chain = chain
        members = [ChainMember(slot=relay.slot, address=relay.address) for relay in chain]
        message = ChainEpoch(epoch=self.epoch, members=members).model_dump()
        for relay in self.relays:
            if relay.process is not None and not relay.stopped:
                relay.ask(message)

    def run(self, name: str, body: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - told by `join`
                self.failure = self.failure or error
                self.ended.set()

        thread = threading.Thread(target=guarded, name=name)
        thread.start()
        return thread

    # The trainer.

    def publish(self, version: int) -> None:
        """The same bytes again until a master has them."""
        start = version * 7919 % self.num_bytes
        buffer = self.noise[start:] + self.noise[:start]
        manifest = make_manifest(
            job_uid=UID, version=version, step=version, attempt=1, chunk_bytes=self.chunk_bytes, buffer=buffer,
            tensors=layout([("w", "U8", (self.num_bytes,))]),
        )  # fmt: skip
        self.manifests[version] = manifest
        self.manifests.pop(version - 200, None)
        ends_s = time.monotonic() + HEAL_S
        while not self.ended.is_set():
            assert time.monotonic() < ends_s, f"version {version} finds no master"
            with self.lock:
                master = self.chain[0].address if self.chain else None
            try:
                if master is not None:
                    hand_over(master, TOKEN, UID, 1, manifest, buffer, 2.0)
                    return
            except (PeerLost, HandOverRefused):
                self.ended.wait(0.01)

    # The engines.

    def read_for_ever(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.ended.is_set():
            relay = chance.choice(self.relays)
            slow = chance.random() < 0.05
            try:
                if chance.random() < 0.2:
                    source = pull_version(relay.address, TOKEN, UID, None, 0.2)
                else:
                    source = open_version(relay.handoff, TOKEN, UID, None, 0.2)
            except (PeerLost, VersionGone, SlotReused):
                self.ended.wait(0.01)
                continue
            with source:
                try:
                    copied = bytes(source.tensor("w"))
                    if slow:
                        self.ended.wait(2 * SIZES.read_deadline_s)
                    source.check()
                except SlotReused:
                    self.tally.overtaken += 1
                    continue
                self._judge(source.manifest, copied)
            self.ended.wait(0.005)

    def _judge(self, manifest: Manifest, copied: bytes) -> None:
        step = manifest.chunk_bytes
        hashes = [chunk_hash(copied[at : at + step]) for at in range(0, len(copied), step)]
        published = self.manifests.get(manifest.version)
        if digest_of(hashes, manifest.tensors) != manifest.digest:
            self.tally.mixed += 1
        elif published is not None and published.digest != manifest.digest:
            self.tally.mixed += 1
        self.tally.reads += 1

    # The evil, and the driver that mends what it does.

    def make_trouble(self) -> None:
        while not self.ended.wait(self.random.uniform(0, 2 * FAULT_EVERY_S)):
            victim = self.random.choice(self.relays)
            late_s = self.random.choice((0.0, 0.05, 0.4))
            match self.random.choice(("kill", "kill", "stop", "leave")):
                case "kill":
                    self.tally.kills += 1
                    self._count(victim)
                    victim.kill()
                    self.ended.wait(late_s)
                    self.publish_list([relay for relay in self.chain if relay is not victim])
                    victim.start()
                case "stop":
                    self._stop(victim, late_s)
                case _:
                    self.tally.leaves += 1
                    self.publish_list([relay for relay in self.chain if relay is not victim])
                    self.ended.wait(late_s)
            self.publish_list([*(relay for relay in self.chain if relay is not victim), victim])

    def _stop(self, victim: Relay, late_s: float) -> None:
        """It hangs; the driver may notice late, or only after it is back."""
        assert victim.process is not None
        self.tally.stops += 1
        victim.stopped = True
        victim.process.send_signal(signal.SIGSTOP)
        self.ended.wait(late_s)
        if self.random.random() < 0.7:
            self.publish_list([relay for relay in self.chain if relay is not victim])
        self.ended.wait(self.random.uniform(0, STOP_MOST_S))
        victim.process.send_signal(signal.SIGCONT)
        victim.stopped = False

    def _count(self, relay: Relay) -> None:
        view = relay.ask({})
        assert view is not None, f"{relay.slot} ended by itself"
        self.tally.bypasses += view["bypasses"]
        self.tally.resumed += view["resumed"]
        self.tally.reused += view["reused"]


def leaks(world: World, last: int) -> list[str]:
    """What is left once all is well again: every relay holds the last version and only what a fresh one has."""
    ends_s = time.monotonic() + HEAL_S
    found: list[str] = []
    for relay in world.relays:
        while True:
            view = relay.ask({})
            assert view is not None
            # stdio, listeners, wakers, slots, one link each way; a connection on its way out is gone in a moment.
            wrong = [
                f"{relay.slot} has {view[what]} {what}"
                for what, most in (("fds", 24 + SIZES.num_slots), ("threads", 8), ("slots", SIZES.num_slots))
                if view[what] > most
            ]
            if last not in view["held"]:
                wrong.append(f"{relay.slot} holds {view['held']}, not {last}")
            if not wrong or time.monotonic() > ends_s:
                found += wrong
                break
            time.sleep(0.05)
    names = sorted(path.name for path in world.relays[0].folder.iterdir())
    if names != sorted(Path(relay.handoff).name for relay in world.relays):
        found.append(f"names left: {names}")
    return found


def soak(num: int, num_bytes: int, chunk_bytes: int, seed: int, limit_s: float) -> tuple[Tally, list[str], int, float]:
    """(what was seen, what leaked, publications made within `limit_s`, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), num_bytes, chunk_bytes, seed)
        began_s = time.monotonic()
        threads = [world.run(f"reader-{i}", lambda i=i: world.read_for_ever(seed + i)) for i in range(NUM_READERS)]
        evil = world.run("evil", world.make_trouble)
        version = -1
        try:
            while version + 1 < num and time.monotonic() - began_s < limit_s and not world.ended.is_set():
                version += 1
                world.publish(version)
        finally:
            took_s = time.monotonic() - began_s
            world.ended.set()
            for thread in (*threads, evil):
                thread.join()
        if world.failure is not None:
            raise world.failure
        found = leaks(world, version)
        for relay in world.relays:
            world._count(relay)
            if (code := relay.close()) != 0:
                found.append(f"{relay.slot} exits with {code}")
        return world.tally, found, version + 1, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small", type=int)
    parser.add_argument("--large", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, help="for each of the two parts; what was made by then counts")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--handoff", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node:
        node(args.node, args.fd, args.handoff)
        return
    small = args.small if args.small is not None else 500 if args.quick else 10_000
    large = args.large if args.large is not None else 10 if args.quick else 200
    limit_s = args.limit_s or (20.0 if args.quick else 900.0)
    mixed, leaked = 0, 0
    for name, num, num_bytes, chunk_bytes in (("small", small, 64 << 10, 8 << 10), ("large", large, 16 << 20, 1 << 20)):
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        tally, found, made, took_s = soak(num, num_bytes, chunk_bytes, args.seed, limit_s)
        after = len(os.listdir("/proc/self/fd")), threading.active_count()
        if after != before:
            found.append(f"this process has {after} descriptors and threads, {before} before")
        for text in found:
            print(text, file=sys.stderr)
        emit(f"soak_{name}_publications", made, "versions", str(num), ok=made == num)
        emit(f"soak_{name}_seconds", took_s, "s", f"<= {limit_s:.0f}", ok=took_s <= limit_s)
        for what in ("reads", "overtaken", "kills", "stops", "leaves", "bypasses", "resumed", "reused"):
            emit(f"soak_{name}_{what}", getattr(tally, what), "", "reported", ok=True)
        mixed, leaked = mixed + tally.mixed, leaked + len(found)
    emit("soak_mixed_versions", mixed, "reads", "0", ok=mixed == 0)
    emit("soak_leaks", leaked, "things", "0", ok=leaked == 0)


if __name__ == "__main__":
    main()
