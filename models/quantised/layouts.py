"""Unpacks rows of a quantised matrix from the tensors of a checkpoint.

Owns the layouts: plain codes, compressed-tensors' words, GPTQ's and AWQ's (both of the transposed
matrix), mxfp4's and nvfp4's pairs, and the reading of GGUF's blocks, which
models.quantised.gguf_blocks unpacks. Reads the tensors of the asked rows only. Knows no model and
no destination. Called by models.quantised.matrices.

Sources: compressed-tensors (compressors; its converter of ModelOpt's nvfp4), AutoGPTQ
(qlinear_cuda_old), AutoAWQ (gemm), DeepSeek-V3's description of its weights, and the OCP
microscaling specification 1.0 (mxfp4).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from models.checkpoints.checkpoint import Checkpoint
from models.quantised.coded import StoredMatrix
from models.quantised.gguf_blocks import LAYOUTS, e2m1_scales, unpack
from models.quantised.scheme import GGUF_SCHEMES, Scheme, StoredNames
from topspin.errors import CheckpointError
from topspin.plan.precision import E2M1_INTEGERS, E2M1_ZERO, MXFP4_GROUP

ROW_STEP: Final = 32
"""Rows are read from a multiple of this, so that no word is divided."""
_WORD_BITS: Final = 32
_WIDE: Final = ("F32", "BF16", "F16", "F8_E8M0")
_PACKED: Final = ("I32",)
_PAIRS: Final = ("U8",)
# The place of each output of eight in a word of AWQ.
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class StoredShape(NamedTuple):
    """A matrix's outputs and inputs, and its place in a tensor of several; None: it is alone."""

    num_out: int
    num_in: int
    slice_idx: int | None = None


