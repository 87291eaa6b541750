"""The fingerprint of a checkpoint, made cheaply: a digest of each of its files.

Owns the choice of the bytes that are read: config.json and the headers whole, and a sample of every
tensor, so that a fine-tune of the same shapes differs wherever its files were copied to. Knows no
node. Called by models.checkpoints.checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from models.checkpoints.checkpoint_index import CheckpointIndex, TensorEntry
from topspin.errors import CheckpointError

# Norms, biases and scales, which a fine-tune may change alone, are read whole.
WHOLE_BYTES = 16 * 2**10
BLOCK_BYTES = 2**10
# Larger tensors have blocks at both ends and between, and more of them: they may hold many experts.
NUM_BLOCKS = 4
STRIDE_BYTES = 16 * 2**20


def digests_of(index: CheckpointIndex) -> dict[str, str]:
    """Return the hex digest of each file by name; raises CheckpointError if one cannot be read."""
    blocks: dict[Path, list[tuple[int, int]]] = {file: [] for file in index.headers}
    for entry in index.tensors.values():
        blocks[entry.file] += sampled(entry)
    found = {}
    for file, header in index.headers.items():
        digest = hashlib.sha256(header)
        if blocks[file]:
            _read(file, sorted(blocks[file]), digest)
        found[file.name] = digest.hexdigest()
    return found


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """Return the hex SHA-256 of the digests and names of all files."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def sampled(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the offsets in the file, and the sizes, of the blocks of a tensor that are read."""
    size = entry.size_bytes
    if size <= WHOLE_BYTES:
        yield entry.offset_bytes, size
        return
    last = NUM_BLOCKS + size // STRIDE_BYTES - 1
    for idx in range(last + 1):
        yield entry.offset_bytes + idx * (size - BLOCK_BYTES) // last, BLOCK_BYTES


def _read(file: Path, blocks: list[tuple[int, int]], digest: hashlib._Hash) -> None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Asked for at once, so that a disk or a network serves many blocks at a time.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for offset, size in blocks:
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
            for offset, size in blocks:
                digest.update(os.pread(descriptor, size, offset))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
