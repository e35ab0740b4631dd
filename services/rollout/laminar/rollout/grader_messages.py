"""What the agent and a grader's worker process say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.rollout.engine_messages import RequestKey, Tagged
from laminar.rollout.rewards import RewardRule


class GraderSetup(Tagged, frozen=True, kw_only=True):
    """First message. Answered by GraderReady once everything slow is imported."""

    rules: list[RewardRule]
    tokenizer: str
    """Path of tokenizer.json."""
    eos_ids: list[int]


class GradeCall(Tagged, frozen=True, kw_only=True):
    """One rule on one response. Answered by GradeAnswer."""

    rule: int
    prompt: str
    tokens: bytes
    answer: str


GraderCommand = GraderSetup | GradeCall


class GraderReady(Tagged, frozen=True):
    pass


class GradeAnswer(Tagged, frozen=True, kw_only=True):
    """`error` not empty: the rule could not be applied (its function raised, say)."""

    value: float = 0.0
    error: str = ""


GraderEvent = GraderReady | GradeAnswer


@dataclass(slots=True)
class GradeTask:
    """A finished response to grade, and how far that is."""

    key: RequestKey
    prompt: str
    tokens: bytes
    answer: str
    finish_reason: str
    parts: dict[str, float] = field(default_factory=dict[str, float])
    failures: list[str] = field(default_factory=list[str])
