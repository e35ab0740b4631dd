"""The reference of the job's fields is made from the models, and docs/spec.md carries it as it is."""

from __future__ import annotations

import re
from pathlib import Path

from laminar.wire.job_problems import all_paths
from laminar.wire.spec_reference import reference, schema_of, sections

DOCUMENT = Path(__file__).parents[2] / "docs" / "spec.md"


def test_the_document_ends_with_what_the_generator_prints() -> None:
    text = DOCUMENT.read_text()
    assert text.endswith("\n" + reference()), "run `python -m laminar.wire.spec_reference` and paste the fields anew"
    assert text.count("### document\n") == 1


def test_every_field_of_a_job_is_in_the_reference_once() -> None:
    named = re.findall(r"^(?:\| `|### )([a-zA-Z][^`\s]*)", reference(), flags=re.MULTILINE)
    assert sorted(named) == sorted({*named})
    shown = {path.replace("[]", "") for path in named} - {"document"}
    assert shown == {path.replace(".*", "") for path in all_paths()}


def test_every_field_has_a_description_that_reads_as_a_sentence() -> None:
    paths = [path.replace("*", "0").split(".") for path in all_paths()]
    described = {".".join(path): schema_of(".".join(path)).get("description", "") for path in paths}
    assert {path for path, text in described.items() if not text.endswith(".")} == set()


def test_sections_come_outer_before_inner() -> None:
    order = [section.path for section in sections()]
    assert order[:3] == ["", "metadata", "spec"]
    assert order.index("spec.rewards[]") < order.index("spec.rewards[].extract")
