"""Memory that recordings share: the same for each, and every tensor has its part of it."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.huge_pages import CHUNK_BYTES
from kernels.cpu.step_memory import StepMemory


def some_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    plain = torch.randn(5, 7, 3)
    return [
        plain,
        plain.bfloat16(),
        plain.transpose(0, 2),
        torch.randint(9, (3, 2)),
        torch.tensor(4.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ]


@torch.inference_mode()
def test_tensors_have_their_form_and_content_apart_from_others() -> None:
    memory, originals = StepMemory(), some_tensors()
    moved = [memory.moved(each) for each in originals]
    for one, other in zip(moved, originals, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
        assert one.data_ptr() % 64 == 0 or not one.numel()
    moved[0].zero_()
    assert all(map(torch.equal, moved[1:], originals[1:]))


@torch.inference_mode()
def test_each_begin_gives_out_the_same_memory() -> None:
    memory = StepMemory()
    places = set()
    for _ in range(3):
        memory.begin()
        places.add(tuple(memory.moved(each).data_ptr() for each in some_tensors()))
    assert len(places) == 1
    assert memory.size_bytes == CHUNK_BYTES


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [(1.5,), (0.6, 0.6), (0.1, 2.0, 0.3)])
@pytest.mark.slow
def test_what_no_chunk_holds_gets_another_once(sizes: tuple[float, ...]) -> None:
    memory = StepMemory()
    found = set()
    for _ in range(3):
        memory.begin()
        wanted = [torch.full((int(size * CHUNK_BYTES),), idx) for idx, size in enumerate(sizes)]
        moved = [memory.moved(each.to(torch.uint8)) for each in wanted]
        assert all(bool((each == idx).all()) for idx, each in enumerate(moved))
        found.add(memory.size_bytes)
    assert len(found) == 1
    assert found.pop() <= (sum(sizes) + len(sizes)) * CHUNK_BYTES
