"""Job files: what is accepted, and what the writer of a wrong one reads."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.wire import job_problems
from laminar.wire.job_file import (
    JobFileError,
    diff_jobs,
    is_steps_upward_only,
    job_digest,
    load_job,
    parse_job,
)
from laminar.wire.job_yaml import YamlError, parse, parse_value
from laminar.wire.spec import LaminarJob, LossType

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "manifests/samples/laminarjob-cpu.yaml"
SHIPPED = [SAMPLE, *sorted((ROOT / "examples").glob("*.yaml"))]

# A host under load is slow, which is not what these properties are about.
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

HEAD = """\
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {name: toy}
spec:
  steps: 3
  model: {source: file:model}
  data: {train: {source: file:data.jsonl}}
  rewards: [{name: exact, type: exact}]
"""


def job(more: str = "", *overrides: str) -> LaminarJob:
    return parse_job(HEAD + more, "job.yaml", overrides)


def problems(more: str = "", *overrides: str) -> tuple[str, ...]:
    with pytest.raises(JobFileError) as error:
        job(more, *overrides)
    assert str(error.value) == "\n\n".join(error.value.problems)
    return error.value.problems


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_job_is_valid_and_survives_json(path: Path) -> None:
    loaded = load_job(path)
    assert LaminarJob.model_validate_json(loaded.model_dump_json(by_alias=True)) == loaded


def test_there_are_examples() -> None:
    assert len(SHIPPED) >= 3


def test_numbers_and_words_are_those_of_yaml_1_2() -> None:
    assert job("  algorithm: {learningRate: 1e-6}\n").spec.algorithm.learning_rate == 1e-6
    text = "{a: yes, b: no, c: on, d: 1_000, e: 0o17, f: 0x1F, g: 012, h: 12:30:45, i: 2001-01-01, j: .5, k: 1E3, l: ~}"
    assert parse_value(text) == {
        "a": "yes", "b": "no", "c": "on", "d": "1_000", "e": 15, "f": 31, "g": 12, "h": "12:30:45",
        "i": "2001-01-01", "j": 0.5, "k": 1000.0, "l": None,
    }  # fmt: skip
    assert parse_value("{a: '1', b: !!str 1, c: True}") == {"a": "1", "b": "1", "c": True}


def test_an_unknown_field_gets_file_line_neighbours_and_the_nearest_name() -> None:
    assert problems("  algorithm:\n    learnigRate: 1e-6\n") == (
        "job.yaml, line 10: spec.algorithm has no field 'learnigRate'. Did you mean 'learningRate'? Its fields are: "
        "loss, promptsPerStep, samplesPerPrompt, miniBatchTrajectories, dynamicSampling, clip, learningRate.",
    )


def test_a_field_in_the_wrong_section_gets_the_right_path() -> None:
    assert "spec.trainer has no field 'keep'. Did you mean spec.trainer.checkpoint.keep?" in problems(
        "  trainer: {keep: 3}\n"
    )[0]  # fmt: skip


def test_snake_case_is_refused_with_the_name_that_is_meant() -> None:
    assert "Did you mean 'maxResponseTokens'?" in problems("  sampling: {max_response_tokens: 3}\n")[0]


def test_a_wrong_value_gets_its_path_value_and_what_is_allowed() -> None:
    text = problems("  rollout: {replicas: 0}\n")[0]
    assert text == (
        "job.yaml, line 9: spec.rollout.replicas is 0. It must be a whole number from 1 to 4096. "
        "(Rollout replicas; each has one engine.)"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("  rollout: {replicas: '2'}\n", "without quotes"),
        ("  rollout: {replicas: true}\n", "is true. It must be a whole number"),
        ("  rollout: {replicas: 2.5}\n", "is 2.5. It must be a whole number"),
        ("  sampling: {temperature: yes}\n", 'is "yes". It must be a number above 0 up to 10'),
        ("  schedule: {type: laminr}\n", "one of laminar, synchronous; the nearest is laminar"),
        ("  algorithm: {clip: 5}\n", "a section with the fields low, high"),
        ("  evaluations: 5\n", "a list of 0 to 16 entries"),
        ("  evaluations: [{name: 5, source: file:x}]\n", "put the value in quotes"),
        ("  evaluations: [{name: a, source: /x}]\n", "text that begins with file: or recipe://"),
        ("  evaluations: [{name: a}]\n", "spec.evaluations.0.source is missing"),
        ("  evaluations: [{name: a, source: file:x}, {name: a, source: file:y}]\n", "the name 'a' is used twice"),
        ("  algorithm: {samplesPerPrompt: 8, miniBatchTrajectories: 4}\n", "must hold at least one group"),
        ("  sampling: {topP: 0.9}\n", "a number that is 1"),
        ("  relay:\n", "is empty. It must be a section with the fields keepVersions"),
    ],
)
def test_each_kind_of_mistake_has_its_words(more: str, words: str) -> None:
    found = problems(more)
    assert len(found) == 1
    assert words in found[0]


def test_all_problems_are_listed_in_the_order_of_the_file() -> None:
    found = problems("  sampling: {topQ: 1, temperature: 99}\n  relay: {keepVersions: 1}\n  color: red\n")
    assert [text.split(":")[0] for text in found] == [f"job.yaml, line {line}" for line in (9, 9, 10, 11)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "job.yaml is empty"),
        ("# only a comment\n", "job.yaml is empty"),
        ("just words", 'holds "just words"'),
        ("- a\n- b\n", 'holds ["a", "b"]'),
        (HEAD + "---\n" + HEAD, "job.yaml, line 10: there are 2 documents"),
        ("kind: LaminarJob\n\tspec: 1\n", "job.yaml, line 2: a tab stands where YAML allows only spaces"),
        ("kind: Deployment\nspec: {replicas: 1}\n", 'line 1: kind is "Deployment"; it must be LaminarJob'),
        ("apiVersion: v1\nkind: LaminarJob\n", 'apiVersion is "v1"; it must be laminar.dev/v1alpha1'),
        (HEAD + "  steps: 4\n", "line 9: the field 'steps' is there twice, first in line 5"),
        ("a: [1, 2\n", "this is not valid YAML"),
        ("a: .nan\n", "line 1: .nan is not a finite number"),
        ("a: 1e999\n", "1e999 is not a finite number"),
        ("a: !!python/name:os.system\n", "is not supported"),
        ("a: *b\n", "this is not valid YAML: found undefined alias"),
        ("a: &a [*a]\n", "too many nested or repeated values"),
        ("[a]: 1\n", "the name of a field must be text"),
        ("a: \x01\n", "the character #x0001 is not allowed"),
        ("a: " + "[" * 700 + "\n", "nested too deeply"),
        ("a: " + "[" * 60 + "]" * 60 + "\n", "too many nested or repeated values"),
    ],
)
def test_what_is_no_job_file_gets_one_clear_sentence(text: str, words: str) -> None:
    with pytest.raises(JobFileError) as error:
        parse_job(text, "job.yaml")
    assert len(error.value.problems) == 1
    assert words in str(error.value)


def test_a_path_that_cannot_be_read_gets_one_clear_sentence(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary", tmp_path / "large"
    binary.write_bytes(b"\x80\x00model")
    large.write_bytes(b"#" * (2**20 + 1))
    for path, words in (
        (tmp_path / "gone.yaml", "there is no such file"),
        (tmp_path, "is a folder"),
        (binary, "is not UTF-8 text"),
        (large, "at most 1048576"),
    ):
        with pytest.raises(JobFileError, match=words):
            load_job(path)


EVALUATIONS = "  evaluations: [{name: heldout, source: file:x}, {name: hard, source: file:y}]\n"


def test_overrides_set_fields_of_sections_that_are_not_there_yet() -> None:
    made = job("", "trainer.checkpoint.keep=7", "spec.steps=9", "metadata.name=other", "loggers.tensorboard={}")
    assert (made.spec.trainer.checkpoint.keep, made.spec.steps, made.metadata.name) == (7, 9, "other")
    assert made.spec.loggers.tensorboard is not None


def test_overrides_reach_list_entries_by_index_and_by_name() -> None:
    made = job(EVALUATIONS, "evaluations.0.samplesPerPrompt=2", "evaluations[hard].samplesPerPrompt=3")
    assert [item.samples_per_prompt for item in made.spec.evaluations] == [2, 3]


def test_an_override_may_replace_a_whole_section_and_later_ones_win() -> None:
    made = job("", "algorithm={loss: grpo, learningRate: 1e-3}", "algorithm.learningRate=1e-4")
    assert (made.spec.algorithm.loss, made.spec.algorithm.learning_rate) == (LossType.GRPO, 1e-4)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", "this is not path=value"),
        ("=3", "this is not path=value"),
        ("a..b=3", "this is not path=value"),
        ("trainer.keep=3", "Did you mean spec.trainer.checkpoint.keep?"),
        ("steps.more=3", "spec.steps is 3, not a section"),
        ("evaluations[none].name=a", "has no entry 'none'; it has heldout, hard"),
        ("rewards.7.name=a", "has no entry '7'"),
        ("steps=[", "the value: this is not valid YAML"),
        ("steps=many", '--set steps=many: spec.steps is "many". It must be a whole number'),
        ("rollout={replica: 3}", "--set rollout={replica: 3}: spec.rollout has no field 'replica'"),
    ],
)
def test_a_wrong_override_is_named_with_the_reason(override: str, words: str) -> None:
    found = problems(EVALUATIONS, override)
    assert len(found) == 1
    assert found[0].startswith(f"--set {override}: ")
    assert words in found[0]


def test_all_wrong_overrides_are_listed() -> None:
    assert len(problems("", "a=1", "b=2", "steps=4")) == 2


def test_an_entry_of_a_list_that_is_not_there_is_a_clear_mistake() -> None:
    assert "spec.evaluations has no entry 'x'; it is empty" in problems("", "evaluations[x].name=y")[0]


def test_the_digest_is_of_the_job_and_not_of_its_file() -> None:
    same = "# a comment\n" + HEAD + "  relay: {keepVersions: 2}\n"
    assert job_digest(parse_job(same, "other.yaml")) == job_digest(job())
    assert job_digest(job("", "steps=4")) != job_digest(job())


def test_differences_are_listed_by_path_and_only_more_steps_may_go_on() -> None:
    old, longer = job(), job("", "steps=5")
    other = job("", "steps=5", "algorithm.learningRate=1e-4", "loggers.tensorboard={}")
    assert diff_jobs(old, old) == []
    assert diff_jobs(old, longer) == ["spec.steps: 3 -> 5"]
    assert diff_jobs(old, other) == [
        "spec.algorithm.learningRate: 1e-06 -> 0.0001",
        "spec.loggers.tensorboard: empty -> {}",
        "spec.steps: 3 -> 5",
    ]
    allowed = [is_steps_upward_only(old, new) for new in (old, longer, other)]
    assert (*allowed, is_steps_upward_only(longer, old)) == (True, True, False, False)


def test_every_pattern_of_the_spec_has_words() -> None:
    def patterns(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {str(value["pattern"])} if isinstance(value.get("pattern"), str) else set()
            return own.union(*(patterns(item) for item in value.values()))
        return set().union(*(patterns(item) for item in value)) if isinstance(value, list) else set()

    assert patterns(LaminarJob.model_json_schema()) == set(job_problems.PATTERN_WORDS)


@relaxed
@given(st.text(alphabet=string.printable, max_size=80))
def test_any_text_is_a_job_or_a_job_file_error(text: str) -> None:
    with pytest.raises(JobFileError):
        parse_job(text, "job.yaml")


names = st.text(alphabet=string.ascii_letters + "_", min_size=1, max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=8,
)


@relaxed
@given(values)
def test_any_value_in_any_place_is_explained_and_never_a_crash(value: object) -> None:
    for path in ("spec", "spec.algorithm", "spec.evaluations", "spec.rewards.0", "spec.steps", "metadata"):
        text = f"{path}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}"
        try:
            job("", text)
        except JobFileError as error:
            assert all(problem.startswith(("--set", "job.yaml")) for problem in error.problems)


@relaxed
@given(st.dictionaries(names, values, max_size=4))
def test_what_is_written_as_yaml_is_read_back(value: dict[str, object]) -> None:
    try:
        assert parse(yaml.safe_dump(value)).value == value
    except YamlError as error:
        assert "finite" in error.sentence or "large" in error.sentence
