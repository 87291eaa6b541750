"""Transfers on a device that is late: right values, and exactly the necessary waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attention_nodes.device.staging import NUM_SLOTS, Inbound, Outbound
from tests.attention_nodes.delayed_runtime import DelayedRuntime


@pytest.fixture
def runtime() -> Iterator[DelayedRuntime]:
    with DelayedRuntime() as runtime:
        yield runtime


def arrays_of(step: int) -> list[np.ndarray]:
    return [
        np.arange(3) + step,
        np.full((2, 3), step, dtype=np.int32),
        np.zeros((0, 4), dtype=np.int32),
        np.array([0.5 * step], dtype=np.float32),
    ]


def test_arrays_arrive_where_they_did_before(runtime: DelayedRuntime) -> None:
    outbound = Outbound(runtime, 128)
    first = outbound.send(arrays_of(1))
    assert [each.data_ptr() % 16 for each in first] == [0] * 4
    for step in (2, 3):
        runtime.synchronize()
        again = outbound.send(arrays_of(step))
        assert [each.data_ptr() for each in again] == [each.data_ptr() for each in first]
        for sent, received in zip(arrays_of(step), first, strict=True):
            assert np.array_equal(received.numpy(), sent)
            assert received.numpy().dtype == sent.dtype


def test_a_buffer_is_written_again_only_after_its_copy(runtime: DelayedRuntime) -> None:
    outbound = Outbound(runtime, 128)
    for step in range(NUM_SLOTS):
        outbound.send(arrays_of(step))
    assert runtime.num_waits == 0
    outbound.send(arrays_of(NUM_SLOTS))  # the runtime checks that the first one has not changed
    assert runtime.num_waits == 1
    runtime.synchronize()


def test_tensors_of_all_widths_come_back_in_one_copy(runtime: DelayedRuntime) -> None:
    inbound = Inbound(runtime, 16)  # too small: it grows
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([5, -6, 7]),
        torch.tensor([0.5, 1.5, 2.5]),
        torch.arange(12).view(3, 4)[:, 1:3],
        torch.empty(3, 0),
    ]
    receipt = inbound.fetch(tensors)
    assert not receipt.ended.is_done()
    for array, tensor in zip(receipt.arrays(), tensors, strict=True):
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())
    assert receipt.ended.is_done()


def test_two_answers_may_be_under_way(runtime: DelayedRuntime) -> None:
    inbound = Inbound(runtime, 64)
    first = inbound.fetch([torch.tensor([1, 2])])
    second = inbound.fetch([torch.tensor([3, 4])])
    assert second.arrays()[0].tolist() == [3, 4]
    assert first.arrays()[0].tolist() == [1, 2]


def test_an_answer_of_nothing_still_ends(runtime: DelayedRuntime) -> None:
    receipt = Inbound(runtime, 64).fetch([])
    assert receipt.arrays() == []
    assert receipt.ended.is_done()
