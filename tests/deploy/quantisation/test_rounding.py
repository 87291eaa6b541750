"""Grids and rounding against their definitions."""

from __future__ import annotations

import torch

from deploy.quantisation.compensated import compensated, inverse_factor
from deploy.quantisation.grids import Rounding, nearest, rounded, steps_of


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_compensated_outputs_are_nearer() -> None:
    mixing = matrix(64, 64, seed=1)
    rows = matrix(512, 64, seed=2) @ mixing
    weight = matrix(2, 48, 64)

    factor = inverse_factor((rows.T @ rows)[None])
    ours = compensated(weight, factor, "int4", Rounding()).numbers()
    plain = rounded(weight, "int4", Rounding()).numbers()

    def error(other: torch.Tensor) -> float:
        return (rows @ (other - weight).mT).square().mean().item()

    assert error(ours) < 0.7 * error(plain)


def test_steps_suit_the_important_numbers() -> None:
    groups = matrix(64, 1, 32, seed=4)
    importance = matrix(32, seed=5).exp()
    errors = []
    for each in (importance, None):
        steps, zeros = steps_of(
            groups, "int4", symmetric=False, dtype=torch.float32, importance=each
        )
        found = nearest(groups, steps, zeros, 15)
        errors.append(((found - groups).square() * importance).sum(-1))
    assert (errors[0] <= errors[1]).all()
    assert errors[0].mean() < 0.99 * errors[1].mean()


def test_inputs_that_are_always_zero() -> None:
    rows = matrix(16, 64)
    rows[:, 5] = 0
    weight = matrix(1, 32, 64)
    factor = inverse_factor((rows.T @ rows)[None])

    coded = compensated(weight, factor, "int4", Rounding(symmetric=True)).numbers()

    assert torch.isfinite(coded).all()
    assert (coded - weight).abs().max() < 3
