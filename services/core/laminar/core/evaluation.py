"""Evaluation: the held-out prompts of one version, in a ledger of their own, never mixed with training.

Training waits for it: at the first version before the first training lease, at the last version after the last step.
A response that is lost with its replica starts again; nothing is graded twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from laminar.core.samples import Holder


class EvalPoint(StrEnum):
    FIRST = "first"
    LAST = "last"


class EvalMode(StrEnum):
    SAMPLED = "sampled"
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True, order=True)
class EvalKey:
    """Wire form `eval/name/point/mode/prompt/index`."""

    name: str
    point: EvalPoint
    mode: EvalMode
    prompt: int
    index: int

    def __str__(self) -> str:
        return f"eval/{self.name}/{self.point}/{self.mode}/{self.prompt}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> EvalKey:
        """Inverse of `str`. Raises ValueError on anything else."""
        word, name, point, mode, prompt, index = text.split("/")
        if word != "eval":
            raise ValueError(f"{text!r} names no evaluation sample")
        return cls(name, EvalPoint(point), EvalMode(mode), int(prompt), int(index))

    @property
    def group(self) -> str:
        """Samples with the same group share a prompt and a mode."""
        return f"eval/{self.name}/{self.point}/{self.mode}/{self.prompt}"


@dataclass(slots=True)
class EvalSample:
    """`reward` None with `done`: ungraded, left out of the mean."""

    key: EvalKey
    term: int = 0
    holder: Holder | None = None
    done: bool = False
    reward: float | None = None
    length: int = 0
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """One evaluation of the job: `num_prompts` rows, `samples_per_prompt` sampled responses and one greedy one each."""

    name: str
    num_prompts: int
    samples_per_prompt: int

    def keys(self, point: EvalPoint) -> list[EvalKey]:
        """All its samples at one point of the run."""
        sampled = [
            EvalKey(self.name, point, EvalMode.SAMPLED, prompt, index)
            for prompt in range(self.num_prompts)
            for index in range(self.samples_per_prompt)
        ]
        return sampled + [EvalKey(self.name, point, EvalMode.GREEDY, prompt, 0) for prompt in range(self.num_prompts)]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Mean reward over the graded samples with its standard error over prompts."""

    name: str
    point: EvalPoint
    mode: EvalMode
    num_items: int
    num_graded: int
    mean: float
    stderr: float


@dataclass(slots=True)
class EvaluationRound:
    """All evaluations at one point, pinned to one version."""

    point: EvalPoint
    version: int
    samples: dict[EvalKey, EvalSample] = field(default_factory=dict[EvalKey, EvalSample])
    dirty: dict[EvalKey, EvalSample] = field(default_factory=dict[EvalKey, EvalSample])
    _waiting: dict[EvalKey, None] = field(default_factory=dict[EvalKey, None])

    @classmethod
    def start(cls, point: EvalPoint, version: int, plans: Iterable[EvalPlan]) -> EvaluationRound:
        """Everything still to do."""
        return cls.restore(point, version, [EvalSample(key) for plan in plans for key in plan.keys(point)])

    @classmethod
    def restore(cls, point: EvalPoint, version: int, samples: Iterable[EvalSample]) -> EvaluationRound:
        """From stored rows: what is not done starts again, under a higher term than any granted before."""
        by_key = {sample.key: sample for sample in samples}
        waiting = {key: None for key, sample in sorted(by_key.items()) if not sample.done}
        return cls(point, version, by_key, {}, waiting)

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples.values())

    @property
    def num_done(self) -> int:
        return sum(sample.done for sample in self.samples.values())

    def lease(self, holder: Holder, limit: int) -> list[EvalSample]:
        """Up to `limit` samples for a replica that holds the version; those it holds already come again first, unless
        only their grades are missing."""
        held = [sample for sample in self.held_by(holder) if not sample.finish_reason]
        if held:
            return held
        chosen = list(self._waiting)[:limit]
        for key in chosen:
            del self._waiting[key]
            sample = self.samples[key]
            sample.term += 1
            sample.holder = holder
            self.dirty[key] = sample
        return [self.samples[key] for key in chosen]

    def held_by(self, holder: Holder) -> list[EvalSample]:
        held = [sample for sample in self.samples.values() if sample.holder == holder and not sample.done]
        return sorted(held, key=lambda sample: sample.key)

    def owns(self, holder: Holder, key: EvalKey, term: int) -> bool:
        """May this life of a replica write this sample?"""
        sample = self.samples.get(key)
        return sample is not None and not sample.done and (sample.holder, sample.term) == (holder, term)

    def finish(self, holder: Holder, key: EvalKey, term: int, length: int, reason: str) -> bool:
        """Generation ended; an "error" puts the sample back. False: superseded."""
        if not self.owns(holder, key, term):
            return False
        sample = self.samples[key]
        if reason == "error":
            self._put_back(sample)
        else:
            sample.length, sample.finish_reason = length, reason
        return True

    def grade(self, holder: Holder, key: EvalKey, term: int, reward: float | None) -> bool:
        """The verdict. False: superseded."""
        if not self.owns(holder, key, term):
            return False
        sample = self.samples[key]
        sample.done, sample.reward, sample.holder = True, reward, None
        self.dirty[key] = sample
        return True

    def lose(self, holder: Holder) -> int:
        """A replica is gone: what it held starts again. Returns how many samples that is."""
        lost = self.held_by(holder)
        for sample in lost:
            self._put_back(sample)
        return len(lost)

    def results(self) -> list[EvalResult]:
        """One row an evaluation and mode; means over graded samples."""
        rows = sorted({(key.name, key.mode) for key in self.samples})
        return [self._result(name, mode) for name, mode in rows]

    def _put_back(self, sample: EvalSample) -> None:
        sample.holder = None
        sample.length, sample.finish_reason = 0, ""
        sample.term += 1
        self._waiting[sample.key] = None
        self.dirty[sample.key] = sample

    def _result(self, name: str, mode: EvalMode) -> EvalResult:
        chosen = [s for key, s in self.samples.items() if (key.name, key.mode) == (name, mode)]
        by_prompt: dict[int, list[float]] = {}
        for sample in chosen:
            if sample.reward is not None:
                by_prompt.setdefault(sample.key.prompt, []).append(sample.reward)
        means = [sum(rewards) / len(rewards) for rewards in by_prompt.values()]
        mean = sum(means) / len(means) if means else 0.0
        variance = sum((m - mean) ** 2 for m in means) / (len(means) - 1) if len(means) > 1 else 0.0
        num_graded = sum(len(rewards) for rewards in by_prompt.values())
        stderr = math.sqrt(variance / len(means)) if means else 0.0
        return EvalResult(name, self.point, mode, len(chosen), num_graded, mean, stderr)
