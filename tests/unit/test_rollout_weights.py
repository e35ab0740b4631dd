"""New weights: all or nothing until the first overwritten tensor, and honest after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.rollout.weights import TornLoad, UnfitVersion, WeightLoader
from laminar.shell.handoff import SlotReused
from laminar.wire.manifest import Manifest, layout, make_manifest


def model_of(seed: int, *, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tensors_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Tied tensors once, as a trainer hands them over."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Version:
    """A version in memory as a relay would map it; `check` fails from the n-th call on if told so."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: str = "F32", fails_at: int = 0) -> None:
        kind = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
        entries = layout([(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
        buffer = bytearray(max(entry.offset + entry.nbytes for entry in entries))
        for entry in entries:
            data = tensors[entry.name].to(kind).contiguous().view(torch.uint8).numpy().tobytes()
            buffer[entry.offset : entry.offset + entry.nbytes] = data
        self.manifest: Manifest = make_manifest(
            job_uid="u", version=1, step=0, attempt=1, tensors=entries, buffer=buffer
        )
        self._memory = memoryview(bytes(buffer))
        self._checks_left = fails_at or 10**6

    def tensor(self, name: str) -> memoryview:
        entry = self.manifest.entry(name)
        return self._memory[entry.offset : entry.offset + entry.nbytes]

    def check(self) -> None:
        self._checks_left -= 1
        if self._checks_left <= 0:
            raise SlotReused("the slot was taken")


def load(model: LlamaForCausalLM, version: Version) -> int:
    return WeightLoader(model).load(version.manifest.tensors, version)


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_version_replaces_every_tensor(tied: bool) -> None:
    live, published = model_of(1, tied=tied), model_of(2, tied=tied)
    loaded_bytes = load(live, Version(tensors_of(published)))
    assert loaded_bytes == 4 * sum(parameter.numel() for parameter in published.parameters())
    tokens = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(live(input_ids=tokens).logits, published(input_ids=tokens).logits)
    assert (live.lm_head.weight is live.model.embed_tokens.weight) is tied


def test_a_tied_tensor_may_come_under_either_of_its_names() -> None:
    live, published = model_of(1), model_of(2)
    tensors = tensors_of(published)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    load(live, Version(tensors))
    assert torch.equal(live.model.embed_tokens.weight, published.model.embed_tokens.weight)


def test_a_bf16_version_is_widened() -> None:
    live, published = model_of(1), model_of(2)
    load(live, Version(tensors_of(published), dtype="BF16"))
    assert live.model.norm.weight.dtype == torch.float32
    assert torch.equal(live.lm_head.weight, published.lm_head.weight.bfloat16().float())


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def set_to(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("model.norm.weight"), "1 parameters are not in the version: model.norm.weight"),
        (set_to("model.extra.weight", torch.zeros(3)), "no tensor model.extra.weight"),
        (set_to("model.norm.weight", torch.zeros(17)), r"model.norm.weight has shape \[17\]"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_version_that_does_not_fit_is_refused_and_nothing_is_overwritten(
    change: Callable[[dict[str, torch.Tensor]], None], reason: str
) -> None:
    live, tensors = model_of(1), tensors_of(model_of(2))
    change(tensors)
    with pytest.raises(UnfitVersion, match=reason):
        load(live, Version(tensors))
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), model_of(1).parameters(), strict=True))


def test_a_slot_that_was_taken_before_the_copy_leaves_the_old_weights() -> None:
    live = model_of(1)
    with pytest.raises(SlotReused):
        load(live, Version(tensors_of(model_of(2)), fails_at=1))
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), model_of(1).parameters(), strict=True))


def test_a_slot_that_was_taken_during_the_copy_is_a_torn_load_until_a_whole_version_comes() -> None:
    live, published = model_of(1), model_of(2)
    with pytest.raises(TornLoad, match="the slot was taken"):
        load(live, Version(tensors_of(published), fails_at=2))
    load(live, Version(tensors_of(published)))
    assert all(torch.equal(a, b) for a, b in zip(live.parameters(), published.parameters(), strict=True))
