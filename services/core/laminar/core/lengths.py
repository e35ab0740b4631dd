"""Lengths of responses: drawn for the emulated engine, and guessed for those that still run.

`Lognormal` and `Recorded` give each sample seed its length, always the same one, so a response that moves ends where
it would have ended. `LengthRecord` learns from the responses that ended how much the running ones may have left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_STANDARD = NormalDist()
_Z99 = _STANDARD.inv_cdf(0.99)
_MASK = 2**64 - 1


def uniform(seed: int, stream: int = 0) -> float:
    """A number in (0, 1) that depends on the two alone: SplitMix64's output function (Steele, Lea, Flood, 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xD1B54A32D192ED03) & _MASK
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    value ^= value >> 31
    return ((value >> 12) + 0.5) / 2**52


class Lengths(Protocol):
    def of(self, seed: int) -> int:
        """Tokens of the response with this sample seed, at least 1; no limit is applied."""
        ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    """By what papers publish: the median and how many times longer the 99th percentile is."""

    median_tokens: float
    p99_over_median: float

    def __post_init__(self) -> None:
        if self.median_tokens < 1 or self.p99_over_median < 1:
            raise ValueError(f"a median below one token or a p99 below the median: {self}")

    @property
    def sigma(self) -> float:
        """Of the logarithm: p99 = median * exp(sigma * z99)."""
        return math.log(self.p99_over_median) / _Z99

    def of(self, seed: int) -> int:
        return max(1, round(self.median_tokens * math.exp(self.sigma * _STANDARD.inv_cdf(uniform(seed)))))

    def mean_below(self, limit: float) -> float:
        """Mean of the lengths cut at `limit`: E[min(X, limit)]."""
        mu, sigma = math.log(self.median_tokens), self.sigma
        if sigma == 0:
            return min(self.median_tokens, limit)
        cut = (math.log(limit) - mu) / sigma
        whole = math.exp(mu + sigma * sigma / 2) * _STANDARD.cdf(cut - sigma)
        return whole + limit * (1 - _STANDARD.cdf(cut))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of real responses, one of them for each seed."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError("recorded lengths must be at least one number, all of them 1 or more")

    def of(self, seed: int) -> int:
        return self.tokens[int(uniform(seed) * len(self.tokens))]


class LengthRecord:
    """Where responses have ended, as counts in equal buckets; old ones fade as new ones come.

    Memory is bounded by the number of buckets.
    """

    def __init__(self, max_tokens: int, num_buckets: int = 256, memory: int = 16_384) -> None:
        self._width = max(1, math.ceil(max_tokens / num_buckets))
        self._ended = [0.0] * math.ceil(max_tokens / self._width)
        self._memory = memory

    def observe(self, length: int) -> None:
        """A response that ended, by itself or at the limit."""
        self._ended[min(length // self._width, len(self._ended) - 1)] += 1.0
        if sum(self._ended) > self._memory:
            self._ended = [count / 2 for count in self._ended]

    def residuals(self, running: Iterable[int]) -> Residuals:
        """What running responses have left, by Kaplan and Meier's estimate: that those of `running` lengths have not
        ended yet counts as well, or the first to end, always short ones, would make all look short."""
        last = len(self._ended) - 1
        at_risk = self._ended.copy()
        for length in running:
            at_risk[min(length // self._width, last)] += 1.0
        num_at_risk = 0.0
        survival = [0.0] * (last + 2)
        hazards = [0.0] * (last + 1)
        for bucket in range(last, -1, -1):
            num_at_risk += at_risk[bucket]
            # With one response's weight: where nothing is known, one lasts as long again (a Pareto tail of index 1).
            hazards[bucket] = (self._ended[bucket] + 1 / (bucket + 2)) / (num_at_risk + 1)
        survival[0] = 1.0
        for bucket, hazard in enumerate(hazards):
            survival[bucket + 1] = survival[bucket] * (1 - min(1.0, hazard))
        return Residuals(self._width, survival)


class Residuals:
    """`expected(length)`: mean tokens still to come of a response that has not ended at `length`."""

    def __init__(self, width: int, survival: Sequence[float]) -> None:
        """`survival[b]`: probability of reaching the start of bucket b."""
        self._width = width
        self._expected: list[float] = []
        beyond = 0.0
        for reached, passed in zip(reversed(survival[:-1]), reversed(survival[1:]), strict=True):
            # Those that end within a bucket do so in its middle.
            beyond += width * (reached + passed) / 2
            self._expected.append(beyond / reached if reached > 0 else width / 2)
        self._expected.reverse()

    def expected(self, length: int, budget_tokens: int) -> int:
        """At most `budget_tokens`, at least 1 while there is budget."""
        bucket = min(length // self._width, len(self._expected) - 1)
        return max(min(1, budget_tokens), min(budget_tokens, round(self._expected[bucket])))
