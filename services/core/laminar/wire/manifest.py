"""The immutable description of one version of the weights: tensors, chunks, hashes, digest.

It travels before the bytes; every relay and engine checks what arrives against it. Bytes of all tensors lie in one
buffer, each tensor aligned to 64 bytes; the buffer is cut into equal chunks (the last one may be shorter). The digest
is xxh3-128 over the ordered chunk hashes and the tensor table, so it is known as soon as the last chunk has been
hashed, and the same bytes under other names or shapes have another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import xxhash

from laminar.wire.dataplane import Struct

ALIGNMENT_BYTES = 64
"""A cache line, and enough for every vector load and for torch.frombuffer of any dtype."""
HASH_BYTES = 16
MAX_WEIGHTS_BYTES = 1 << 44
"""16 TiB: more than any model in one relay's memory; a larger announcement is nonsense."""
MAX_CHUNK_BYTES = 1 << 30
MAX_CHUNKS = 1 << 20
MAX_VERSION = (1 << 63) - 1
MAX_DIMENSIONS = 32
"""As many as numpy allows, and few enough to multiply."""
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Names as safetensors writes them."""


class ManifestError(ValueError):
    """A manifest that contradicts itself, or bytes that contradict a manifest."""


class TensorEntry(Struct, frozen=True, kw_only=True):
    """A full tensor under its Hugging Face name, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""
    nbytes: int


class Manifest(Struct, frozen=True, kw_only=True):
    """Tied tensors are listed once. `tensors` are in ascending offset order."""

    job_uid: str
    version: int
    step: int
    attempt: int
    digest: str
    """`digest_of` the chunk hashes and the tensor table."""
    total_bytes: int
    chunk_bytes: int
    chunk_hashes: list[bytes]
    tensors: list[TensorEntry]

    @property
    def num_chunks(self) -> int:
        return -(-self.total_bytes // self.chunk_bytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First byte and the byte after the last of chunk `index`."""
        assert 0 <= index < self.num_chunks, index
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total_bytes)

    def entry(self, name: str) -> TensorEntry:
        """Raises KeyError for a name that is not there."""
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise KeyError(name)


def layout(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorEntry]:
    """Places (name, dtype, shape) in the given order, each at the next multiple of 64 bytes.

    Raises ManifestError for an unknown dtype, a negative dimension or a name that comes twice.
    """
    entries: list[TensorEntry] = []
    names: set[str] = set()
    end = 0
    for name, dtype, shape in tensors:
        if name in names:
            raise ManifestError(f"tensor {name!r} is listed twice (tied tensors are listed once)")
        names.add(name)
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        nbytes = tensor_bytes(name, dtype, shape)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes))
        end = offset + nbytes
    return entries


