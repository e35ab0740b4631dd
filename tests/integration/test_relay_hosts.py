"""Several hosts: network namespaces with addresses of their own on one switch, whose ports are pulled or go silent.

Every host runs the data plane of a relay; the test plays the driver, with the product's own rules for lists.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.core.chain import ChainNode, RelayView, plan_chain
from laminar.core.identity import Incarnation, Version
from laminar.core.lost_relays import LostRelays, Neighbourhood
from laminar.shell.process import child_environment

HOST = Path(__file__).with_name("standin_host.py")
SIZE = 4 << 20
LISTENING, FORWARDING = "1", "3"
"""States of a switch's port (linux/if_bridge.h). A listening one drops every packet, with its carrier on."""
FORWARD_DELAY = "3000"
"""Hundredths of a second that a port listens before it goes on by itself: longer than any test."""
FAMILIES = {"ipv4": "10.77.0.{}", "ipv6": "fd77::{}"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Switch:
    """A bridge in a namespace of its own; each port leads to a host's namespace."""

    def __init__(self, num_hosts: int) -> None:
        self.space = f"lam{os.getpid()}s"
        self.hosts = [f"lam{os.getpid()}h{index}" for index in range(num_hosts)]
        self._made: list[str] = []
        self.make(self.space)
        self.on_switch(
            "link", "add", "br0", "type", "bridge", "stp_state", "0", "mcast_snooping", "0",
            "forward_delay", FORWARD_DELAY,
        )  # fmt: skip
        self.on_switch("link", "set", "br0", "up")
        for index, host in enumerate(self.hosts):
            self._plug(index, host)

    def make(self, space: str) -> None:
        ip("netns", "add", space)
        self._made.append(space)

    def _plug(self, index: int, host: str) -> None:
        self.make(host)
        self.on_switch("link", "add", f"p{index}", "type", "veth", "peer", "name", "eth0", "netns", host)
        self.on_switch("link", "set", f"p{index}", "master", "br0", "up")
        for family, pattern in FAMILIES.items():
            length, extra = ("24", []) if family == "ipv4" else ("64", ["nodad"])
            ip("-n", host, "addr", "add", f"{pattern.format(index + 1)}/{length}", "dev", "eth0", *extra)
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", "eth0", "up")

    def on_switch(self, *words: str) -> None:
        ip("-n", self.space, *words)

    def cut(self, index: int, how: str) -> None:
        """`down`: the cable is pulled, both ends see it. `dropped`: packets vanish, nobody sees anything."""
        if how == "down":
            self.on_switch("link", "set", f"p{index}", "down")
        else:
            self.on_switch("link", "set", f"p{index}", "type", "bridge_slave", "state", LISTENING)

    def heal(self, index: int, how: str) -> None:
        if how == "down":
            self.on_switch("link", "set", f"p{index}", "up")
        else:
            self.on_switch("link", "set", f"p{index}", "type", "bridge_slave", "state", FORWARDING)

    def part(self, *indices: int) -> None:
        """Packets between these hosts vanish; all of them reach the others."""
        for index in indices:
            self.on_switch("link", "set", f"p{index}", "type", "bridge_slave", "isolated", "on")

    def close(self) -> None:
        for space in reversed(self._made):
            ip("netns", "del", space)


def why_not() -> str:
    """Why this machine cannot hold several hosts; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    try:
        Switch(1).close()
    except subprocess.CalledProcessError as error:
        return f"no namespaces, veth or bridge here: {error.stderr.strip()}"
    return ""


class Host:
    def __init__(self, index: int, space: str, address: str, folder: Path) -> None:
        self.index = index
        self.slot = f"relay-{index}"
        self.log = folder / f"{self.slot}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, str(HOST), self.slot, address,
                 str(folder / f"{self.slot}.sock")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=child_environment(),
            )  # fmt: skip
        self.address: str = self._read()["address"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.slot} ended: {self.log.read_text()}"
        return json.loads(line)

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            assert self.process.wait(30) == 0, self.log.read_text()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()


class World:
    def __init__(self, switch: Switch, family: str, folder: Path) -> None:
        self.switch = switch
        self.epoch = 0
        self.hosts: list[Host] = []
        for index, space in enumerate(switch.hosts):
            self.hosts.append(Host(index, space, FAMILIES[family].format(index + 1), folder))

    def publish_list(self, order: list[int], *, deaf: tuple[int, ...] = ()) -> None:
        self.epoch += 1
        members = [{"slot": self.hosts[i].slot, "address": self.hosts[i].address} for i in order]
        for host in self.hosts:
            if host.index not in deaf:
                host.ask(epoch=self.epoch, members=members)

    def publish(self, sender: int, master: int, version: int, *, paced: bool = False) -> None:
        self.hosts[sender].ask(publish=version, master=self.hosts[master].address, paced=paced)

    def outcome(self, sender: int) -> str:
        return self.hosts[sender].ask()["publisher"]

    def held(self, index: int) -> list[int]:
        return self.hosts[index].ask()["held"]

    def close(self) -> None:
        for host in self.hosts:
            host.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[[str, int], World]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made: list[Switch | World] = []

    def make(family: str, num_hosts: int) -> World:
        switch = Switch(num_hosts)
        made.append(switch)
        world = World(switch, family, tmp_path)
        made.append(world)
        return world

    yield make
    for each in reversed(made):
        each.close()


def until(condition: Callable[[], bool], wait_s: float = 20.0) -> float:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < wait_s, "the condition did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - began_s


@pytest.mark.root
@pytest.mark.parametrize("how", ["down", "dropped"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_host_cut_off_in_a_broadcast_is_passed_by_and_fed_again_when_the_network_is_whole(
    make_world: Callable[[str, int], World], family: str, how: str
) -> None:
    world = make_world(family, 4)
    world.publish_list([0, 1, 2, 3])
    world.publish(0, 0, 1)
    until(lambda: all(world.held(i) == [1] for i in range(4)))
    world.publish(0, 0, 2, paced=True)
    until(lambda: world.hosts[3].ask()["received_bytes"] > SIZE + SIZE // 8)
    world.switch.cut(2, how)
    until(lambda: all(world.held(i) == [1, 2] for i in (0, 1, 3)))
    assert world.held(2) == [1]
    world.publish(0, 0, 3)
    until(lambda: all(world.held(i) == [1, 2, 3] for i in (0, 1, 3)))
    world.switch.heal(2, how)
    # Nobody gives a list: the one that was cut off is fed beside the chain.
    took_s = until(lambda: 3 in world.held(2))
    print(f"{family} {how}: fed {took_s:.2f} s after the network was whole")
    world.publish_list([0, 1, 3, 2])
    world.publish(0, 0, 4)
    until(lambda: all(4 in world.held(i) for i in range(4)))
    # One upstream each: no relay is left with a second connection, or took anything twice.
    until(lambda: [host.ask()["data_conns"] for host in world.hosts] == [0, 1, 1, 1])
    assert [world.hosts[i].ask()["received_bytes"] for i in (0, 1, 3)] == [4 * SIZE] * 3
    assert world.hosts[1].ask()["bypasses"] == 1


@pytest.mark.root
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_master_cut_off_in_a_hand_over_does_not_become_a_second_one(
    make_world: Callable[[str, int], World], family: str
) -> None:
    world = make_world(family, 4)
    world.publish_list([0, 1, 2, 3])
    world.publish(3, 0, 1)
    until(lambda: all(world.held(i) == [1] for i in range(4)))
    world.publish(3, 0, 2, paced=True)
    until(lambda: world.hosts[2].ask()["received_bytes"] > SIZE + SIZE // 8)
    world.switch.cut(0, "dropped")
    world.publish_list([1, 2, 3], deaf=(0,))
    until(lambda: world.outcome(3).startswith("lost"))
    world.publish(3, 1, 2)
    until(lambda: all(world.held(i) == [1, 2] for i in (1, 2, 3)))
    assert [world.hosts[i].ask()["received_bytes"] for i in (2, 3)] == [2 * SIZE] * 2
    world.switch.heal(0, "dropped")
    # It still believes itself master, of a list that is over.
    world.publish(0, 0, 3)
    until(lambda: world.held(0)[-1] == 3)
    assert all(world.held(i) == [1, 2] for i in (1, 2, 3))
    world.publish_list([1, 2, 3, 0])
    world.publish(3, 1, 4)
    until(lambda: all(world.held(i)[-1] == 4 for i in range(4)))
    until(lambda: [host.ask()["data_conns"] for host in world.hosts] == [1, 0, 1, 1])


@pytest.mark.root
def test_two_hosts_that_cannot_reach_each_other_get_others_between_them(
    make_world: Callable[[str, int], World],
) -> None:
    world = make_world("ipv4", 4)
    world.switch.part(1, 2)
    nodes = [ChainNode(host.slot, Incarnation(1), host.address, "m") for host in world.hosts]
    chain: tuple[ChainNode, ...] = tuple(nodes)
    lost_relays = LostRelays()
    world.publish_list([0, 1, 2, 3])

    def drive() -> list[int]:
        nonlocal chain
        now_s = time.monotonic()
        views = [host.ask() for host in world.hosts]
        said = [
            Neighbourhood(host.slot, 1, view["epoch"], tuple(view["lost"]), 0.0)
            for host, view in zip(world.hosts, views, strict=True)
        ]
        lost_relays.observe(now_s, chain, world.epoch, said)
        ready = [
            RelayView(node.slot, node.incarnation, node.address, "m", Version(max(view["held"], default=0)))
            for node, view in zip(nodes, views, strict=True)
            if not lost_relays.is_lost(node.slot, node.incarnation, now_s)
        ]
        planned = plan_chain(chain, ready, lost_relays.apart(now_s))
        if planned is not None:
            chain = planned
            world.publish_list([nodes.index(node) for node in chain])
        return [nodes.index(node) for node in chain]

    until(lambda: drive() == [0, 1, 3, 2])
    assert world.epoch == 3
    for version in (1, 2, 3):
        world.publish(0, 0, version)
        until(lambda version=version: drive() == [0, 1, 3, 2] and all(version in world.held(i) for i in range(4)))
    assert world.epoch == 3
