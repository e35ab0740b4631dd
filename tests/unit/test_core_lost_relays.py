"""Whom the next list goes without, and what that does to a chain whose network is broken in places."""

from laminar.core.chain import ChainNode, RelayView, plan_chain
from laminar.core.identity import Incarnation
from laminar.core.lost_relays import (
    MISSED_BEAT_S,
    REJOIN_AFTER_S,
    REJOIN_MOST_S,
    LostRelays,
    Neighbourhood,
)


def node(index: int, life: int = 1) -> ChainNode:
    return ChainNode(f"relay-{index}", Incarnation(life), f"127.0.0.1:{9000 + index}", f"m{index}")


CHAIN = (node(0), node(1), node(2))


def said(index: int, *lost: str, silent_s: float = 0.1, epoch: int = 3) -> Neighbourhood:
    return Neighbourhood(f"relay-{index}", 1, epoch, lost, silent_s)


def test_a_relay_that_the_one_before_cannot_reach_is_lost_for_a_while() -> None:
    lost = LostRelays()
    lost.observe(10.0, CHAIN, 3, [said(0, "relay-1"), said(1), said(2)])
    assert lost.is_lost("relay-1", 1, 10.1)
    assert not lost.is_lost("relay-1", 1, 10.0 + REJOIN_AFTER_S)


def test_its_next_life_is_not_lost() -> None:
    lost = LostRelays()
    lost.observe(10.0, CHAIN, 3, [said(0, "relay-1")])
    assert not lost.is_lost("relay-1", 2, 10.1)


def test_a_relay_that_lost_the_one_before_it_needs_the_pools_word_too() -> None:
    lost = LostRelays()
    lost.observe(10.0, CHAIN, 3, [said(0), said(1, "relay-0")])
    assert not lost.is_lost("relay-0", 1, 10.1)
    lost.observe(11.0, CHAIN, 3, [said(0, silent_s=MISSED_BEAT_S + 0.1), said(1, "relay-0")])
    assert lost.is_lost("relay-0", 1, 11.1)


def test_what_was_said_of_an_earlier_list_does_not_count() -> None:
    lost = LostRelays()
    lost.observe(10.0, CHAIN, 3, [said(0, "relay-1", epoch=2)])
    assert not lost.is_lost("relay-1", 1, 10.1)


class Network:
    """Relays that all beat, a network that joins some of them, and a driver that gives lists; ten turns a second.

    A relay passes by whom it cannot reach, and says so; `dead` ones say nothing and are heard no more.
    """

    def __init__(self, num: int, *cut: tuple[int, int]) -> None:
        self.nodes = [node(index) for index in range(num)]
        self.cut = {frozenset((f"relay-{a}", f"relay-{b}")) for a, b in cut}
        self.dead: set[str] = set()
        self.died_s = 0.0
        self.lost = LostRelays()
        self.now_s = 100.0
        self.chain = tuple(self.nodes)
        self.lists = [self.order]

    @property
    def order(self) -> list[int]:
        return [self.nodes.index(each) for each in self.chain]

    def reach(self, a: ChainNode, b: ChainNode) -> bool:
        return b.slot not in self.dead and frozenset((a.slot, b.slot)) not in self.cut

    def says(self, each: ChainNode) -> Neighbourhood:
        lost: list[str] = []
        for other in self.chain[self.chain.index(each) + 1 :] if each in self.chain else ():
            if self.reach(each, other):
                break
            lost.append(other.slot)
        silent_s = self.now_s - self.died_s if each.slot in self.dead else 0.0
        return Neighbourhood(each.slot, 1, len(self.lists), () if each.slot in self.dead else tuple(lost), silent_s)

    def turn(self) -> None:
        self.now_s += 0.1
        self.lost.observe(self.now_s, self.chain, len(self.lists), [self.says(each) for each in self.nodes])
        ready = [
            RelayView(each.slot, each.incarnation, each.address, each.machine, None)
            for each in self.nodes
            if not self.lost.is_lost(each.slot, each.incarnation, self.now_s)
        ]
        planned = plan_chain(self.chain, ready, self.lost.apart(self.now_s))
        if planned is not None:
            self.chain = planned
            self.lists.append(self.order)

    def run(self, duration_s: float) -> int:
        """How many lists that took."""
        before = len(self.lists)
        for _ in range(round(10 * duration_s)):
            self.turn()
        return len(self.lists) - before


def test_two_that_cannot_reach_each_other_get_others_between_them_and_stay() -> None:
    network = Network(4, (1, 2))
    assert network.run(20) == 2
    assert network.order == [0, 1, 3, 2]
    assert network.run(600) == 0


def test_the_tail_moves_before_a_member_that_cannot_reach_it() -> None:
    network = Network(4, (2, 3))
    network.run(20)
    assert network.order == [0, 3, 1, 2]
    assert network.run(600) == 0


def test_one_without_a_place_comes_back_more_and_more_rarely_and_for_good_once_the_network_is_whole() -> None:
    network = Network(2, (0, 1))
    assert network.run(60) <= 8
    assert network.run(600) <= 2 * 600 / REJOIN_MOST_S + 1
    network.cut.clear()
    network.run(REJOIN_MOST_S + 1)
    assert network.order == [0, 1]
    assert network.run(600) == 0


def test_a_master_that_reaches_nobody_leaves_and_the_others_go_on() -> None:
    network = Network(4, (0, 1), (0, 2), (0, 3))
    network.run(20)
    assert sorted(network.order) in ([1, 2, 3], [0, 1, 2, 3])
    assert network.order[0] != 0
    network.run(200)
    assert network.run(600) <= 2 * 600 / REJOIN_MOST_S + 1
    network.cut.clear()
    network.run(REJOIN_MOST_S + 1)
    assert sorted(network.order) == [0, 1, 2, 3]


def test_a_master_whose_followers_all_die_at_once_stays() -> None:
    network = Network(3)
    network.turn()
    network.dead, network.died_s = {"relay-1", "relay-2"}, network.now_s
    network.run(4)
    assert network.order == [0]


def test_one_that_was_stopped_comes_back_after_the_first_wait() -> None:
    network = Network(3)
    network.dead, network.died_s = {"relay-1"}, network.now_s
    network.run(2)
    assert network.order == [0, 2]
    network.dead.clear()
    network.run(REJOIN_AFTER_S)
    assert network.order == [0, 2, 1]
    assert network.run(100) == 0
