"""The version register: counters, visibility, burning, and ages along the lineage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.versions import Age, VersionConflict, VersionRegister, VersionState


def visible(register: VersionRegister, attempt: int, step: int, parent: int | None) -> int:
    version = register.reserve(attempt, step, parent).version
    assert register.report_complete(version, f"d{version}", "relay-0", 1)
    return version


def test_a_repeated_reservation_is_answered_with_the_same_version() -> None:
    register = VersionRegister()
    assert register.reserve(1, 0, None) is register.reserve(1, 0, None)
    assert register.reserve(1, 1, 0).version == 1


def test_a_version_is_visible_on_two_relays_or_on_the_only_one() -> None:
    register = VersionRegister()
    version = register.reserve(1, 0, None).version
    assert not register.report_complete(version, "d", "relay-0", 2)
    assert not register.report_complete(version, "d", "relay-0", 2), "the same relay twice is one relay"
    assert register.newest is None
    assert register.report_complete(version, "d", "relay-1", 2)
    assert register.newest is not None and register.newest.version == version


def test_a_copy_on_a_relay_that_left_does_not_count() -> None:
    register = VersionRegister()
    version = register.reserve(1, 0, None).version
    register.report_complete(version, "d", "relay-0", 3)
    assert register.relay_left("relay-0", 2) == []
    assert not register.report_complete(version, "d", "relay-1", 2)
    assert register.report_complete(version, "d", "relay-2", 2)


def test_a_chain_that_shrinks_to_the_relay_that_has_it_makes_it_visible() -> None:
    register = VersionRegister()
    version = register.reserve(1, 0, None).version
    register.report_complete(version, "d", "relay-0", 2)
    assert register.relay_left("relay-1", 1) == [version]


def test_relays_that_disagree_on_the_digest_are_refused() -> None:
    """Case A8: a truncated or damaged copy is an error, not a version."""
    register = VersionRegister()
    version = register.reserve(1, 0, None).version
    register.report_complete(version, "d", "relay-0", 2)
    with pytest.raises(VersionConflict, match="digest"):
        register.report_complete(version, "other", "relay-1", 2)


def test_what_a_dead_attempt_had_not_made_visible_never_will_be() -> None:
    register = VersionRegister()
    v0 = visible(register, 1, 0, None)
    v1 = register.reserve(1, 1, v0).version
    assert register.burn_before(2) == [v1]
    assert not register.report_complete(v1, "d", "relay-0", 1)
    assert register.row(v1).state is VersionState.BURNED
    assert register.newest is not None and register.newest.version == v0


def test_the_counter_never_goes_back_across_a_recovery() -> None:
    """Case A2: after a resume the first publication is the next number, not 0 or 1."""
    register = VersionRegister()
    parent = None
    for step in range(5):
        parent = visible(register, 1, step, parent)
    again = register.reserve(2, 2, register.version_of_step(2, parent))
    assert (again.version, again.parent) == (5, 2)
    assert VersionRegister(register.rows()).reserve(2, 3, 5).version == 6


def test_ages_are_counted_along_the_lineage_and_across_a_rollback() -> None:
    register = VersionRegister()
    parent = None
    for step in range(5):
        parent = visible(register, 1, step, parent)
    restored = visible(register, 2, 2, 2)
    head = visible(register, 2, 3, restored)
    assert register.age(2, head) == Age(1, False)
    assert register.age(restored, head) == Age(1, False)
    assert register.age(head, head) == Age(0, False)
    assert register.age(4, head) == Age((3 - 2) + (4 - 2), True)
    assert register.age(0, head, head_step=9) == Age(9, False)


def test_a_parent_of_a_later_step_is_refused() -> None:
    register = VersionRegister()
    v0 = visible(register, 1, 3, None)
    with pytest.raises(VersionConflict, match="no parent for step 2"):
        register.reserve(2, 2, v0)
    assert [row.version for row in register.rows()] == [v0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_versions_grow_by_one_and_newest_never_goes_back(events: list[tuple[bool, int]]) -> None:
    register = VersionRegister()
    attempt, head, newest = 1, None, -1
    for recover, back in events:
        step = 0 if head is None else register.row(head).step + 1
        if recover:
            attempt += 1
            register.burn_before(attempt)
            step = max(0, step - 1 - back)
            head = register.version_of_step(step, head)
        row = register.reserve(attempt, step, head)
        assert row.version == len(register.rows()) - 1
        head = row.version
        if back != 1:
            register.report_complete(head, f"d{head}", "relay-0", 1)
        now = register.newest.version if register.newest else -1
        assert now >= newest
        newest = now
