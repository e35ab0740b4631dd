"""What a grader's process does. The agent kills it when it takes too long.

Nothing here limits time: the wall clock is watched from outside, by a process that no reward can block.
"""

from __future__ import annotations

import importlib.util
import logging
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer

from laminar.rollout.channel import BlockingChannel, ChannelClosed
from laminar.rollout.grader_messages import GradeAnswer, GradeCall, GraderCommand, GraderReady, GraderSetup
from laminar.rollout.rewards import RewardRule, checked, exact, extract
from laminar.wire.codec import unpack_tokens
from laminar.wire.spec import RewardType

_DATA_LIMIT_BYTES = 4 * 2**30
"""A tower of powers becomes a MemoryError here before it starves the machine; math-verify needs 0.1 GB."""
_ERROR_CHARS = 500

Grade = Callable[[str, str, str], float]
"""(prompt, the part of the response, answer) -> value."""


class _Rules:
    """The job's rules, with what they need already imported. What cannot be imported fails when it is used."""

    def __init__(self, setup: GraderSetup) -> None:
        self._tokenizer = Tokenizer.from_file(setup.tokenizer)
        self._eos_ids = frozenset(setup.eos_ids)
        self._rules = [(rule, _grade_of(rule)) for rule in setup.rules]

    def apply(self, call: GradeCall) -> GradeAnswer:
        rule, grade = self._rules[call.rule]
        try:
            part = extract(rule, self._decode(call.tokens))
            return GradeAnswer(value=0.0 if part is None else grade(call.prompt, part, call.answer))
        # The user's function may raise anything; it becomes an answer, and the response is not graded.
        except Exception as error:  # noqa: BLE001
            return GradeAnswer(error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS])

    def _decode(self, data: bytes) -> str:
        """The response's text, special tokens kept (an answer's tags may be some), its own end taken off."""
        tokens = unpack_tokens(data)
        if tokens and tokens[-1] in self._eos_ids:
            tokens.pop()
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _grade_of(rule: RewardRule) -> Grade:
    match rule.type:
        case RewardType.EXACT:
            return lambda prompt, part, answer: exact(part, answer)
        case RewardType.MATH:
            return _math_grade()
        case RewardType.PYTHON:
            return _python_grade(rule.function)


def _math_grade() -> Grade:
    import math_verify  # half a second that only jobs with this reward pay

    # Its annotations leave out that None switches its own timer off; that one works in main threads only.
    parse, verify = cast(Any, math_verify.parse), cast(Any, math_verify.verify)

    # It warns of that at each call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parsed(text: str) -> Any:
        # A bare formula is LaTeX without its dollars.
        return parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)

    def grade(prompt: str, part: str, answer: str) -> float:
        gold = parsed(answer)
        if not gold:
            raise ValueError(f"the reference answer {answer!r} is no mathematical value")
        return float(verify(gold, parsed(part), timeout_seconds=None))

    return grade


def _python_grade(function: str) -> Grade:
    path, _, name = function.rpartition(":")
    try:
        found = _import_function(Path(path), name)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        failure = f"{function} cannot be imported: {type(error).__name__}: {error}"

        def fail(prompt: str, part: str, answer: str) -> float:
            raise RuntimeError(failure)

        return fail
    return lambda prompt, part, answer: checked(found(prompt=prompt, response=part, answer=answer))


def _import_function(path: Path, name: str) -> Callable[..., object]:
    spec = importlib.util.spec_from_file_location(f"laminar_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Its neighbours in the folder can be imported, as when it is run as a script.
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return getattr(module, name)


def serve(descriptor: int) -> int:
    """Grades what the agent sends until it closes the channel; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_LIMIT_BYTES, _DATA_LIMIT_BYTES))
    # A user's function that crashes the interpreter would leave a core file for each response.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder: msgspec.msgpack.Decoder[GraderCommand] = msgspec.msgpack.Decoder(GraderCommand)
    channel = BlockingChannel[GraderCommand].inherited(descriptor, decoder)
    try:
        setup = channel.receive()
        assert isinstance(setup, GraderSetup), setup
        rules = _Rules(setup)
        channel.send(GraderReady())
        while True:
            call = channel.receive()
            assert isinstance(call, GradeCall), call
            channel.send(rules.apply(call))
    except ChannelClosed:
        return 0
