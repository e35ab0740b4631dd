"""Round trips of the wire: identities, arrays, messages, and every spec through its file form."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.core.identity import GroupKey, SampleKey
from laminar.wire import codec
from laminar.wire.dataplane import (
    AppendItem,
    Command,
    CommandKind,
    GroupGrant,
    ProgressCall,
    SampleGrant,
    SegmentKind,
)

# A host under load is slow, which is not what these properties are about.
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
int32 = st.integers(-(2**31), 2**31 - 1)
small = st.integers(0, 10**9)


@relaxed
@given(st.lists(int32))
def test_tokens_survive_the_round_trip(tokens: list[int]) -> None:
    packed = codec.pack_tokens(tokens)
    assert codec.unpack_tokens(packed) == tokens
    assert codec.num_items(packed) == len(tokens)


@relaxed
@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_survive_the_round_trip(logprobs: list[float]) -> None:
    assert codec.unpack_logprobs(codec.pack_logprobs(logprobs)) == logprobs


def test_the_byte_order_is_little_endian_on_every_machine() -> None:
    assert codec.pack_tokens([1, -2]) == bytes([1, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF])
    assert codec.pack_logprobs([-1.0]) == bytes([0, 0, 0x80, 0xBF])


def test_tokens_that_do_not_fit_and_cut_arrays_are_refused() -> None:
    with pytest.raises(OverflowError):
        codec.pack_tokens([2**31])
    with pytest.raises(ValueError):
        codec.unpack_tokens(b"123")


@relaxed
@given(small, small, small)
def test_identities_survive_the_round_trip(pass_: int, prompt: int, index: int) -> None:
    key = SampleKey(GroupKey(pass_, prompt), index)
    assert SampleKey.parse(str(key)) == key
    assert GroupKey.parse(str(key.group)) == key.group


@pytest.mark.parametrize("text", ["", "1", "1/", "/1", "a/b", "1/2/3"])
def test_what_is_no_group_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        GroupKey.parse(text)


appends = st.builds(
    AppendItem, id=st.text(), term=small, offset=small, tokens=st.binary(), logprobs=st.binary(),
    kind=st.sampled_from(SegmentKind),
)  # fmt: skip
grants = st.builds(
    GroupGrant, group=st.text(), prompt_tokens=st.binary(), prompt_text=st.text(), answer=st.text(),
    samples=st.lists(st.builds(SampleGrant, id=st.text(), index=small, term=small, seed=small, max_new_tokens=small)),
)  # fmt: skip


@relaxed
@given(st.builds(ProgressCall, slot=st.text(), incarnation=small, appends=st.lists(appends, max_size=3)))
def test_progress_survives_the_round_trip(call: ProgressCall) -> None:
    assert codec.decode(codec.encode(call), ProgressCall) == call


@relaxed
@given(st.builds(Command, kind=st.sampled_from(CommandKind), groups=st.lists(grants, max_size=3)))
def test_a_frame_is_its_length_and_its_message(command: Command) -> None:
    framed = codec.frame(command)
    assert int.from_bytes(framed[:4], "little") == len(framed) - 4
    assert codec.decode(framed[4:], Command) == command


def test_fields_of_a_newer_peer_are_ignored_and_missing_ones_are_named() -> None:
    newer = msgspec.msgpack.encode({"kind": "ping", "colour": "green"})
    assert codec.decode(newer, Command) == Command(kind=CommandKind.PING)
    with pytest.raises(msgspec.ValidationError, match="slot"):
        codec.decode(msgspec.msgpack.encode({}), ProgressCall)


@relaxed
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    try:
        assert isinstance(codec.decode(data, Command), Command)
    except msgspec.DecodeError:
        return
