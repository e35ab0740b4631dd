"""Samples as the pool grants them to a replica: prompt, budget, seed, and what is durable of the response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from laminar.core.evaluation import EvalKey, EvalMode, EvalSample
from laminar.core.prompts import sampling_seed
from laminar.core.samples import Sample, SampleState
from laminar.pool.prompts import PromptBook
from laminar.wire.dataplane import GroupGrant, SampleGrant
from laminar.wire.spec import JobSpec


class Grants:
    """Pure translation: the same sample is granted with the same seed and budget each time."""

    def __init__(self, spec: JobSpec, prompts: PromptBook) -> None:
        self._seed, self._budget, self._prompts = spec.data.seed, spec.sampling.max_response_tokens, prompts

    def of_samples(self, samples: Iterable[Sample]) -> list[GroupGrant]:
        """By group. A partial carries its tokens; the budget stays that of the whole response."""
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(str(sample.key.group), []).append(sample)
        return [self._group(name, items) for name, items in by_group.items()]

    def of_evaluation(self, samples: Iterable[EvalSample]) -> list[GroupGrant]:
        """By prompt and mode; an evaluation's response always starts from its prompt."""
        by_group: dict[str, list[EvalSample]] = {}
        for sample in samples:
            by_group.setdefault(sample.key.group, []).append(sample)
        return [self._eval_group(name, items) for name, items in by_group.items()]

    def _group(self, name: str, samples: Sequence[Sample]) -> GroupGrant:
        prompt = self._prompts.train[samples[0].key.group.prompt]
        return GroupGrant(
            group=name, prompt_tokens=prompt.tokens, prompt_text=prompt.text, answer=prompt.answer,
            samples=[
                SampleGrant(
                    id=str(s.key), index=s.key.index, term=s.term, seed=sampling_seed(self._seed, s.key),
                    max_new_tokens=self._budget, tokens=bytes(s.tokens), logprobs=bytes(s.logprobs),
                    finish_reason=s.finish_reason if s.state is SampleState.FINISHED else "", tools=list(s.tools),
                )
                for s in samples
            ],
        )  # fmt: skip

    def _eval_group(self, name: str, samples: Sequence[EvalSample]) -> GroupGrant:
        key = samples[0].key
        prompt = self._prompts.evaluations[key.name][key.prompt]
        return GroupGrant(
            group=name, prompt_tokens=prompt.tokens, prompt_text=prompt.text, answer=prompt.answer,
            samples=[
                SampleGrant(
                    id=str(s.key), index=s.key.index, term=s.term, seed=_eval_seed(self._seed, s.key),
                    max_new_tokens=self._budget, greedy=s.key.mode is EvalMode.GREEDY,
                )
                for s in samples
            ],
        )  # fmt: skip


def _eval_seed(job_seed: int, key: EvalKey) -> int:
    """The same at both points of the run, so that first and last differ by the weights only."""
    text = f"{job_seed}/eval/{key.name}/{key.mode.value}/{key.prompt}/{key.index}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
