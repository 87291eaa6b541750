"""Compiled sampling gives the tokens of the definition in `kernels.sampling`, whatever is set."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.sampling import sample
from kernels.sampling import BannedTokens, LogitBias, SamplingBatch
from kernels.sampling import sample as define
from tests.kernels.cases.matrices import values_then_pairs
from tests.kernels.cases.sampling import any_batch, any_logits, batch

NUM_ROWS = 24


def check(logits: Tensor, asked: SamplingBatch) -> None:
    result, wanted = sample(logits, asked), define(logits, asked)
    assert torch.equal(result.tokens, wanted.tokens)
    assert torch.equal(result.valid, wanted.valid)
    assert torch.equal(result.is_number, wanted.is_number)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 30),
    vocab=st.one_of(st.integers(1, 50), st.integers(51, 5000)),
    spread=st.sampled_from([0.0, 1e-6, 0.01, 0.5, 2.0, 8.0, 1e30]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    processed=st.booleans(),
)
def test_tokens_are_those_of_the_definition(
    seed: int, vocab: int, spread: float, step: float, processed: bool
) -> None:
    torch.manual_seed(seed)
    logits = any_logits(NUM_ROWS, vocab, spread=spread, step=step)
    check(logits, any_batch(vocab, processed=processed))


@pytest.mark.parametrize(
    ("shape", "top_p"),
    values_then_pairs(
        ["flat", "peaked", "equal", "two values", "far outliers", "tight groups", "banned"],
        [0.95, 0.999999, 0.3, 0.0],
    ),
)
def test_nuclei_of_large_vocabularies(shape: str, top_p: float) -> None:
    """What divides into intervals of scores well, and what does not."""
    noise = torch.randn(4, 20_011)
    logits = {
        "flat": noise * 0.5,
        "peaked": noise * 2.5,
        "equal": torch.full_like(noise, -3.0),
        "two values": torch.where(noise > 1, 1.0, 0.5),
        "far outliers": torch.where(noise > 3, noise * 1e20, noise),
        "tight groups": (noise * 2).round() + noise * 1e-6,
        "banned": torch.where(noise > 0, noise, -math.inf),
    }[shape]
    for temperature in (0.7, 30.0):
        check(logits, batch(4, top_p=top_p, temperature=temperature, seeds=3))
        check(logits, batch(4, top_k=3000, top_p=top_p, temperature=temperature, seeds=4))


@pytest.mark.parametrize("k", [1, 2, 7, 64, 65, 900, 1999])
def test_the_kth_score_counts_equal_scores(k: int) -> None:
    scores = (torch.randn(20, 2000) * 20).round()
    kept = scores >= scores.topk(k).values[:, -1:]
    drawn = [sample(scores, batch(20, top_k=k, temperature=1e6, seeds=s)).tokens for s in range(40)]
    assert all(kept.gather(1, tokens[:, None]).all() for tokens in drawn)
    assert len(torch.unique(torch.stack(drawn))) > min(k, 20)
    check(scores, batch(20, top_k=k, temperature=1e6))


def test_threads_do_not_change_a_draw() -> None:
    logits = torch.randn(NUM_ROWS, 5000)
    asked = any_batch(5000, processed=True)
    torch.set_num_threads(1)
    alone = sample(logits, asked).tokens
    torch.set_num_threads(3)
    assert torch.equal(sample(logits, asked).tokens, alone)


def test_rows_of_any_kind() -> None:
    wide = torch.randn(NUM_ROWS, 700)
    asked = any_batch(300, processed=True)
    check(wide[:, 17:317], asked)
    check(wide[:, ::2][:, :300], asked)
    check(wide[:1, :300].expand(NUM_ROWS, -1), asked)
    check(wide[:, :300].bfloat16(), asked)
    before = wide.clone()
    sample(wide, any_batch(700, processed=True))
    assert torch.equal(wide, before)
    assert sample(wide[:0], batch(0)).tokens.tolist() == []


@pytest.mark.parametrize(("vocab", "num_top"), values_then_pairs([33, 3000, 20], [0, 1, 20, 5]))
def test_log_probabilities(vocab: int, num_top: int) -> None:
    logits = torch.randn(6, vocab) * 3
    logits[0] = logits[0].sort().values
    logits[1, 3] = math.nan
    logits[2, 2:] = -math.inf
    result = sample(logits, batch(6, top_p=0.9, seeds=9), num_top_logprobs=num_top)
    wanted = define(logits, batch(6, top_p=0.9, seeds=9), num_top_logprobs=num_top)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    near = {"rtol": 1e-6, "atol": 2e-6, "equal_nan": True}
    torch.testing.assert_close(result.logprobs, wanted.logprobs, **near)
    torch.testing.assert_close(
        result.top_logprobs[[0, 2, 3, 4, 5]], wanted.top_logprobs[[0, 2, 3, 4, 5]], **near
    )
    finite = [0, 3, 4, 5]
    assert torch.equal(result.top_ids[finite], wanted.top_ids[finite])
    assert ((result.top_ids >= 0) & (result.top_ids < vocab)).all()


def test_equal_logits_are_reported_by_ascending_ids() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [70, 40]] = 1
    result = sample(logits, batch(1), num_top_logprobs=5)
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [[40, 70, 0, 1, 2]]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"banned": BannedTokens(torch.tensor([0]), torch.tensor([50]))}, "a ban"),
        (
            {"logit_bias": LogitBias(torch.tensor([0]), torch.tensor([-1]), torch.tensor([1.0]))},
            "a bias",
        ),
        ({"presence_penalty": 1.0, "outputs": [[3, 50]]}, "a history"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(edit: dict[str, object], message: str) -> None:
    with pytest.raises(IndexError, match=f"{message} has a token id that is not below 50"):
        sample(torch.zeros(1, 50), batch(1, **edit))
