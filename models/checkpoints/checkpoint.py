"""Reading tensors out of a checkpoint directory without holding its pages.

Owns memory-mapped reading of single and sharded safetensors, and of a GGUF file, directly into the
caller's buffers, with conversion, and the bound on how many mapped bytes stay resident. Knows no
model: names and shapes come from models.checkpoints.weights. One thread at a time.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoints.checkpoint_index import CheckpointIndex, TensorEntry, read_index
from models.checkpoints.fingerprint import digests_of, fingerprint_of
from topspin.errors import CheckpointError

_FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Reading through a mapping makes its pages resident; the file is unmapped after this many
# bytes, so that loading needs the weights plus this (or one tensor, if that is larger).
_RELEASE_AFTER_BYTES = 32 * 2**20


class Checkpoint:
    """A checkpoint directory open for reading; a context manager.

    Nothing is mapped until the first read. `tensors_read` records every name that was read, in part
    or whole, so a role can show that it read only its tensors.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers. Raises CheckpointError naming the file or tensor at fault."""
        self.path = Path(path)
        self._index: CheckpointIndex = read_index(self.path)
        self._handle: Any = None
        self._handle_file: Path | None = None
        self._mapped_bytes = 0
        self._tensors_read: set[str] = set()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the open file; the checkpoint can still be read afterwards."""
        self._handle = None
        self._handle_file = None
        self._mapped_bytes = 0

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._index.tensors)

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors' dtypes, shapes and places, by name."""
        return self._index.tensors

    @property
    def tensors_read(self) -> frozenset[str]:
        """Names of the tensors read so far."""
        return frozenset(self._tensors_read)

    def __contains__(self, name: str) -> bool:
        return name in self._index.tensors

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The digest of each file by name, which covers a sample of every tensor's bytes.

        Raises CheckpointError if a file cannot be read.
        """
        return digests_of(self._index)

    def fingerprint(self) -> str:
        """Return the hex SHA-256 of all digests, equal for equal checkpoints on any host."""
        return fingerprint_of(self.digests)

    def check_unchanged(self) -> None:
        """Raise CheckpointError naming a file whose digest has changed since the first call of
        `digests`, or which cannot be read any more; a file that was copied or touched may stay.
        """
        before = self.digests
        if self._index.is_untouched():
            return
        now = digests_of(read_index(self.path))
        changed = sorted(name for name in before if now.get(name) != before[name])
        if changed or len(now) > len(before):
            raise CheckpointError(
                f"{self.path}: {', '.join(changed or now)}: replaced since this process began to "
                "read it; have every node of the engine start anew"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`. Raises CheckpointError if there is none."""
        return self._entry(name).shape

    def read(self, name: str) -> Tensor:
        """Return a copy of tensor `name` in its stored dtype, contiguous, on the CPU.

        Raises CheckpointError if it is missing, unreadable, or not float32/bfloat16/float16.
        """
        entry = self._readable(name)
        out = torch.empty(entry.shape, dtype=_FLOAT_DTYPES[entry.dtype])
        self.read_into(name, out)
        return out

    def read_into(
        self, name: str, out: Tensor, *, index: int | None = None, rows: range | None = None
    ) -> None:
        """Copy tensor `name`, or its slice `index` of dimension 0, into `out`.

        With `rows` (a range of step 1) only these rows, of the tensor or of the slice. `out`
        may be a view into a larger buffer, of any float dtype and on any device. Raises
        CheckpointError if the tensor is missing, unreadable, or of another shape.
        """
        entry = self._readable(name)
        expected = entry.shape if index is None else entry.shape[1:]
        if rows is not None and rows.stop <= expected[0]:
            expected = (len(rows), *expected[1:])
        if tuple(out.shape) != expected:
            raise _shape_error(name, entry, expected, out.shape)
        where: list[int | slice] = [] if index is None else [index]
        if rows is not None:
            where.append(slice(rows.start, rows.stop))
        # A view keeps its file mapped, so it is freed before the file is closed.
        out.copy_(self._view(name, entry, where))
        self._release()

    def read_raw(
        self,
        name: str,
        dtypes: Sequence[str],
        *,
        index: int | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return a copy of tensor `name` in its stored dtype, one of `dtypes` ("I32").

        Blocks of a GGUF file ("Q8_0") are u8, all those of a row one behind the other.
        `index` and `rows` as in read_into; `columns`, without these, is a range of dimension 1.
        Raises CheckpointError if the tensor is missing, unreadable, or of another dtype.
        """
        entry = self._entry(name)
        if entry.dtype not in dtypes:
            raise _dtype_error(name, entry, dtypes)
        where: list[int | slice] = [] if index is None else [index]
        if rows is not None:
            where.append(slice(rows.start, rows.stop))
        if columns is not None:
            where += [slice(None), slice(columns.start, columns.stop)]
        found = self._view(name, entry, where).clone()
        self._release()
        return found

    def _view(self, name: str, entry: TensorEntry, where: Sequence[int | slice]) -> Tensor:
        """Return a part of a tensor in the mapped file; the caller calls _release afterwards."""
        self._tensors_read.add(name)
        if self._index.is_gguf:
            return _mapped(entry)[tuple(where)]
        handle = self._open(entry.file)
        try:
            found: Tensor
            if where:
                found = handle.get_slice(name)[tuple(where)]
            else:
                found = handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{entry.file}: tensor {name}: {error}") from error
        self._mapped_bytes += found.nbytes
        return found

    def _release(self) -> None:
        if self._mapped_bytes >= _RELEASE_AFTER_BYTES:
            self.close()

    def read_ahead(self, name: str, *, index: int | None = None) -> None:
        """Ask the system to load tensor `name`, or its slice `index`, into memory soon.

        Returns at once, at the cost of the request only; reading works without it too.
        """
        entry = self._entry(name)
        offset, size = entry.offset_bytes, entry.size_bytes
        if index is not None:
            size //= entry.shape[0]
            offset += index * size
        try:
            descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: cannot be read: {error}") from error
        try:
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def expect_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError unless tensor `name` exists with `shape`; reads nothing."""
        entry = self._entry(name)
        if entry.shape != tuple(shape):
            raise _shape_error(name, entry, entry.shape, shape)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._index.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return entry

    def _readable(self, name: str) -> TensorEntry:
        entry = self._entry(name)
        if entry.dtype not in _FLOAT_DTYPES:
            raise _dtype_error(name, entry, tuple(_FLOAT_DTYPES))
        return entry

    def _open(self, file: Path) -> Any:
        """Return the handle of `file`; only one file is mapped at a time."""
        if self._handle_file != file:
            self.close()
            try:
                self._handle = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error
            self._handle_file = file
        return self._handle


def _mapped(entry: TensorEntry) -> Tensor:
    """Return a tensor as it lies in its file, mapped while the result lives; blocks as bytes."""
    first = entry.offset_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    before = entry.offset_bytes - first
    try:
        with entry.file.open("rb") as stream:
            # A private mapping: torch takes no buffer that it could not write to.
            pages = mmap.mmap(
                stream.fileno(), before + entry.size_bytes, access=mmap.ACCESS_COPY, offset=first
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{entry.file}: cannot be read: {error}") from error
    found = torch.frombuffer(pages, dtype=torch.uint8, count=entry.size_bytes, offset=before)
    dtype = _FLOAT_DTYPES.get(entry.dtype)
    if dtype is not None:
        return found.view(dtype).view(entry.shape)
    rows = math.prod(entry.shape[:-1])
    return found.view(*entry.shape[:-1], entry.size_bytes // rows)


def _dtype_error(name: str, entry: TensorEntry, supported: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{entry.file}: tensor {name} is {entry.dtype}; supported: {', '.join(supported)}"
    )


def _shape_error(
    name: str, entry: TensorEntry, found: Sequence[int], needed: Sequence[int]
) -> CheckpointError:
    return CheckpointError(
        f"{entry.file}: tensor {name} has shape {list(found)}, "
        f"the model's configuration needs {list(needed)}"
    )
