"""The prompt stream: an endless walk over the data in a seeded order, a new permutation each pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from laminar.core.identity import GroupKey, SampleKey


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The next prompt: `cursor` counts within the permutation of `pass_`."""

    pass_: int = 0
    cursor: int = 0


class PromptStream:
    """Draws prompts forever. The same seed and position give the same continuation on any machine."""

    def __init__(self, num_prompts: int, seed: int, position: StreamPosition | None = None) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts is {num_prompts}: the data has no prompt")
        self._num_prompts = num_prompts
        self._seed = seed
        self.position = position or StreamPosition()
        self._order = self._permutation(self.position.pass_)

    def draw(self) -> GroupKey:
        """The next prompt's group."""
        key = GroupKey(self.position.pass_, self._order[self.position.cursor])
        cursor = self.position.cursor + 1
        if cursor < self._num_prompts:
            self.position = StreamPosition(self.position.pass_, cursor)
        else:
            self.position = StreamPosition(self.position.pass_ + 1, 0)
            self._order = self._permutation(self.position.pass_)
        return key

    def has_drawn(self, key: GroupKey) -> bool:
        """Whether `draw` has returned it."""
        if key.pass_ != self.position.pass_:
            return 0 <= key.pass_ < self.position.pass_ and 0 <= key.prompt < self._num_prompts
        return key.prompt in self._order[: self.position.cursor]

    def __iter__(self) -> Iterator[GroupKey]:
        while True:
            yield self.draw()

    def _permutation(self, pass_: int) -> list[int]:
        order = list(range(self._num_prompts))
        random.Random(f"{self._seed}/{pass_}").shuffle(order)
        return order


def sampling_seed(job_seed: int, key: SampleKey) -> int:
    """63-bit seed of one sample's randomness, from its key and the job's seed."""
    digest = blake2b(f"{job_seed}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
