"""Graders as real, killable processes: what hangs, raises or explodes is ungraded, and never 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from laminar.core.grading import HANGS_IN_A_ROW, NUM_TRIES
from laminar.rollout.engine_messages import RequestKey
from laminar.rollout.grader_messages import GraderSetup, GradeTask
from laminar.rollout.grading import GraderPool
from laminar.rollout.rewards import RewardRule
from laminar.shell.process import process_alive
from laminar.wire.codec import pack_tokens
from laminar.wire.dataplane import GradeItem
from laminar.wire.spec import RewardType

EOS, TAG_OPEN, TAG_CLOSE = 0, 1, 2
DEADLINE_S = 60.0
USER_CODE = """
import os, signal, subprocess, sys, time
from pathlib import Path

def length(prompt, response, answer):
    return len(response) / len(answer)

def raises(prompt, response, answer):
    raise KeyError(prompt)

def nan(prompt, response, answer):
    return float("nan")

def dies(prompt, response, answer):
    os._exit(7)

def hangs_with_a_stubborn_child(prompt, response, answer):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(answer).open("a").write(f"{os.getpid()} {child.pid}\\n")
    time.sleep(1000)

def secret(prompt, response, answer):
    return float("LAMINAR_TOKEN" in os.environ)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS, "<answer>": TAG_OPEN, "</answer>": TAG_CLOSE}
    vocabulary |= {piece: index + 3 for index, piece in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<answer>", "</answer>")])
    made.save(str(path))
    return path


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_CODE)
    return path


def python_rule(path: Path, name: str, timeout_s: float = 20.0) -> RewardRule:
    return RewardRule(
        name=name, type=RewardType.PYTHON, weight=1.0, timeout_s=timeout_s, function=f"{path}:{name}"
    )  # fmt: skip


def builtin_rule(kind: RewardType, timeout_s: float = 20.0, **changes: str) -> RewardRule:
    return RewardRule(name="answer", type=kind, weight=2.0, timeout_s=timeout_s, **changes)


def graded(
    tokenizer: Path, rules: Sequence[RewardRule], texts: Sequence[str], answer: str = "8", *, reason: str = "stop"
) -> list[GradeItem]:
    """The verdicts on `texts`, in order; the workers are gone afterwards."""
    encode = Tokenizer.from_file(str(tokenizer)).encode

    async def main() -> list[GradeItem]:
        pool = GraderPool(GraderSetup(rules=list(rules), tokenizer=str(tokenizer), eos_ids=[EOS]))
        for index, text in enumerate(texts):
            tokens = pack_tokens([*encode(text).ids, EOS] if reason == "stop" else encode(text).ids)
            pool.submit(GradeTask(RequestKey(f"s{index}", 1), "the prompt", tokens, answer, reason))
        running = asyncio.create_task(pool.run())
        async with asyncio.timeout(DEADLINE_S):
            items = [await pool.results.get() for _ in texts]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return sorted(items, key=lambda item: item.id)

    return asyncio.run(main())


def test_answers_are_decoded_with_their_special_tokens_and_without_the_end(tokenizer: Path) -> None:
    tagged = builtin_rule(RewardType.EXACT, tag="answer")
    items = graded(tokenizer, [tagged], ["5+3=8;<answer>8</answer>", "<answer>9</answer>", "8"])
    assert [(item.status, item.reward, item.parts) for item in items] == [
        ("ok", 2.0, {"answer": 1.0}), ("ok", 0.0, {"answer": 0.0}), ("ok", 0.0, {"answer": 0.0}),
    ]  # fmt: skip
    whole = builtin_rule(RewardType.EXACT)
    assert graded(tokenizer, [whole], ["8"])[0].reward == 2.0


def test_a_response_without_an_end_of_sequence_is_worth_0(tokenizer: Path, user_file: Path) -> None:
    item = graded(tokenizer, [python_rule(user_file, "raises")], ["8"], reason="length")[0]
    assert (item.status, item.reward, item.parts) == ("ok", 0.0, {"raises": 0.0})


def test_math_compares_values(tokenizer: Path) -> None:
    math = builtin_rule(RewardType.MATH, tag="answer")
    texts = [f"<answer>{value}</answer>" for value in (r"\frac{16}{2}", "8.0", "9", r"\sqrt{64}", "")]
    assert [item.reward for item in graded(tokenizer, [math], texts)] == [2.0, 2.0, 0.0, 2.0, 0.0]


def test_a_python_function_gets_prompt_response_and_answer(tokenizer: Path, user_file: Path) -> None:
    assert graded(tokenizer, [python_rule(user_file, "length")], ["1234"], answer="12345678")[0].reward == 0.5


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("raises", "KeyError"),
        ("nan", "not a finite number"),
        ("dies", "ended before"),
        ("absent", "cannot be imported"),
    ],
)
def test_a_reward_function_that_fails_leaves_the_sample_ungraded(
    tokenizer: Path, user_file: Path, name: str, detail: str
) -> None:
    item = graded(tokenizer, [python_rule(user_file, name)], ["8"])[0]
    assert item.status == "ungraded"
    assert name in item.detail
    assert detail in item.detail


def test_a_hanging_reward_is_killed_with_its_stubborn_children_and_others_are_graded(
    tokenizer: Path, user_file: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    rules = [python_rule(user_file, "hangs_with_a_stubborn_child", timeout_s=1.0)]
    item = graded(tokenizer, rules, ["8"], answer=str(pids))[0]
    assert item.status == "ungraded"
    assert "not done within 1 s" in item.detail
    tries = [[int(pid) for pid in line.split()] for line in pids.read_text().splitlines()]
    assert len(tries) == NUM_TRIES
    assert not [pid for pair in tries for pid in pair if process_alive(pid)]


def test_a_reward_that_always_hangs_soon_costs_one_try_a_response(
    tokenizer: Path, user_file: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    rules = [python_rule(user_file, "hangs_with_a_stubborn_child", timeout_s=0.5)]
    items = graded(tokenizer, rules, ["8"] * 8, answer=str(pids))
    assert {item.status for item in items} == {"ungraded"}
    assert len(pids.read_text().splitlines()) <= 8 + HANGS_IN_A_ROW - 1


def test_a_backtracking_regex_is_cut_off_and_does_not_block_the_next_sample(tokenizer: Path) -> None:
    evil = builtin_rule(RewardType.EXACT, timeout_s=0.5, regex=r"(a+)+$")
    items = graded(tokenizer, [evil], ["a" * 40 + "!", "aa"], answer="aa")
    assert [(item.status, item.reward) for item in items] == [("ungraded", 0.0), ("ok", 2.0)]


def test_a_tower_of_powers_is_cut_off(tokenizer: Path) -> None:
    tower = builtin_rule(RewardType.MATH, timeout_s=1.0, tag="answer")
    items = graded(tokenizer, [tower], ["<answer>9^{9^{9^{9^{9}}}}</answer>", "<answer>8</answer>"])
    # Judged unequal in time, or cut off: in no case is the worker, or the next sample, lost.
    assert items[0].status == "ungraded" or items[0].reward == 0.0
    assert (items[1].status, items[1].reward) == ("ok", 2.0)


def test_user_code_does_not_see_the_jobs_token(
    tokenizer: Path, user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINAR_TOKEN", "secret")
    assert graded(tokenizer, [python_rule(user_file, "secret")], ["8"])[0].reward == 0.0
    assert os.environ["LAMINAR_TOKEN"] == "secret"
