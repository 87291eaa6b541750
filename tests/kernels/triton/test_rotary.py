"""The fused rotary kernel beside its op: padding rows."""

from __future__ import annotations

import torch

from kernels.triton.rotary import rotate_and_store


def test_rows_with_a_negative_slot_are_not_stored(device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 16, generator=rng).to(device).split((2, 1, 1), dim=1)
    angles = (torch.rand(3, 8, generator=rng) * 100).to(device)
    slots = torch.tensor([-1, 7, -1], device=device)
    caches = torch.zeros(2, 6, 4, 1, 16, device=device)
    rotate_and_store(q, k, v, angles.cos(), angles.sin(), *caches, slots)
    for cache in caches:
        assert cache.flatten(0, 1).flatten(1).any(1).nonzero().tolist() == [[7]]
