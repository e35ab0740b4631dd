"""The family tree of versions, and questions about it that cost the logarithm of its depth.

Each version knows its parent and one ancestor farther up, its jump. Jumps are placed as the digits of a skew-binary
counter (Myers 1983, "An applicative random-access stack"): two words a version, O(1) to add one, and from any version
any ancestor is O(log depth) jumps and parents away.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Place:
    version: int
    step: int
    depth: int
    parent: _Place | None
    jump: _Place | None
    """None exactly where `parent` is."""


class Lineage:
    """Invariant: a parent is added before its children and has a lower version and no higher step than they."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def add(self, version: int, step: int, parent: int | None) -> None:
        """A new version. A parent that is not here makes it a root, like None."""
        above = None if parent is None else self._places.get(parent)
        if above is not None and (above.version >= version or above.step > step):
            raise ValueError(f"version {version} (step {step}) cannot follow {above.version} (step {above.step})")
        depth = 0 if above is None else above.depth + 1
        self._places[version] = _Place(version, step, depth, above, _jump(above))

    def common(self, one: int, other: int) -> int | None:
        """The newest version that is both of them or an ancestor of both; None: they share none."""
        a, b = self._places[one], self._places[other]
        a, b = _up_to_depth(a, b.depth), _up_to_depth(b, a.depth)
        while a is not b:
            if a.parent is None or b.parent is None or a.jump is None or b.jump is None:
                return None
            # Of equal depth, so their jumps span the same distance: unequal ones cannot pass the common ancestor.
            a, b = (a.parent, b.parent) if a.jump is b.jump else (a.jump, b.jump)
        return a.version

    def at_or_below(self, step: int, head: int) -> int | None:
        """The newest version of a step up to `step`, of `head` and its ancestors."""
        place: _Place | None = self._places[head]
        while place is not None and place.step > step:
            # A jump that would land on or below the step might pass a newer version there.
            place = place.jump if place.jump is not None and place.jump.step > step else place.parent
        return None if place is None else place.version


def _jump(parent: _Place | None) -> _Place | None:
    """Where the child of `parent` jumps to: past both of its parent's jumps where those are equally long."""
    if parent is None or parent.jump is None or parent.jump.jump is None:
        return parent
    equal = parent.depth - parent.jump.depth == parent.jump.depth - parent.jump.jump.depth
    return parent.jump.jump if equal else parent


def _up_to_depth(place: _Place, depth: int) -> _Place:
    while place.depth > depth:
        assert place.parent is not None and place.jump is not None, "only a root has neither"
        place = place.jump if place.jump.depth >= depth else place.parent
    return place
