"""Reads the matrices of a checkpoint, quantised or not, as numbers or as codes.

Owns the choice between the two, and the pieces in which a quantised matrix is read, so that little
more than its codes is in memory. Knows no model: names and shapes come from
models.checkpoints.weights and models.checkpoints.expert_reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from models.checkpoints.checkpoint import Checkpoint
from models.quantised.coded import StoredMatrix, stacked
from models.quantised.layouts import ROW_STEP, StoredShape, check_codes, read_rows
from models.quantised.scheme import Quantisation, StoredNames, find_stored

Matrix = Tensor | StoredMatrix

# Numbers unpacked at a time, of which there are a few copies in fp32.
_PIECE_NUMBERS: Final = 1 << 22


class Source(NamedTuple):
    """A matrix in a checkpoint: its name, its rows, and its place if several are in one tensor.

    It may be rows start, start + step, ... of what is stored, up to the last one. is_transposed:
    unless it is quantised, outputs are stored as columns.
    """

    name: str
    num_rows: int
    slice_idx: int | None = None
    start: int = 0
    step: int = 1
    is_transposed: bool = False

    @property
    def num_stored(self) -> int:
        """Return the rows of what is stored."""
        return self.num_rows * self.step

    def of(self, rows: int) -> slice:
        """Return which of so many stored rows, a multiple of `step`, are the matrix's."""
        return slice(self.start, rows, self.step)


class MatrixReader:
    """Reads from one checkpoint onto one device, in one dtype."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantisation: Quantisation | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.checkpoint = checkpoint
        self._quantisation = quantisation
        self._dtype = dtype
        self._device = torch.device(device)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor or a quantised matrix `name`."""
        return name in self.checkpoint or self._stored(name) is not None

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor to read into."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def read(self, sources: Sequence[Source], *columns: int) -> Tensor:
        """Return matrices (or vectors, without `columns`) above one another, dequantised.

        Raises CheckpointError naming a tensor that is missing or has another shape.
        """
        out = self.empty(sum(source.num_rows for source in sources), *columns)
        self.read_into(sources, out)
        return out

    def read_into(self, sources: Sequence[Source], out: Tensor) -> None:
        """Read as read(), into `out`, which may be a view."""
        for _ in self.pieces(sources, out):
            pass

    def pieces(
        self, sources: Sequence[Source], out: Tensor, *, num_numbers: int | None = None
    ) -> Iterator[None]:
        """Read as read_into(), and yield after about each `num_numbers`.

        None: after each matrix, or a quantised one's pieces.
        """
        start = 0
        for source in sources:
            part = out[start : start + source.num_rows]
            start += source.num_rows
            stored = self._stored(source.name)
            if stored is not None:
                yield from self._dequantise(source, stored, part, num_numbers or _PIECE_NUMBERS)
            elif source.step > 1 or (source.is_transposed and part.ndim > 1):
                yield from self._rearrange(source, part, num_numbers or _PIECE_NUMBERS)
            elif num_numbers is None:
                self.checkpoint.read_into(source.name, part, index=source.slice_idx)
                yield
            else:
                width = part[0].numel()
                for rows in _ranges(source.num_rows, width, num_numbers, multiple=1):
                    piece = part[rows.start : rows.stop]
                    self.checkpoint.read_into(source.name, piece, index=source.slice_idx, rows=rows)
                    yield

    def _rearrange(self, source: Source, out: Tensor, num_numbers: int) -> Iterator[None]:
        """Read columns into rows, or rows that do not follow one another."""
        is_transposed = source.is_transposed and out.ndim > 1
        columns = (source.num_stored,) if is_transposed else out.shape[1:]
        count = out.shape[1] if is_transposed else source.num_stored
        width = math.prod(columns)
        for rows in _ranges(count, width, num_numbers, multiple=source.step):
            piece = torch.empty(len(rows), *columns, dtype=self._dtype)
            self.checkpoint.read_into(source.name, piece, index=source.slice_idx, rows=rows)
            if is_transposed:
                out[:, rows.start : rows.stop] = piece[:, source.of(source.num_stored)].t()
            else:
                first, last = rows.start // source.step, rows.stop // source.step
                out[first:last] = piece[source.of(len(rows))]
            yield

    def _dequantise(
        self, source: Source, stored: StoredNames, out: Tensor, num_numbers: int
    ) -> Iterator[None]:
        start = 0
        for piece in self._coded_rows(source, stored, out.shape[1], num_numbers):
            found = piece.dequantised()
            out[start : start + len(found)].copy_(found)
            start += len(found)
            yield

    def _coded_rows(
        self, source: Source, stored: StoredNames, num_in: int, num_numbers: int
    ) -> Iterator[StoredMatrix]:
        """Yield a quantised matrix's rows, about `num_numbers` at a time."""
        shape = StoredShape(source.num_stored, num_in, source.slice_idx)
        check_codes(self.checkpoint, stored, shape)
        for rows in _ranges(source.num_stored, num_in, num_numbers):
            piece = read_rows(self.checkpoint, stored, shape, rows, dtype=self._dtype)
            yield piece if source.step == 1 else piece.rows(source.of(len(rows)))

    def coded(self, sources: Sequence[Source], num_in: int) -> StoredMatrix | None:
        """Return matrices [rows, num_in] above one another as codes, on the device.

        None if one of them is not quantised, or not as the others are.
        """
        pieces = list(self.coded_pieces(sources, num_in))
        if not pieces or any(piece is None for piece in pieces):
            return None
        return stacked([piece for piece in pieces if piece is not None])

    def coded_pieces(
        self, sources: Sequence[Source], num_in: int, *, num_numbers: int = _PIECE_NUMBERS
    ) -> Iterator[StoredMatrix | None]:
        """Yield the codes of about `num_numbers` at a time; one None if they cannot be stacked."""
        found = [self._stored(source.name) for source in sources]
        kinds = {None if each is None else each.scheme.is_float for each in found}
        if len(kinds) != 1 or kinds == {None}:
            yield None
            return
        for source, stored in zip(sources, found, strict=True):
            assert stored is not None
            for piece in self._coded_rows(source, stored, num_in, num_numbers):
                yield piece.to(self._device)

    def read_ahead(self, source: Source) -> None:
        """Start loading the pages of a matrix in the background."""
        stored = self._stored(source.name)
        if stored is None:
            self.checkpoint.read_ahead(source.name, index=source.slice_idx)
            return
        for name in stored.names:
            self.checkpoint.read_ahead(name, index=source.slice_idx)

    def _stored(self, name: str) -> StoredNames | None:
        return find_stored(self.checkpoint.entries, self._quantisation, name)


def _ranges(
    num_rows: int, row_numbers: int, num_numbers: int, *, multiple: int = ROW_STEP
) -> Iterator[range]:
    step = max(num_numbers // row_numbers // multiple, 1) * multiple
    for low in range(0, num_rows, step):
        yield range(low, min(low + step, num_rows))
