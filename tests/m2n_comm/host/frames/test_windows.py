"""The layout of a pair: no two fields share a byte, all lie inside, words are aligned."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import pytest
import torch

from m2n_comm.host.frames.windows import PairLayout, private_memory
from m2n_comm.host.frames.wire import HEADER_BYTES
from tests.m2n_comm.harness import make_shape


def address(view: memoryview) -> int:
    """Return the address of a writable view's first byte."""
    return ctypes.addressof((ctypes.c_char * view.nbytes).from_buffer(view))


@pytest.mark.parametrize("payload", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "top_k", "rows"), [(24, 3, 8), (5, 1, 1), (576, 8, 256)])
def test_fields_do_not_overlap(payload: torch.dtype, hidden: int, top_k: int, rows: int) -> None:
    shape = make_shape(payload=payload, hidden_size=hidden, top_k=top_k, window_rows=rows)
    layout = PairLayout(shape)
    memory = private_memory(layout)
    assert len(memory) % mmap.PAGESIZE == 0
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    windows = layout.map(memory)
    spans = []
    for window in (*windows.requests, *windows.answers):
        flag = address(window.flag)
        assert flag % 64 == 0
        spans.append((flag, 8))
        spans.append((address(window.header), HEADER_BYTES))
        tensors = [t for t in (window.slots, window.weights, window.hidden) if t is not None]
        assert [t.shape[0] for t in tensors] == [rows] * len(tensors)
        spans += [(t.data_ptr(), t.nbytes) for t in tensors]
        # The byte fields are the tensors' memory, in wire order.
        assert [address(f.data) for f in window.fields] == [t.data_ptr() for t in tensors]
        assert [f.data.nbytes for f in window.fields] == [t.nbytes for t in tensors]
    spans.sort()
    for (low, size), (high, _) in itertools.pairwise(spans):
        assert low + size <= high
    assert spans[0][0] >= base
    assert spans[-1][0] + spans[-1][1] <= base + layout.total_bytes
    assert len(windows.requests) == len(windows.answers) == shape.num_micro_batches


def test_payload_is_the_first_rows_of_every_field() -> None:
    layout = PairLayout(make_shape())
    windows = layout.map(private_memory(layout))
    request, answer = windows.requests[1], windows.answers[1]
    assert sum(map(len, request.payload(5))) == 5 * layout.request_row_bytes
    assert sum(map(len, answer.payload(5))) == 5 * layout.answer_row_bytes
    assert request.payload(0) == []
    answer.hidden[4].fill_(3.0)
    assert bytes(answer.payload(5)[0]) == answer.hidden[:5].numpy().tobytes()


def test_memory_of_another_layout_is_a_programming_error() -> None:
    layout = PairLayout(make_shape())
    with pytest.raises(AssertionError):
        PairLayout(make_shape(window_rows=64)).map(private_memory(layout))
