"""The torch engine's numerics: against the model's own full forward pass, on tiny random models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from laminar.rollout.decoder import Decoder
from laminar.rollout.engine_messages import Ended, EngineRequest, RequestKey
from laminar.rollout.model import ServedModel, build_model
from laminar.rollout.model_folder import ModelFolderError
from laminar.rollout.sampling import choose, seed_state, uniforms
from laminar.wire.codec import pack_tokens, unpack_logprobs, unpack_tokens

VOCABULARY = 96
EOS = 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": None,
    # Large weights: distributions far from uniform, so that a wrong context shows.
    "initializer_range": 0.3,
}


def save_folder(folder: Path, config: PreTrainedConfig, num_ids: int = VOCABULARY) -> Path:
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_ids)}, "w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=[Qwen2Config, LlamaConfig], ids=["qwen2", "llama"], scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    torch.manual_seed(3)
    folder = save_folder(tmp_path_factory.mktemp("model"), request.param(**SIZES, tie_word_embeddings=True))
    return build_model(folder, slots=4, max_length=128)


def decoder_of(served: ServedModel, eos: frozenset[int] = frozenset({EOS})) -> Decoder:
    return Decoder(served.model, served.cache, eos, served.vocabulary)


def request_of(name: str, prompt: list[int], response: list[int] | None = None, **changes: Any) -> EngineRequest:
    fields: dict[str, Any] = {"max_new_tokens": 24, "seed": sum(name.encode()), "temperature": 0.8} | changes
    return EngineRequest(
        key=RequestKey(name, 1), prompt=pack_tokens(prompt), response=pack_tokens(response or []), **fields
    )


class Collected:
    """Tokens and log-probs by sample, as an agent would hold them."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.ended: dict[str, Ended] = {}

    def run(self, decoder: Decoder, each_step: Callable[[], None] = lambda: None) -> Collected:
        for _ in range(1000):
            if decoder.busy:
                decoder.step()
                each_step()
            blocks, ended = decoder.take_ended()
            for block in [*blocks, *decoder.take_pending()]:
                tokens = self.tokens.setdefault(block.key.sample, [])
                logprobs = self.logprobs.setdefault(block.key.sample, [])
                assert len(logprobs) == len(tokens) or block.offset == len(tokens) or not tokens
                tokens += unpack_tokens(block.tokens)
                logprobs += unpack_logprobs(block.logprobs)
            self.ended |= {item.key.sample: item for item in ended}
            if not decoder.busy:
                return self
        raise AssertionError("the decoder never ends")


def full_forward_logprobs(
    served: ServedModel, prompt: list[int], response: list[int], temperature: float
) -> list[float]:
    with torch.inference_mode():
        logits = served.model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    first = len(prompt) - 1
    return [float(logprobs[first + i, token]) for i, token in enumerate(response)]


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCABULARY, size=int(rng.integers(2, 40))).tolist() for _ in range(count)]


def test_logprobs_of_a_mixed_batch_equal_a_full_forward_pass(served: ServedModel) -> None:
    decoder = decoder_of(served)
    texts = prompts(9)  # more than slots: some wait, rows are compacted, prompts differ in length
    for index, prompt in enumerate(texts):
        decoder.add(request_of(f"s{index}", prompt))
    collected = Collected().run(decoder)
    assert set(collected.ended) == {f"s{index}" for index in range(9)}
    for index, prompt in enumerate(texts):
        response = collected.tokens[f"s{index}"]
        expected = full_forward_logprobs(served, prompt, response, 0.8)
        assert collected.logprobs[f"s{index}"] == pytest.approx(expected, abs=1e-4)
        end = collected.ended[f"s{index}"]
        assert end.length == len(response)
        assert end.reason == ("stop" if response[-1] == EOS else "length")


def test_a_continuation_after_a_move_yields_the_tokens_of_the_undisturbed_run(served: ServedModel) -> None:
    no_end: frozenset[int] = frozenset()
    prompt, whole_run = prompts(1)[0], Collected()
    undisturbed = decoder_of(served, no_end)
    undisturbed.add(request_of("a", prompt, seed=7))
    whole = whole_run.run(undisturbed).tokens["a"]
    moved = decoder_of(served, no_end)
    for index, other in enumerate(prompts(3)):
        moved.add(request_of(f"other{index}", other))
    moved.add(request_of("a", prompt, whole[:10], seed=7))
    collected = Collected().run(moved)
    assert whole[:10] + collected.tokens["a"] == whole
    expected = full_forward_logprobs(served, prompt, whole, 0.8)[10:]
    assert collected.logprobs["a"] == pytest.approx(expected, abs=1e-4)


def test_samples_of_one_prompt_share_the_prefill_and_differ_by_seed(served: ServedModel) -> None:
    decoder = decoder_of(served, frozenset())
    prompt = prompts(1)[0]
    for index in range(4):
        decoder.add(request_of(f"s{index}", prompt, seed=index))
    collected = Collected().run(decoder)
    assert len({tuple(tokens) for tokens in collected.tokens.values()}) == 4
    for tokens, logprobs in zip(collected.tokens.values(), collected.logprobs.values(), strict=True):
        assert logprobs == pytest.approx(full_forward_logprobs(served, prompt, tokens, 0.8), abs=1e-4)