def check_codes(checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape) -> None:
    """Raise CheckpointError unless the codes' tensor has the size of a matrix of `shape`."""
    bits, layout = stored.scheme.bits, stored.scheme.layout
    num_out, num_in, slice_idx = shape
    sizes: dict[str, tuple[int, ...]] = {
        "plain": (num_out, num_in),
        "packed": (num_out, -(-num_in * bits // _WORD_BITS)),
        "gptq": (num_in * bits // _WORD_BITS, num_out),
        "awq": (num_in, num_out * bits // _WORD_BITS),
        "mxfp4": (num_out, -(-num_in // MXFP4_GROUP), MXFP4_GROUP // 2),
        "nvfp4": (num_out, -(-num_in // 2)),
    }
    expected = sizes.get(layout, (num_out, num_in))
    if slice_idx is not None:
        expected = (checkpoint.shape(stored.codes)[0], *expected)
    checkpoint.expect_shape(stored.codes, expected)


def read_rows(
    checkpoint: Checkpoint,
    stored: StoredNames,
    shape: StoredShape,
    rows: range,
    *,
    dtype: torch.dtype,
) -> StoredMatrix:
    """Return `rows` (of step 1, from a multiple of ROW_STEP) of a matrix of `shape`, on the CPU.

    Raises CheckpointError naming a tensor that is missing, unreadable, or of another shape.
    """
    if stored.scheme.layout == "plain":
        return _plain(checkpoint, stored, shape, rows, dtype)
    if stored.scheme.layout == "packed":
        return _packed(checkpoint, stored, shape, rows, dtype)
    if stored.scheme.layout == "mxfp4":
        return _mxfp4(checkpoint, stored, shape, rows, dtype)
    if stored.scheme.layout == "nvfp4":
        return _nvfp4(checkpoint, stored, shape, rows, dtype)
    if stored.scheme.layout in LAYOUTS:
        data = checkpoint.read_raw(
            stored.codes, tuple(GGUF_SCHEMES), index=shape.slice_idx, rows=rows
        )
        return unpack(data, stored.scheme, dtype)
    return _transposed(checkpoint, stored, shape, rows, dtype)


def _plain(
    checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape, rows: range, dtype: torch.dtype
) -> StoredMatrix:
    scheme = stored.scheme
    wanted = ("F8_E4M3",) if scheme.is_float else ("I8",)
    codes = checkpoint.read_raw(stored.codes, wanted, index=shape.slice_idx, rows=rows)
    scales = checkpoint.read_raw(stored.scales, _WIDE, index=shape.slice_idx).float()
    group = _group(scheme, shape)
    scales = _of_rows(scales, stored.scales, scheme, shape, rows)
    if scheme.is_float:
        return StoredMatrix(codes, scales, None, group, scheme.bits, dtype)
    middle = 1 << (scheme.bits - 1)
    zeros = torch.full_like(scales, middle)
    if stored.zeros is not None:
        found = checkpoint.read_raw(stored.zeros, ("I8", "I32"), index=shape.slice_idx).float()
        zeros += _of_rows(found, stored.zeros, scheme, shape, rows)
    codes = (codes.to(torch.int16) + middle).to(torch.uint8)
    return StoredMatrix(codes, scales, zeros, group, scheme.bits, dtype)


def _packed(
    checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape, rows: range, dtype: torch.dtype
) -> StoredMatrix:
    scheme = stored.scheme
    words = checkpoint.read_raw(stored.codes, _PACKED, index=shape.slice_idx, rows=rows)
    codes = _unpack(words, scheme.bits)[:, : shape.num_in].contiguous()
    scales = checkpoint.read_raw(stored.scales, _WIDE, index=shape.slice_idx).float()
    scales = _of_rows(scales, stored.scales, scheme, shape, rows)
    zeros = torch.full_like(scales, 1 << (scheme.bits - 1))
    if stored.zeros is not None:
        per_word = _WORD_BITS // scheme.bits
        where = range(rows.start // per_word, -(-rows.stop // per_word))
        if shape.slice_idx is None:
            full = (-(-shape.num_out // per_word), scales.shape[1])
            checkpoint.expect_shape(stored.zeros, full)
        packed = checkpoint.read_raw(stored.zeros, _PACKED, index=shape.slice_idx, rows=where)
        zeros = _unpack(packed.t(), scheme.bits).t()[: len(rows)].float()
    order = _order(checkpoint, stored, shape)
    return _ordered(
        StoredMatrix(codes, scales, zeros, _group(scheme, shape), scheme.bits, dtype), order
    )


def _mxfp4(
    checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape, rows: range, dtype: torch.dtype
) -> StoredMatrix:
    """Read blocks of e2m1 numbers, whose scales are exponents."""
    # check_codes has seen the blocks: there is a scale for each.
    checkpoint.expect_shape(stored.scales, checkpoint.shape(stored.codes)[:-1])
    exponents = checkpoint.read_raw(stored.scales, _PAIRS, index=shape.slice_idx, rows=rows)
    scales = e2m1_scales(exponents)
    zeros = torch.full_like(scales, E2M1_ZERO)
    codes = _e2m1(checkpoint, stored, shape, rows)
    return StoredMatrix(codes, scales, zeros, MXFP4_GROUP, stored.scheme.bits, dtype)


def _nvfp4(
    checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape, rows: range, dtype: torch.dtype
) -> StoredMatrix:
    """Read e2m1 numbers, whose groups' scales have a scale in common."""
    assert stored.whole is not None
    group = _group(stored.scheme, shape)
    checkpoint.expect_shape(stored.scales, (shape.num_out, -(-shape.num_in // group)))
    scales = checkpoint.read_raw(stored.scales, ("F8_E4M3",), rows=rows).float()
    whole = checkpoint.read_raw(stored.whole, _WIDE).float()
    _expect(whole.flatten().shape, (1,), stored.whole)
    scales = (scales / whole if stored.divides else scales * whole) * 0.5
    zeros = torch.full_like(scales, E2M1_ZERO)
    codes = _e2m1(checkpoint, stored, shape, rows)
    return StoredMatrix(codes, scales, zeros, group, stored.scheme.bits, dtype)


def _e2m1(checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape, rows: range) -> Tensor:
    """Read e2m1 numbers, two a byte, as integers u8[rows, I]; (one - E2M1_ZERO) / 2 is a number."""
    packed = checkpoint.read_raw(stored.codes, _PAIRS, index=shape.slice_idx, rows=rows)
    # Two numbers of a byte at a time.
    pairs = [(E2M1_INTEGERS[byte & 15], E2M1_INTEGERS[byte >> 4]) for byte in range(256)]
    pair_of = torch.tensor(pairs, dtype=torch.uint8).view(torch.int16).flatten()
    found = pair_of.index_select(0, packed.flatten().int()).view(torch.uint8)
    return found.view(len(rows), -1)[:, : shape.num_in]


def _transposed(
    checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape, rows: range, dtype: torch.dtype
) -> StoredMatrix:
    """Read GPTQ's or AWQ's layout: outputs are columns."""
    scheme = stored.scheme
    bits, per_word = scheme.bits, _WORD_BITS // scheme.bits
    words = range(rows.start // per_word, -(-rows.stop // per_word))
    is_awq = scheme.layout == "awq"
    columns = words if is_awq else rows
    packed = checkpoint.read_raw(stored.codes, _PACKED, columns=columns)
    codes = _outputs(packed, scheme) if is_awq else _unpack(packed.t(), bits)
    num_groups = 1 if scheme.group_size is None else -(-shape.num_in // scheme.group_size)
    checkpoint.expect_shape(stored.scales, (num_groups, shape.num_out))
    scales = checkpoint.read_raw(stored.scales, _WIDE, columns=rows).float().t()
    zeros = torch.full_like(scales, 1 << (bits - 1))
    if stored.zeros is not None:
        checkpoint.expect_shape(stored.zeros, (num_groups, shape.num_out // per_word))
        packed = checkpoint.read_raw(stored.zeros, _PACKED, columns=words)
        # GPTQ's first format stores a zero of 0 as the highest code.
        zeros = ((_outputs(packed, scheme) + scheme.zero_offset) & ((1 << bits) - 1)).float()
    matrix = StoredMatrix(
        codes.contiguous(),
        scales.contiguous(),
        zeros.contiguous(),
        _group(scheme, shape),
        bits,
        dtype,
    )
    return _ordered(matrix, _order(checkpoint, stored, shape))


def _outputs(packed: Tensor, scheme: Scheme) -> Tensor:
    """Return u8[outputs, n] of words [n, outputs / per word]."""
    numbers = _unpack(packed, scheme.bits)
    if scheme.layout == "awq":
        numbers = numbers.view(len(packed), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].flatten(1)
    return numbers.t()


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes u8[n, words * 32 / bits] of words i32[n, words], the lowest bits first.

    Words may be bytes too.
    """
    # Not contiguous(): it returns a single column as it is, whose stride no other dtype can have.
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def _group(scheme: Scheme, shape: StoredShape) -> int:
    """Return the inputs that share a scale."""
    size = scheme.group_size if scheme.block is None else scheme.block[1]
    return shape.num_in if size is None else min(size, shape.num_in)


def _of_rows(values: Tensor, name: str, scheme: Scheme, shape: StoredShape, rows: range) -> Tensor:
    """Return the values [rows, groups] of scales or zeros [], [1], [O], [O, G] or of blocks."""
    num_groups = -(-shape.num_in // _group(scheme, shape))
    if values.numel() == 1:
        return values.reshape(1, 1).expand(len(rows), num_groups).contiguous()
    if scheme.block is not None:
        height = scheme.block[0]
        _expect(values.shape, (-(-shape.num_out // height), num_groups), name)
        return values[torch.arange(rows.start, rows.stop) // height]
    values = values.reshape(values.shape[0], -1)
    _expect(values.shape, (shape.num_out, num_groups), name)
    return values[rows.start : rows.stop]


def _order(checkpoint: Checkpoint, stored: StoredNames, shape: StoredShape) -> Tensor | None:
    """Return i64[I], the group of each input, or None if groups are consecutive inputs."""
    scheme = stored.scheme
    if stored.order is None or (scheme.layout == "gptq" and not scheme.any_order):
        return None  # GPTQ without desc_act: whatever was written there
    order = checkpoint.read_raw(stored.order, ("I32", "I64")).long()
    _expect(order.shape, (shape.num_in,), stored.order)
    if (order < 0).all():  # compressed-tensors: no order was recorded
        return None
    group = _group(scheme, shape)
    if torch.equal(order, torch.arange(shape.num_in) // group):
        return None
    num_groups = -(-shape.num_in // group)
    if order.min() < 0 or order.max() >= num_groups:
        raise CheckpointError(f"tensor {stored.order}: groups are 0 to {num_groups - 1}")
    return order


def _ordered(matrix: StoredMatrix, order: Tensor | None) -> StoredMatrix:
    """Return the matrix with the scales of its inputs' groups, each input a group of its own."""
    if order is None:
        return matrix
    assert matrix.zeros is not None
    scales, zeros = matrix.scales[:, order], matrix.zeros[:, order]
    return StoredMatrix(matrix.codes, scales, zeros, 1, matrix.bits, matrix.dtype)


def _expect(found: torch.Size, needed: tuple[int, ...], name: str) -> None:
    if tuple(found) != needed:
        raise CheckpointError(
            f"tensor {name} has shape {list(found)}, the quantised matrix needs {list(needed)}"
        )
