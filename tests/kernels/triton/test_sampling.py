"""The sampling kernels against the definition in `kernels.sampling`."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import sampling
from kernels.philox import Purpose, uniforms
from kernels.runtime import NoSync
from kernels.sampling import AllowedTokens, BannedTokens, LogitBias, process_logits
from kernels.triton.sampling import launches as triton_sampling
from kernels.triton.sampling.launches import plan_sampling, processed
from tests.kernels.cases.sampling import any_batch, any_logits, batch
from tests.kernels.triton.tiles import small_splits


@pytest.fixture(autouse=True)
def _small_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    small_splits(device, monkeypatch)


def draw_logits(num_rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1000},
        pytest.param({"top_p": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            {"min_p": 0.02, "top_k": 30, "top_p": 0.9, "temperature": 1.3}, marks=pytest.mark.slow
        ),
        # In rows of one batch, too: see below.
        pytest.param({"top_k": 7, "temperature": 2.5}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.95, "temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.999}, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_definition(
    settings: dict[str, float], device: torch.device
) -> None:
    logits = draw_logits(4, 200)
    # Ties, at the top and in the middle, in separate rows.
    logits[1], logits[2] = logits[1].round(), logits[2].bfloat16().float()
    rows = batch(4, seeds=torch.arange(4) * 977, **settings)
    result = triton_sampling.sample(logits.to(device), rows)
    assert torch.equal(result.tokens.cpu(), sampling.sample(logits, rows).tokens)
    assert result.valid.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "step", "processed_too"),
    [*product((2.0,), (0.0, 0.25), (False, True)), (8.0, 2.0, False), (8.0, 2.0, True)],
)
def test_any_batch_is_sampled_as_on_the_host(
    spread: float, step: float, processed_too: bool, device: torch.device
) -> None:
    """Scores are processed to the last bit; logits are columns of a wider buffer."""
    logits = any_logits(6, 150, spread=spread, step=step)
    rows = any_batch(150, processed=processed_too, num_rows=6)
    there = logits.new_zeros(6, 200).to(device)
    there[:, 20:170] = logits
    scores = processed(there[:, 20:170], plan_sampling(rows, 150, device))
    assert torch.equal(scores.cpu(), process_logits(logits, rows))
    found, wanted = triton_sampling.sample(there[:, 20:170], rows), sampling.sample(logits, rows)
    assert torch.equal(found.valid.cpu(), wanted.valid)
    assert torch.equal(found.is_number.cpu(), wanted.is_number)
    assert torch.equal(found.tokens.cpu()[wanted.valid], wanted.tokens[wanted.valid])
    plan = plan_sampling(rows, 150, device)  # which alone reads the batch
    with NoSync():
        again = triton_sampling.draw(there[:, 20:170], plan)
    assert torch.equal(again.tokens, found.tokens)


def test_uniforms_are_philoxs_bit_for_bit(device: torch.device) -> None:
    seeds = torch.tensor([0, 1, (1 << 64) - 1, 0xFEDCBA9876543210], dtype=torch.uint64)
    seeds = seeds.view(torch.int64)
    rows = batch(
        4, seeds=seeds, choices=torch.tensor([0, 3, 2**32 - 1, 1]), positions=(5 << 32) + 17
    )
    draws = uniforms(
        seeds.numpy().view(np.uint64),
        rows.choices.numpy(),
        rows.positions.numpy(),
        purpose=Purpose.TOKEN,
    )
    scores = torch.zeros(4, 2, device=device)
    found = triton_sampling._SampledRows(scores, scores, plan_sampling(rows, 2, device))
    found.survey(with_norm=False)
    assert found._uniforms.tolist() == draws.tolist()


class Transfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that copy data from the host to the device "meta"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each.is_cpu for each in args if isinstance(each, Tensor)]
        self.count += isinstance(result, Tensor) and result.is_meta and any(given)
        return result


@pytest.mark.parametrize("num_biases", [1, 2])
def test_a_batch_with_everything_is_one_transfer(num_biases: int) -> None:
    banned = BannedTokens(torch.tensor([0, 1]), torch.tensor([3, 4]))
    ids = torch.arange(num_biases)
    rows = batch(
        2,
        temperature=1.0,
        repetition_penalty=1.1,
        prompts=[[1]] * 2,
        outputs=[[2]] * 2,
        banned=banned,
        logit_bias=LogitBias(ids, ids + 7, ids + 0.5),
        allowed=AllowedTokens(ids, torch.full((num_biases, 1), -1, dtype=torch.int32)),
    )
    with Transfers() as transfers:
        plan = plan_sampling(rows, 9, torch.device("meta"))
    assert transfers.count == 1
    assert plan.banned is not None
    assert plan.logit_bias is not None
    assert all(part.is_meta and part.shape == (2,) for part in plan.banned)
    assert [part.dtype for part in plan.logit_bias] == [torch.int64, torch.int64, torch.float32]
    assert all(part.shape == (num_biases,) for part in plan.logit_bias)
    assert plan.allowed is not None
    assert (plan.allowed.bits.shape, plan.allowed.bits.dtype) == ((num_biases, 1), torch.int32)


def test_nothing_to_apply_means_no_copy(device: torch.device) -> None:
    logits = torch.zeros(2, 5, device=device)
    plan = plan_sampling(batch(2, temperature=0.5, top_k=3), 5, device)
    assert processed(logits, plan) is logits
    assert plan.kind == (True, True, False, False)
    assert not any(plan_sampling(batch(2, temperature=0.0, top_k=3), 5, device).kind)
