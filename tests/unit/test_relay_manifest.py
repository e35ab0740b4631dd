"""Manifests: layout, hashes, and what is refused."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.wire.codec import decode, encode
from laminar.wire.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    ManifestError,
    check_manifest,
    chunk_hash,
    digest_of,
    layout,
    layout_bytes,
    make_manifest,
    verify_chunk,
)

SHAPES = st.lists(
    st.tuples(st.sampled_from(["F32", "BF16", "I64", "BOOL"]), st.lists(st.integers(0, 9), max_size=3)), max_size=12
)


def manifest(size: int = 10_000, chunk: int = 4096) -> tuple[Manifest, bytearray]:
    entries = layout([("w", "F32", (10, 20)), ("b", "BF16", (3,)), ("scalar", "F32", ())])
    buffer = bytearray(random.Random(size).randbytes(size))
    made = make_manifest(
        job_uid="uid", version=3, step=2, attempt=1, tensors=entries, buffer=buffer, chunk_bytes=chunk
    )  # fmt: skip
    return made, buffer


@given(SHAPES)
def test_tensors_are_aligned_in_order_and_do_not_overlap(shapes: list[tuple[str, list[int]]]) -> None:
    entries = layout([(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes)])
    end = 0
    for entry in entries:
        assert entry.offset % ALIGNMENT_BYTES == 0
        assert end <= entry.offset < end + ALIGNMENT_BYTES
        end = entry.offset + entry.nbytes
    assert layout_bytes(entries) == end


def test_a_scalar_has_one_element() -> None:
    assert layout([("scale", "F32", ())])[0].nbytes == 4


def test_a_manifest_survives_the_wire() -> None:
    made, _ = manifest()
    again = decode(encode(made), Manifest)
    assert again == made
    check_manifest(again)


def test_the_digest_is_that_of_the_ordered_chunk_hashes() -> None:
    made, buffer = manifest(10_000, 4096)
    hashes = [chunk_hash(bytes(buffer[i : i + 4096])) for i in (0, 4096, 8192)]
    assert made.digest == digest_of(hashes, made.tensors)
    assert made.digest != digest_of(reversed(hashes), made.tensors)
    assert made.chunk_range(2) == (8192, 10_000)


def test_each_chunk_verifies_and_one_changed_byte_is_found() -> None:
    made, buffer = manifest()
    for index in range(made.num_chunks):
        start, end = made.chunk_range(index)
        verify_chunk(made, index, memoryview(buffer)[start:end])
    buffer[5000] ^= 1
    with pytest.raises(ManifestError, match="chunk 1"):
        verify_chunk(made, 1, memoryview(buffer)[4096:8192])
    with pytest.raises(ManifestError, match="bytes"):
        verify_chunk(made, 2, memoryview(buffer)[8192:9000])


def test_a_tensor_listed_twice_or_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ManifestError, match="twice"):
        layout([("w", "F32", (1,)), ("w", "F32", (1,))])
    with pytest.raises(ManifestError, match="'F33'"):
        layout([("w", "F33", (1,))])


@pytest.mark.parametrize(
    "change",
    [
        {"total_bytes": 0},
        {"total_bytes": 1 << 50},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
        {"total_bytes": 100},
        {"digest": "0" * 32},
        {"chunk_hashes": []},
        {"chunk_hashes": [b"short", b"", b""]},
        {"tensors": layout([("w", "F32", (100_000,))])},
        {"tensors": layout([("w", "F32", (10,))]) * 2},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    made, _ = manifest()
    with pytest.raises(ManifestError):
        check_manifest(msgspec.structs.replace(made, **change))


def test_the_same_bytes_under_other_names_shapes_or_dtypes_have_another_digest() -> None:
    tables = [[("a", "F32", (4, 2))], [("b", "F32", (4, 2))], [("a", "F32", (2, 4))], [("a", "I32", (4, 2))]]
    digests = {
        make_manifest(job_uid="u", version=1, step=1, attempt=1, tensors=layout(table), buffer=bytes(32)).digest
        for table in tables
    }
    assert len(digests) == len(tables)