def test_greedy_takes_the_most_likely_token_beside_sampled_rows(served: ServedModel) -> None:
    decoder = decoder_of(served, frozenset())
    prompt = prompts(1)[0]
    decoder.add(request_of("greedy", prompt, greedy=True, max_new_tokens=6))
    decoder.add(request_of("sampled", prompt, max_new_tokens=6))
    tokens = Collected().run(decoder).tokens["greedy"]
    text = list(prompt)
    for token in tokens:
        with torch.inference_mode():
            best = int(served.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
        assert token == best
        text.append(token)


def test_an_aborted_request_says_nothing_more_and_frees_its_slot(served: ServedModel) -> None:
    decoder = decoder_of(served, frozenset())
    for index, prompt in enumerate(prompts(6)):
        decoder.add(request_of(f"s{index}", prompt))
    decoder.step()
    decoder.abort([RequestKey("s1", 1), RequestKey("s5", 1), RequestKey("s2", 9), RequestKey("unknown", 1)])
    assert (decoder.load.running, decoder.load.waiting) == (3, 1)
    decoder.take_pending()
    collected = Collected().run(decoder)
    assert set(collected.ended) == {"s0", "s2", "s3", "s4"}
    assert decoder.load.kv_used_tokens == 0


def test_what_has_nothing_left_to_generate_ends_at_once(served: ServedModel) -> None:
    decoder = decoder_of(served)
    decoder.add(request_of("ended", [5, 6], [7, EOS]))
    decoder.add(request_of("spent", [5, 6], [7, 8], max_new_tokens=2))
    decoder.add(request_of("too-long", [5] * 128))
    decoder.add(request_of("strange", [5, VOCABULARY]))
    reasons = {item.key.sample: (item.reason, item.length) for item in decoder.take_ended()[1]}
    assert reasons == {"ended": ("stop", 2), "spent": ("length", 2), "too-long": ("error", 0), "strange": ("error", 0)}
    assert not decoder.busy


def test_a_response_ends_with_the_context(served: ServedModel) -> None:
    decoder = decoder_of(served, frozenset())
    decoder.add(request_of("long", [5] * 120, max_new_tokens=1000))
    end = Collected().run(decoder).ended["long"]
    assert (end.reason, end.length) == ("length", 8)


def test_uniform_numbers_depend_on_seed_and_position_only_and_are_uniform() -> None:
    states = np.array([seed_state(seed) for seed in range(64)], dtype=np.uint64)
    numbers = np.stack([uniforms(states, np.full(64, position)) for position in range(512)])
    assert numbers[17, 5] == uniforms(states[5:6], np.array([17]))[0]
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = np.bincount((numbers.ravel() * 16).astype(int), minlength=16)
    expected = numbers.size / 16
    # Chi-square with 15 degrees of freedom; 37.7 is exceeded once in a thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.7
    assert abs(float(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1])) < 0.02
    assert abs(float(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1])) < 0.02


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(4, 1)
    draws = torch.tensor([0.0, 0.4999, 0.5, 1 - 2.0**-48], dtype=torch.float64)
    tokens, logprobs = choose(logits, torch.ones(4), draws, None)
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 4)


def test_drawn_frequencies_follow_the_tempered_distribution() -> None:
    logits, temperature, rows = torch.tensor([2.0, 1.0, 0.0, -1.0]), 1.5, 20_000
    states = np.array([seed_state(seed) for seed in range(rows)], dtype=np.uint64)
    draws = torch.from_numpy(uniforms(states, np.zeros(rows, dtype=np.int64)))
    tokens, _ = choose(logits.repeat(rows, 1), torch.full((rows,), temperature), draws, None)
    frequencies = np.bincount(tokens.numpy(), minlength=4) / rows
    assert frequencies.tolist() == pytest.approx(torch.softmax(logits / temperature, -1).tolist(), abs=0.015)


def test_a_folder_whose_tokenizer_makes_more_ids_than_the_model_has_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", LlamaConfig(**SIZES), num_ids=VOCABULARY + 1)
    with pytest.raises(ModelFolderError, match="ids up to 96"):
        build_model(folder, slots=2, max_length=16)


def test_sliding_attention_shorter_than_the_responses_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", MistralConfig(**SIZES, sliding_window=32))
    assert build_model(folder, slots=2, max_length=32).cache.shape.max_length == 32
    with pytest.raises(ModelFolderError, match="sliding attention over 32"):
        build_model(folder, slots=2, max_length=64)


def test_learned_positions_work_too(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=EOS)
    served = build_model(save_folder(tmp_path / "m", config), slots=2, max_length=64)
    decoder = decoder_of(served, frozenset())
    decoder.add(request_of("a", [3, 4, 5], temperature=1.0))
    decoder.add(request_of("b", [3, 4, 5, 6, 7], temperature=1.0))
    collected = Collected().run(decoder)
    for name, prompt in (("a", [3, 4, 5]), ("b", [3, 4, 5, 6, 7])):
        expected = full_forward_logprobs(served, prompt, collected.tokens[name], 1.0)
        assert collected.logprobs[name] == pytest.approx(expected, abs=1e-4)


def test_a_folder_without_an_end_of_sequence_or_of_unknown_type_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", LlamaConfig(**SIZES))
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"eos_token_id": None}))
    with pytest.raises(ModelFolderError, match="eos_token_id"):
        build_model(folder, slots=2, max_length=16)
    (folder / "config.json").write_text(json.dumps(text | {"model_type": "no-such-model"}))
    with pytest.raises(ModelFolderError, match="no-such-model"):
        build_model(folder, slots=2, max_length=16)
