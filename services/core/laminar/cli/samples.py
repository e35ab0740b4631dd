"""`laminar samples`: prompts, responses and rewards of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from laminar.cli.errors import BadInput
from laminar.cli.run_data import ShownGroup, ShownSample, open_run, shown_groups
from laminar.cli.texts import Decoder
from laminar.shell.ledger_file import LedgerFileError, open_ledger, read_samples, read_steps


def read(path: Path, step: int | None, most: int) -> tuple[int, list[tuple[ShownGroup, ShownSample]]]:
    """The first `most` trajectories of a step (None: the newest), in the order of their prompts. Raises BadInput."""
    folder, _, job = open_run(path)
    try:
        with open_ledger(folder.store) as ledger:
            steps = [row.step for row in read_steps(ledger)]
            if not steps:
                raise BadInput(f"{path} has no samples to show: no step has been committed yet.")
            wanted = steps[-1] if step is None else step
            if wanted not in steps:
                raise BadInput(f"{path} has no step {wanted}; steps {steps[0]} to {steps[-1]} are committed.")
            groups = shown_groups(read_samples(ledger, step=wanted, with_tokens=True), Decoder.of_job(job))
            return wanted, list(islice(((group, sample) for group in groups for sample in group.samples), most))
    except LedgerFileError as error:
        raise BadInput(f"{path} has no ledger that can be read: {error}.") from error


def as_json(step: int, found: list[tuple[ShownGroup, ShownSample]]) -> Iterator[str]:
    """One object a line."""
    for group, sample in found:
        yield json.dumps({"step": step, "prompt": group.prompt, "answer": group.answer, **asdict(sample)})


def as_text(step: int, found: list[tuple[ShownGroup, ShownSample]]) -> Iterator[str]:
    """Each prompt once, its responses below it."""
    yield f"step {step}"
    last: ShownGroup | None = None
    for group, sample in found:
        if group is not last:
            yield f"\n> {_indented(group.prompt)}\n  (answer {group.answer}, mean reward {group.reward_mean:.2f})"
            last = group
        stale = "" if sample.inherent is None else f", staleness {sample.inherent}"
        cut = ", cut at the limit" if sample.finish_reason == "length" else ""
        yield f"  reward {sample.reward:g}  version {sample.version}{stale}, {sample.length} tokens{cut}, {sample.slot}"
        text = "(its tokens are not kept any more)" if sample.response is None else sample.response
        yield f"    {_indented(text, 4)}"


def _indented(text: str, width: int = 2) -> str:
    return text.replace("\n", "\n" + " " * width)
