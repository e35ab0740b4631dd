"""Ages and ancestors by jumps are those of a slow walk, on every tree of attempts, and cost a logarithm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.lineage import Lineage
from laminar.core.versions import Age, VersionRegister


def walk(register: VersionRegister, version: int | None) -> list[int]:
    """The version and its ancestors, one parent at a time."""
    found: list[int] = []
    while version is not None:
        found.append(version)
        version = register.row(version).parent
    return found


def slow_age(register: VersionRegister, version: int, head: int) -> Age:
    n, j, on_lineage = register.row(head).step, register.row(version).step, walk(register, head)
    if version in on_lineage:
        return Age(n - j, across_rollback=False)
    branch = next((register.row(a).step for a in walk(register, version) if a in on_lineage), 0)
    return Age(max(0, n - branch) + max(0, j - branch), across_rollback=True)


def grow(choices: list[tuple[int, bool]]) -> VersionRegister:
    """Attempts that go back by so many steps (0: they go on), some of them to nothing at all."""
    register, attempt, head = VersionRegister(), 1, None
    for back, anew in choices:
        step = 0 if head is None else register.row(head).step + 1
        if back and head is not None:
            attempt += 1
            step = max(0, step - 1 - back)
            head = None if anew else register.version_of_step(step, head)
        head = register.reserve(attempt, step, head).version
    return register


@given(st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 1, 2, 7]), st.booleans()), min_size=1, max_size=60))
def test_ages_and_versions_of_steps_are_those_of_the_slow_walk(choices: list[tuple[int, bool]]) -> None:
    register = grow(choices)
    versions = [row.version for row in register.rows()]
    for head in versions:
        lineage = walk(register, head)
        for version in versions:
            assert register.age(version, head) == slow_age(register, version, head)
        for step in range(register.row(head).step + 2):
            expected = next((v for v in lineage if register.row(v).step == step), None)
            assert register.version_of_step(step, head) == expected


@given(st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 5]), st.booleans()), min_size=1, max_size=40))
def test_a_register_that_is_read_back_answers_alike(choices: list[tuple[int, bool]]) -> None:
    register = grow(choices)
    again = VersionRegister(register.rows())
    head = register.rows()[-1].version
    assert [again.age(row.version, head) for row in register.rows()] == [
        register.age(row.version, head) for row in register.rows()
    ]


class Counted(int):
    """A step that counts how often it is compared: what a climb costs."""

    comparisons = 0

    def __gt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int(self) > int(other)


def test_a_climb_through_a_hundred_thousand_steps_takes_a_few_dozen() -> None:
    lineage, rng = Lineage(), random.Random(3)
    for step in range(100_000):
        lineage.add(step, Counted(step), step - 1 if step else None)
    worst = 0
    for _ in range(200):
        Counted.comparisons = 0
        wanted = rng.randrange(100_000)
        assert lineage.at_or_below(wanted, 99_999) == wanted
        worst = max(worst, Counted.comparisons)
    assert worst <= 8 * 17, worst


def test_a_parent_of_a_later_step_or_a_higher_version_is_a_mistake() -> None:
    lineage = Lineage()
    lineage.add(3, 5, None)
    for version, step in ((4, 4), (2, 6), (3, 5)):
        with pytest.raises(ValueError, match="cannot follow"):
            lineage.add(version, step, 3)
