"""Sampling on the host: gathers a batch's numbers for one compiled call.

The result is that of `kernels.sampling.sample`, where every step is defined. Used by
`kernels.cpu.ops` and `kernels.deterministic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.compiled.runtime import launch
from kernels.cpu.compiled.sampling import choose, find_logprobs, scratch_bytes
from kernels.sampling import History, SampleResult, SamplingBatch

_COLUMNS: Final = (
    ("temperature", 4),
    ("top_k", 8),
    ("min_p", 4),
    ("top_p", 4),
    ("seeds", 8),
    ("choices", 8),
    ("positions", 8),
)
_PENALTIES: Final = (
    ("presence_penalty", 4),
    ("frequency_penalty", 4),
    ("repetition_penalty", 4),
)
"""Fields of a batch in the order of the kernel's arguments, and the bytes of their numbers."""


def sample(
    logits: Tensor, batch: SamplingBatch, *, num_top_logprobs: int | None = None
) -> SampleResult:
    """Choose one token per row of logits [R, V]; see `kernels.sampling.sample`.

    Raises IndexError if a history, bias or ban has a token id that is not below V.
    """
    num_rows, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    threads = min(torch.get_num_threads(), num_rows)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    valid, is_number = (torch.empty(num_rows, dtype=torch.bool) for _ in range(2))
    size = scratch_bytes(vocab)
    scratch = torch.empty(threads * size, dtype=torch.uint8)
    edits, kept = _edits(batch, vocab)
    arguments = (
        logits.data_ptr(),
        4 * logits.stride(0),
        vocab,
        num_rows,
        *_addresses(batch, _COLUMNS),
        tokens.data_ptr(),
        valid.data_ptr(),
        is_number.data_ptr(),
        scratch.data_ptr(),
        size,
        *edits,
    )
    launch(choose, arguments, num_threads=threads)
    del kept
    result = SampleResult(tokens, valid, is_number, None, None, None)
    if num_top_logprobs is None:
        return result
    return result._replace(**_logprobs(logits, tokens, min(num_top_logprobs, vocab), threads))


def _addresses(batch: SamplingBatch, columns: Sequence[tuple[str, int]]) -> list[int]:
    """Return the addresses of tensors of the batch, after a look at their sizes of numbers."""
    found = []
    for name, size in columns:
        column = getattr(batch, name)
        assert column.itemsize == size, f"{name} is {column.dtype}"
        assert column.is_contiguous(), name
        found.append(column.data_ptr())
    return found


def _address(array: NDArray[Any]) -> int:
    # array.ctypes takes twice as long.
    return torch.from_numpy(array).data_ptr()


def _edits(batch: SamplingBatch, vocab: int) -> tuple[list[int], object]:
    """Return the arguments of `choose` from IS_PROCESSED on, and what owns their memory."""
    if not batch.is_processed:
        return [0] * 14, None
    history, bounds = _histories(batch)
    biases, bans = _columns(batch.logit_bias), _columns(batch.banned)
    for what, ids in (("a history", [history]), ("a bias", biases[1:2]), ("a ban", bans[1:2])):
        _check(what, ids, vocab)
    bits = _masks(batch, vocab)
    masks = np.zeros(len(batch.seeds), dtype=np.int64)
    if batch.allowed is not None:
        masks[batch.allowed.rows.numpy()] = _address(bits) + bits.strides[0] * np.arange(len(bits))
    edits = [
        1,
        *_addresses(batch, _PENALTIES),
        _address(history),
        _address(bounds),
        *_column_addresses(biases, 3),
        *_column_addresses(bans, 2),
        _address(masks),
    ]
    return edits, (history, bounds, biases, bans, bits, masks)


def _masks(batch: SamplingBatch, vocab: int) -> NDArray[np.int32]:
    """Return the allowed tokens' bits [G, words], of which the kernel reads each row whole."""
    num_words = -(-vocab // 32)
    if batch.allowed is None:
        return np.zeros((0, num_words), dtype=np.int32)
    bits: NDArray[np.int32] = batch.allowed.bits.contiguous().numpy()
    assert bits.dtype == np.int32, bits.dtype
    assert bits.shape[1] == num_words, f"{bits.shape[1]} words for {vocab} tokens"
    return bits


def _columns(edits: Sequence[Tensor] | None) -> list[NDArray[Any]]:
    return [] if edits is None else [np.ascontiguousarray(each.numpy()) for each in edits]


def _column_addresses(columns: list[NDArray[Any]], count: int) -> list[int]:
    """Return the length of the columns and the address of each; zeros if there are none."""
    if not columns:
        return [0] * (1 + count)
    return [len(columns[0]), *(_address(each) for each in columns)]


def _check(what: str, ids: Sequence[NDArray[Any]], vocab: int) -> None:
    for each in ids:
        # Unsigned, a negative number is a great one.
        if each.size and each.view(f"u{each.itemsize}").max() >= vocab:
            raise IndexError(f"{what} has a token id that is not below {vocab}")


def _histories(batch: SamplingBatch) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the tokens of the penalised rows, and by row where prompt and output begin and end."""
    parts: list[NDArray[Any]] = [np.zeros(0, dtype=np.int32)]
    bounds, end = np.zeros((len(batch.seeds), 3), dtype=np.int64), 0
    repetition = batch.repetition_penalty.tolist()
    for row in batch.penalised_rows:
        assert batch.outputs is not None, "penalties need the outputs"
        prompt: History = ()
        if repetition[row] != 1:
            assert batch.prompts is not None, "a repetition penalty needs the prompts"
            prompt = batch.prompts[row]
        both = [_tokens(prompt), _tokens(batch.outputs[row])]
        middle = end + len(both[0])
        bounds[row] = end, middle, middle + len(both[1])
        end = middle + len(both[1])
        parts += both
    return np.concatenate(parts, dtype=np.int32, casting="same_kind"), bounds


def _tokens(history: History) -> NDArray[Any]:
    return history.numpy() if isinstance(history, Tensor) else np.array(history, dtype=np.int64)


def _logprobs(logits: Tensor, tokens: Tensor, num_top: int, threads: int) -> dict[str, Tensor]:
    """Return the last three fields of SampleResult."""
    num_rows, vocab = logits.shape
    chosen, top_logprobs = torch.empty(num_rows), torch.empty(num_rows, num_top)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64)
    arguments = (
        logits.data_ptr(),
        4 * logits.stride(0),
        vocab,
        num_rows,
        tokens.data_ptr(),
        chosen.data_ptr(),
        num_top,
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
    )
    launch(find_logprobs, arguments, num_threads=threads)
    return {"logprobs": chosen, "top_ids": top_ids, "top_logprobs": top_logprobs}