def layout_bytes(entries: Sequence[TensorEntry]) -> int:
    """Size of the buffer that holds `entries`."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def tensor_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Bytes of one tensor. Raises ManifestError for an unknown dtype or a negative dimension."""
    if dtype not in DTYPE_BYTES:
        raise ManifestError(f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ManifestError(f"tensor {name!r} has {len(shape)} dimensions")
    if any(size < 0 for size in shape):
        raise ManifestError(f"tensor {name!r} has a negative dimension: {tuple(shape)}")
    return DTYPE_BYTES[dtype] * math.prod(shape)


def make_manifest(
    *,
    job_uid: str,
    version: int,
    step: int,
    attempt: int,
    tensors: list[TensorEntry],
    buffer: bytes | bytearray | memoryview,
    chunk_bytes: int = 1 << 20,
) -> Manifest:
    """Hashes `buffer` (as `layout` placed it) chunk by chunk. Raises ManifestError if the parts do not fit together."""
    view = memoryview(buffer).cast("B")
    if chunk_bytes < 1:
        raise ManifestError(f"chunk_bytes must be positive, not {chunk_bytes}")
    hashes = [chunk_hash(view[start : start + chunk_bytes]) for start in range(0, len(view), chunk_bytes)]
    manifest = Manifest(
        job_uid=job_uid, version=version, step=step, attempt=attempt, digest=digest_of(hashes, tensors),
        total_bytes=len(view), chunk_bytes=chunk_bytes, chunk_hashes=hashes, tensors=tensors,
    )  # fmt: skip
    check_manifest(manifest)
    return manifest


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """xxh3-128 of one chunk, 16 bytes."""
    return xxhash.xxh3_128_digest(chunk)


ChunkHash = xxhash.xxh3_128
"""`chunk_hash` of a chunk that comes in parts: `update` each, then `digest`."""


def digest_of(chunk_hashes: Iterable[bytes], tensors: Sequence[TensorEntry]) -> str:
    """The version's digest: xxh3-128 over the chunk hashes in order and what the tensors are called and look like."""
    state = xxhash.xxh3_128()
    for each in chunk_hashes:
        state.update(each)
    for entry in tensors:
        state.update(f"\0{entry.name}\0{entry.dtype}\0{entry.shape}\0{entry.offset}".encode())
    return state.hexdigest()


def verify_chunk(manifest: Manifest, index: int, chunk: bytes | memoryview) -> None:
    """Raises ManifestError unless `chunk` is chunk `index` of the version, byte for byte."""
    start, end = manifest.chunk_range(index)
    if len(chunk) != end - start:
        raise ManifestError(f"chunk {index} of version {manifest.version} has {len(chunk)} bytes, not {end - start}")
    verify_hash(manifest, index, chunk_hash(chunk))


def verify_hash(manifest: Manifest, index: int, found: bytes) -> None:
    """Raises ManifestError unless `found` is the announced hash of chunk `index`."""
    if found != manifest.chunk_hashes[index]:
        raise ManifestError(f"chunk {index} of version {manifest.version} does not have the announced hash")


def check_manifest(manifest: Manifest) -> None:
    """Raises ManifestError unless sizes, counts, tensor table and digest agree. Cheap: no weights are read."""
    who = f"manifest of version {manifest.version}"
    _check_sizes(who, manifest)
    if digest_of(manifest.chunk_hashes, manifest.tensors) != manifest.digest:
        raise ManifestError(f"{who}: the digest is not that of the chunk hashes and the tensors")
    end = 0
    names: set[str] = set()
    for entry in manifest.tensors:
        if entry.nbytes != tensor_bytes(entry.name, entry.dtype, entry.shape):
            raise ManifestError(f"{who}: tensor {entry.name!r} has {entry.nbytes} bytes, not those of its shape")
        if entry.offset < end or entry.offset % ALIGNMENT_BYTES or entry.name in names:
            raise ManifestError(f"{who}: tensor {entry.name!r} overlaps, is not aligned, or is listed twice")
        names.add(entry.name)
        end = entry.offset + entry.nbytes
    if end > manifest.total_bytes:
        raise ManifestError(f"{who}: its tensors end at byte {end} of {manifest.total_bytes}")


def _check_sizes(who: str, manifest: Manifest) -> None:
    if not 0 <= manifest.version <= MAX_VERSION:
        raise ManifestError(f"{who}: there is no such version")
    if not 1 <= manifest.total_bytes <= MAX_WEIGHTS_BYTES:
        raise ManifestError(f"{who}: total_bytes is {manifest.total_bytes}")
    if not 1 <= manifest.chunk_bytes <= MAX_CHUNK_BYTES or manifest.num_chunks > MAX_CHUNKS:
        raise ManifestError(f"{who}: chunk_bytes is {manifest.chunk_bytes} for {manifest.total_bytes} bytes")
    if len(manifest.chunk_hashes) != manifest.num_chunks:
        raise ManifestError(f"{who}: {len(manifest.chunk_hashes)} chunk hashes for {manifest.num_chunks} chunks")
    if any(len(item) != HASH_BYTES for item in manifest.chunk_hashes):
        raise ManifestError(f"{who}: a chunk hash is not {HASH_BYTES} bytes long")
