"""The membership list of the relay chain and the rule of one upstream."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from laminar.core.chain import (
    MISSED_BEAT_S,
    REJOIN_AFTER_S,
    ChainNode,
    LostRelays,
    Neighbourhood,
    Place,
    RelayView,
    Standing,
    UpstreamVerdict,
    Walk,
    judge_upstream,
    may_bypass,
    plan_chain,
)
from laminar.core.identity import Epoch, Incarnation, Version


def view(index: int, newest: int | None = None, life: int = 1) -> RelayView:
    held = None if newest is None else Version(newest)
    return RelayView(f"relay-{index}", Incarnation(life), f"127.0.0.1:{9000 + index}", f"m{index}", held)


def node(index: int, life: int = 1) -> ChainNode:
    return ChainNode(f"relay-{index}", Incarnation(life), f"127.0.0.1:{9000 + index}", f"m{index}")


def test_the_first_list_is_in_the_order_of_the_topology() -> None:
    assert plan_chain((), [view(10), view(2), view(0)]) == (node(0), node(2), node(10))


def test_nothing_ready_and_nothing_listed_is_no_change() -> None:
    assert plan_chain((), []) is None


def test_the_same_members_in_any_order_are_no_change() -> None:
    assert plan_chain((node(1), node(0)), [view(0), view(1)]) is None


def test_a_dead_middle_member_is_spliced_out_and_the_order_stays() -> None:
    assert plan_chain((node(2), node(1), node(0)), [view(0), view(2)]) == (node(2), node(0))


def test_a_new_member_joins_at_the_tail_whatever_its_place_in_the_topology() -> None:
    assert plan_chain((node(3), node(2)), [view(0), view(2), view(3)]) == (node(3), node(2), node(0))


def test_a_restarted_member_has_lost_its_memory_and_joins_at_the_tail() -> None:
    ready = [view(0, 4), view(1, None, life=2), view(2, 4)]
    assert plan_chain((node(0), node(1), node(2)), ready) == (node(0), node(2), node(1, life=2))


def test_the_next_member_that_holds_the_newest_version_takes_a_dead_masters_place() -> None:
    ready = [view(1, 3), view(2, 4), view(3, 4)]
    assert plan_chain((node(0), node(1), node(2), node(3)), ready) == (node(2), node(1), node(3))


def test_a_master_that_came_back_empty_is_not_master_any_more() -> None:
    assert plan_chain((node(0), node(1)), [view(0, None, life=2), view(1, 7)]) == (node(1), node(0, life=2))


def test_the_next_member_is_promoted_when_nobody_holds_a_version() -> None:
    assert plan_chain((node(0), node(1), node(2)), [view(1), view(2)]) == (node(1), node(2))


def test_a_lone_master_that_came_back_gets_a_new_list() -> None:
    assert plan_chain((node(0),), [view(0, None, life=2)]) == (node(0, life=2),)


@given(st.integers(0, 2**32))
def test_any_change_keeps_survivors_in_order_and_puts_weights_upstream(seed: int) -> None:
    rng = random.Random(seed)
    current: tuple[ChainNode, ...] = ()
    lives = [1] * 5
    for _ in range(10):
        lives = [life + (rng.random() < 0.2) for life in lives]
        up = [i for i in range(5) if rng.random() < 0.7]
        ready = [view(i, rng.choice([None, 1, 2]), lives[i]) for i in up]
        planned = plan_chain(current, ready)
        chain = list(current if planned is None else planned)
        assert {(n.slot, n.incarnation) for n in chain} == {(v.slot, v.incarnation) for v in ready}
        kept = [n for n in current if n in chain]
        if current and kept and kept[0] == current[0]:
            assert chain[0] == current[0]
            assert [n for n in chain if n in kept] == kept
        elif len(chain) > 0:
            newest = {v.slot: -1 if v.newest is None else v.newest for v in ready}
            assert newest[chain[0].slot] == max(newest.values())
            assert [n for n in chain[1:] if n in kept] == [n for n in kept if n != chain[0]]
        current = tuple(chain)
        assert plan_chain(current, ready) is None


def place(epoch: int, linked: int | None = None, slot: str = "b") -> Place:
    return Place(slot, Epoch(epoch), ("a", "b", "c"), None if linked is None else Standing(Epoch(linked)))


def test_the_upstream_that_the_list_names_is_accepted() -> None:
    assert judge_upstream(place(3), "a", Standing(Epoch(3))) is UpstreamVerdict.ACCEPT


def test_an_upstream_of_a_lower_epoch_is_refused() -> None:
    assert judge_upstream(place(3), "a", Standing(Epoch(2))) is UpstreamVerdict.LOWER_EPOCH


def test_another_member_of_the_same_epoch_is_refused() -> None:
    assert judge_upstream(place(3), "c", Standing(Epoch(3))) is UpstreamVerdict.NOT_UPSTREAM


def test_an_upstream_of_a_later_epoch_is_accepted_before_the_list_arrives() -> None:
    assert judge_upstream(place(3), "c", Standing(Epoch(4))) is UpstreamVerdict.ACCEPT


def test_once_a_later_upstream_is_linked_the_listed_one_is_refused() -> None:
    assert judge_upstream(place(3, linked=4), "a", Standing(Epoch(3))) is UpstreamVerdict.LOWER_EPOCH


def test_a_master_that_accepted_a_later_upstream_is_no_master() -> None:
    assert place(3, slot="a").is_master
    assert not place(3, linked=4, slot="a").is_master


def linked(bypass: int) -> Place:
    return Place("c", Epoch(3), ("a", "b", "c", "d"), Standing(Epoch(3), bypass))


def test_an_upstream_that_passed_more_members_by_takes_the_place_of_the_neighbour() -> None:
    assert judge_upstream(linked(0), "a", Standing(Epoch(3), 1)) is UpstreamVerdict.ACCEPT


def test_a_member_that_was_passed_by_does_not_become_a_second_upstream_in_this_epoch() -> None:
    assert judge_upstream(linked(1), "b", Standing(Epoch(3), 0)) is UpstreamVerdict.BYPASSED
    assert judge_upstream(linked(1), "b", Standing(Epoch(4), 0)) is UpstreamVerdict.ACCEPT


def test_once_the_link_that_passed_it_by_has_ended_the_neighbour_may_send_again() -> None:
    assert judge_upstream(linked(1).unlinked(), "b", Standing(Epoch(3), 0)) is UpstreamVerdict.ACCEPT
    later = replace(linked(1), linked=Standing(Epoch(4), 1)).unlinked()
    assert judge_upstream(later, "b", Standing(Epoch(3), 0)) is UpstreamVerdict.LOWER_EPOCH


def test_a_link_must_join_the_members_that_its_bypass_count_says() -> None:
    assert judge_upstream(linked(0), "b", Standing(Epoch(3), 1)) is UpstreamVerdict.NOT_UPSTREAM
    assert judge_upstream(linked(0), "d", Standing(Epoch(3), 5)) is UpstreamVerdict.NOT_UPSTREAM


def test_only_a_relay_that_is_fed_passes_a_lost_neighbour_by() -> None:
    assert may_bypass(place(3, slot="a"), has_upstream=False)
    assert not may_bypass(place(3, slot="b"), has_upstream=False)
    assert may_bypass(place(3, slot="b"), has_upstream=True)


def test_a_walk_passes_each_member_by_and_begins_again() -> None:
    walk = Walk(("b", "c"))
    assert [walk.target, walk.pass_by(), walk.target, walk.pass_by(), walk.target] == ["b", True, "c", False, "b"]


def test_a_walk_knows_whom_it_has_passed_by_until_it_is_back_at_the_neighbour() -> None:
    walk = Walk(("b", "c", "d"))
    seen = [walk.passed]
    for _ in range(3):
        walk.pass_by()
        seen.append(walk.passed)
    assert seen == [(), ("b",), ("b", "c"), ()]


def test_a_new_list_makes_a_bypass_to_a_link_of_neighbours() -> None:
    walk = Walk(("b", "c"))
    walk.pass_by()
    assert walk.renew(("c",))
    assert walk.target == "c"


CHAIN = (node(0), node(1), node(2))


def said(index: int, *lost: str, silent_s: float = 0.1, epoch: int = 3) -> Neighbourhood:
    return Neighbourhood(f"relay-{index}", epoch, lost, silent_s)


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
