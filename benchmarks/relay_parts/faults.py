"""A relay dies or hangs in the middle of a broadcast: how long until the others have data again?

Data-plane processes, with this process as trainer and driver. The victims' listening sockets stay open, as the driver
of a job keeps them, so a connection to a dead relay is not refused.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from relay_parts.lines import Line, at_most, listed, median
from relay_parts.links import Interface, LinkSpeed
from relay_parts.nodes import TOKEN, UID, Chain, Node, Weights, relays, until

from laminar.shell.handover import hand_over
from laminar.shell.transport import PeerLost

SPEED = LinkSpeed(byte_s=1 / 50e6, message_s=1e-3)
CHUNK_BYTES = 256 << 10
"""Six milliseconds a chunk: what a pause is longer than in any case."""
NUM_BYTES = 16 << 20
FAULT_AFTER_S = 0.12


class Trainer:
    """Hands one version over in the background, once; `lost_s` says when its master was lost."""

    def __init__(self, weights: Weights, master: Node) -> None:
        self.manifest, self._buffer = weights.next(CHUNK_BYTES)
        self._interface = Interface(SPEED)
        self.lost_s: float | None = None
        self.began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(master.address,))
        self._thread.start()

    def _run(self, address: str) -> None:
        try:
            hand_over(address, TOKEN, UID, 1, self.manifest, self._buffer, dial=self._interface.dial)
        except PeerLost:
            self.lost_s = time.monotonic()

    def again(self, master: Node) -> None:
        """The same bytes to another master."""
        hand_over(master.address, TOKEN, UID, 1, self.manifest, self._buffer, dial=self._interface.dial)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def longest_pause_s(since_s: float, times_s: list[float]) -> float:
    """Without an arrival, from `since_s` on."""
    after = [since_s, *(at_s for at_s in times_s if at_s > since_s)]
    return max((later - earlier for earlier, later in itertools.pairwise(after)), default=0.0)


def _with_fault(chain: Chain, weights: Weights, strike: Callable[[Node], None]) -> float:
    """Seconds without data at the relay behind the victim, the second of the chain."""
    master, victim, *others = chain.members
    others[0].ask("watch")
    trainer = Trainer(weights, master)
    until(lambda: others[0].ask("num_arrivals") > 0)
    time.sleep(FAULT_AFTER_S)
    struck_s = time.monotonic()
    strike(victim)
    trainer.join()
    for node in (master, *others):
        node.ask("completed", trainer.manifest.version)
    return longest_pause_s(struck_s, others[0].ask("arrivals"))


def bypass_after_kill(folder: Path, *, quick: bool) -> Iterator[Line]:
    repeats = 2 if quick else 7
    with relays(folder, 3 + repeats, SPEED) as chain:
        weights = Weights(NUM_BYTES)
        chain.join(chain.nodes)
        _settle(chain, weights)
        pauses_ms: list[float] = []
        for _ in range(repeats):
            pauses_ms.append(1e3 * _with_fault(chain, weights, Node.kill))
            # The next list goes without it.
            chain.nodes.remove(chain.members[1])
            chain.join([chain.members[0], *chain.members[2:]])
            _settle(chain, weights)
        yield at_most("bypass_kill_ms", median(pauses_ms), "ms", 100, f"SIGKILL, each: {listed(pauses_ms, 0)}")


def bypass_after_stop(folder: Path, *, quick: bool) -> Iterator[Line]:
    repeats = 2 if quick else 7
    with relays(folder, 3, SPEED) as chain:
        weights = Weights(NUM_BYTES)
        chain.join(chain.nodes)
        _settle(chain, weights)
        pauses_ms: list[float] = []
        for _ in range(repeats):
            victim = chain.members[1]
            pauses_ms.append(1e3 * _with_fault(chain, weights, Node.stop))
            victim.go_on()
            # It is back before the next list, which has it at the tail.
            chain.join([chain.members[0], chain.members[2], victim])
            _settle(chain, weights)
        yield at_most("bypass_stop_ms", median(pauses_ms), "ms", 500, f"SIGSTOP, each: {listed(pauses_ms, 0)}")


def _settle(chain: Chain, weights: Weights) -> None:
    """One undisturbed version: then all links stand, and nobody has to catch up."""
    trainer = Trainer(weights, chain.members[0])
    trainer.join()
    chain.completed(trainer.manifest.version)


def master_failover(folder: Path, *, quick: bool) -> Iterator[Line]:
    """The driver learns of the loss from the second relay; the trainer then sends the same bytes to that one."""
    repeats = 1 if quick else 5
    with relays(folder, 3 + repeats, SPEED) as chain:
        weights = Weights(NUM_BYTES)
        chain.join(chain.nodes)
        _settle(chain, weights)
        more_s, undisturbed, disturbed = [], [], []
        for _ in range(repeats):
            trainer = Trainer(weights, chain.members[0])
            trainer.join()
            undisturbed.append(max(chain.completed(trainer.manifest.version)) - trainer.began_s)
            disturbed.append(_lose_master(chain, weights))
            more_s.append(disturbed[-1] - undisturbed[-1])
        reference = f"undisturbed {listed(undisturbed, 2)} s, with a killed master {listed(disturbed, 2)} s"
        yield at_most("master_failover_s", median(more_s), "s more", 1.0, reference)


def _lose_master(chain: Chain, weights: Weights) -> float:
    master, second, *others = chain.members
    others[-1].ask("watch")
    trainer = Trainer(weights, master)
    until(lambda: others[-1].ask("num_arrivals") > 0)
    time.sleep(FAULT_AFTER_S)
    master.kill()
    trainer.join()
    assert trainer.lost_s is not None, "the master was killed too late"
    until(lambda: master.slot in second.ask("lost"))
    others[-1].ask("arrivals")
    chain.nodes.remove(master)
    chain.join([second, *others])
    trainer.again(second)
    return max(chain.completed(trainer.manifest.version)) - trainer.began_s
