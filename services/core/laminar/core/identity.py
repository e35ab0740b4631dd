"""The identities that every message and every row carries, and how they are written on the wire.

Each is issued by exactly one party and only grows (docs/architecture.md, "Identities"): a lower one than the
highest seen is refused, so a superseded process can keep talking and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

Version = NewType("Version", int)
"""One publication of weights; issued by the pool; never reused, never goes back."""
Term = NewType("Term", int)
"""The right to write one sample; issued by the pool, +1 at each grant or move."""
Incarnation = NewType("Incarnation", int)
"""One life of a member as the pool counts it; issued at registration."""
Attempt = NewType("Attempt", int)
"""One life of the trainer group; issued by the driver, persisted before use."""
Generation = NewType("Generation", int)
"""One life of the pool's store; issued by the driver."""
Epoch = NewType("Epoch", int)
"""The number of the relay chain's membership list; issued by the driver."""
Step = NewType("Step", int)
"""A training step; batch k is sealed for step k; v0 belongs to step 0."""


class Role(StrEnum):
    """What a member does; the first part of its slot's name."""

    POOL = "pool"
    RELAY = "relay"
    ROLLOUT = "rollout"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """All samples of one prompt in one pass over the data. Wire form `pass/prompt`."""

    pass_: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.pass_}/{self.prompt}"

    @classmethod
    def parse(cls, text: str) -> GroupKey:
        """Inverse of `str`. Raises ValueError on anything else."""
        pass_, prompt = text.split("/")
        return cls(int(pass_), int(prompt))


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """One response to be generated: (pass, prompt, index). Wire form `pass/prompt/index`."""

    group: GroupKey
    index: int

    def __str__(self) -> str:
        return f"{self.group}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> SampleKey:
        """Inverse of `str`. Raises ValueError on anything else."""
        group, _, index = text.rpartition("/")
        return cls(GroupKey.parse(group), int(index))
