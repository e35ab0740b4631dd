"""The LaminarJob as a model: round trips, defaults with a meaning, and rules between fields."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from laminar.wire.messages import JobStatus, PoolView, Register
from laminar.wire.spec import (
    Algorithm,
    Checkpoint,
    Data,
    Evaluation,
    Extract,
    JobSpec,
    LaminarJob,
    Metadata,
    Model,
    Reward,
    RewardType,
    Rollout,
    ScheduleSpec,
    ScheduleType,
    TrainData,
    Trainer,
)

names = st.from_regex(r"\A[a-z]([-a-z0-9]{0,6}[a-z0-9])?\Z")
sources = st.sampled_from(["file:model", "recipe://tiny", "file:/data/x.jsonl"])
evaluations = st.builds(Evaluation, name=names, source=sources, samples_per_prompt=st.integers(1, 64))
rewards = st.one_of(
    st.builds(Reward, name=names, type=st.just(RewardType.EXACT), weight=st.floats(-1000, 1000)),
    st.builds(Reward, name=names, type=st.just(RewardType.MATH), extract=st.just(Extract(tag="answer"))),
    st.builds(Reward, name=names, type=st.just(RewardType.PYTHON), function=st.just("r.py:score")),
)
specs = st.builds(
    JobSpec,
    steps=st.integers(1, 10_000_000),
    model=st.builds(Model, source=sources),
    data=st.builds(Data, train=st.builds(TrainData, source=sources), seed=st.integers(0, 2**31 - 1)),
    evaluations=st.lists(evaluations, max_size=3, unique_by=lambda item: item.name),
    rewards=st.lists(rewards, min_size=1, max_size=3, unique_by=lambda item: item.name),
    algorithm=st.builds(
        Algorithm, prompts_per_step=st.integers(1, 65_536), learning_rate=st.floats(1e-12, 1)
    ),
    schedule=st.builds(ScheduleSpec, type=st.sampled_from(ScheduleType)),
    trainer=st.builds(Trainer, checkpoint=st.builds(Checkpoint, keep=st.integers(1, 1000))),
    rollout=st.builds(Rollout, replicas=st.integers(1, 4096)),
)  # fmt: skip
jobs = st.builds(LaminarJob, metadata=st.builds(Metadata, name=names), spec=specs)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(jobs)
def test_a_job_survives_both_of_its_json_forms(job: LaminarJob) -> None:
    assert LaminarJob.model_validate_json(job.model_dump_json(by_alias=True), strict=True) == job
    assert LaminarJob.model_validate_json(job.model_dump_json()) == job


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_the_replicas_leases_cover_a_step_and_no_group_more_than_a_replica_needs(spec: JobSpec) -> None:
    covered = spec.prompts_per_lease * spec.rollout.replicas
    assert spec.algorithm.prompts_per_step <= covered < spec.algorithm.prompts_per_step + spec.rollout.replicas


@pytest.mark.parametrize(
    "reward",
    [
        {"name": "a", "type": "python"},
        {"name": "a", "type": "exact", "function": "r.py:score"},
        {"name": "a", "type": "exact", "extract": {}},
        {"name": "a", "type": "exact", "extract": {"tag": "x", "regex": "y"}},
        {"name": "a", "type": "python", "function": "r.py"},
        {"name": "A", "type": "exact"},
    ],
)
def test_rewards_that_contradict_themselves_are_refused(reward: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Reward.model_validate(reward)


def test_a_job_is_frozen_and_refuses_unknown_fields() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Metadata(name="a").name = "b"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Metadata.model_validate({"name": "a", "labels": {}})


def test_messages_ignore_what_a_newer_peer_adds() -> None:
    register = Register(slot="relay-0", role="relay", index=0, life=1, nonce="n")  # type: ignore[arg-type]
    assert Register.model_validate({**register.model_dump(), "colour": "green"}) == register


@pytest.mark.parametrize("model", [PoolView, JobStatus])
def test_views_say_which_fields_they_need(model: type[PoolView | JobStatus]) -> None:
    with pytest.raises(ValidationError, match="generation"):
        model.model_validate({})


EMULATION = {
    "model": {
        "numParameters": 5e8, "numHiddenLayers": 10, "numAttentionHeads": 1, "numKeyValueHeads": 1, "headDim": 100,
        "hiddenSize": 100,
    },
    "gpu": {
        "memoryBytes": 1e10, "memoryBytesPerSecond": 1e12, "flopsPerSecond": 1e14, "linkBytesPerSecond": 1e11,
        "hostBytesPerSecond": 1e10,
    },
}  # fmt: skip
EMULATED_ROLLOUT = {
    "gpusPerReplica": 4,
    "engine": {"type": "emulated", "emulated": {"lengths": {"medianTokens": 100}}},
}
HALF_EMULATED = [
    ("a type without its section", {"rollout": {"engine": {"type": "emulated"}}, "emulation": EMULATION}),
    ("a section without its type", {"trainer": {"emulated": {}}}),
    ("no GPUs to emulate", {"rollout": {**EMULATED_ROLLOUT, "gpusPerReplica": 0}, "emulation": EMULATION}),
    ("no machine", {"rollout": EMULATED_ROLLOUT}),
    ("a machine for nobody", {"emulation": EMULATION}),
]


@pytest.mark.parametrize("parts", [row[1] for row in HALF_EMULATED], ids=[row[0] for row in HALF_EMULATED])
def test_a_job_is_emulated_with_all_that_belongs_to_it_or_not_at_all(parts: dict[str, object]) -> None:
    base = {
        "steps": 1, "model": {"source": "file:m"}, "data": {"train": {"source": "file:d"}},
        "rewards": [{"name": "r", "type": "exact"}],
    }  # fmt: skip
    assert JobSpec.model_validate(base | {"rollout": EMULATED_ROLLOUT, "emulation": EMULATION})
    with pytest.raises(ValidationError, match="emulat"):
        JobSpec.model_validate(base | parts)
