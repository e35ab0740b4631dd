"""All prompts of a job, read and tokenised once, at start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import xxhash

from laminar.core.evaluation import EvalPlan
from laminar.pool.data import PromptTable, read_prompts
from laminar.pool.tokenize import TOO_LONG, Prompt, PromptTokenizer, too_long
from laminar.wire.sources import local_path
from laminar.wire.spec import LaminarJob


@dataclass(frozen=True, slots=True)
class PromptBook:
    """`too_long`: indexes of training prompts over the limit. `skipped`: rows left out, by reason; those of an
    evaluation as `name/reason`. `digest` changes when any prompt does."""

    train: list[Prompt]
    too_long: frozenset[int]
    evaluations: dict[str, list[Prompt]]
    skipped: dict[str, int]
    digest: str

    def plans(self, job: LaminarJob) -> list[EvalPlan]:
        """The job's evaluations, as many prompts as can be used."""
        return [EvalPlan(e.name, len(self.evaluations[e.name]), e.samples_per_prompt) for e in job.spec.evaluations]


def load_prompts(job: LaminarJob, now: datetime) -> PromptBook:
    """Reads and tokenises everything. Raises DataError or TokenizerError, each one paragraph for people."""
    spec = job.spec
    limit = spec.data.max_prompt_tokens
    tokenizer = PromptTokenizer(local_path(spec.model.source), now)
    train = read_prompts(spec.data.train.source, spec.data.train.prompt_field, spec.data.train.answer_field)
    prompts = tokenizer.tokenize(train)
    long = too_long(prompts, limit, train)
    skipped = _counts("", train, len(long))
    evaluations: dict[str, list[Prompt]] = {}
    for evaluation in spec.evaluations:
        table = read_prompts(evaluation.source, evaluation.prompt_field, evaluation.answer_field)
        all_ = tokenizer.tokenize(table)
        over = too_long(all_, limit, table)
        evaluations[evaluation.name] = [prompt for index, prompt in enumerate(all_) if index not in over]
        skipped |= _counts(f"{evaluation.name}/", table, len(over))
    return PromptBook(prompts, long, evaluations, skipped, _digest([prompts, *evaluations.values()]))


def _counts(prefix: str, table: PromptTable, num_long: int) -> dict[str, int]:
    counts = {**table.skipped, TOO_LONG: num_long}
    return {f"{prefix}{reason}": number for reason, number in counts.items() if number}


def _digest(lists: Iterable[list[Prompt]]) -> str:
    hasher = xxhash.xxh3_128()
    for prompts in lists:
        for prompt in prompts:
            hasher.update(len(prompt.tokens).to_bytes(4, "little") + prompt.tokens + prompt.answer.encode() + b"\0")
        hasher.update(b"\1")
    return hasher.hexdigest()
