"""What a reward is: where the answer stands in a response, how it compares, and how the parts add up.

Pure functions; they run in the killable worker (a regular expression can backtrack for ever).
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from laminar.wire.spec import Reward, RewardType


class RewardRule(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the job's rewards."""

    name: str
    type: RewardType
    weight: float
    timeout_s: float
    tag: str = ""
    regex: str = ""
    function: str = ""
    """`/folder/file.py:name`."""


def rule_of(reward: Reward) -> RewardRule:
    """From the job's spec."""
    extract = reward.extract
    return RewardRule(
        name=reward.name,
        type=reward.type,
        weight=reward.weight,
        timeout_s=reward.timeout_seconds,
        tag=(extract.tag if extract else None) or "",
        regex=(extract.regex if extract else None) or "",
        function=reward.function or "",
    )


def extract(rule: RewardRule, text: str) -> str | None:
    """The part of a response that the rule looks at; None where it is not there."""
    if rule.tag:
        return extract_tag(text, rule.tag)
    return extract_regex(text, rule.regex) if rule.regex else text


def extract_tag(text: str, tag: str) -> str | None:
    """The text between the last `<tag>` and the `</tag>` behind it."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    begin = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[begin + len(opening) : end] if begin >= 0 else None


def extract_regex(text: str, pattern: str) -> str | None:
    """The first group of the last match, else that match; None without a match."""
    matches = deque(re.finditer(pattern, text), maxlen=1)
    if not matches:
        return None
    last = matches[0]
    return last.group(1) if last.re.groups else last.group()


def exact(candidate: str, answer: str) -> float:
    """1 for equal text, white space around it aside."""
    return float(candidate.strip() == answer.strip())


def checked(value: object) -> float:
    """A reward function's value as a number. Raises ValueError for what is none, or not finite."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"the reward function returned {value!r}, which is not a finite number")
    return float(value)


def combined(rules: Sequence[RewardRule], parts: Mapping[str, float]) -> float:
    """The weighted sum of all parts."""
    return sum(rule.weight * parts[rule.name] for rule in rules)
