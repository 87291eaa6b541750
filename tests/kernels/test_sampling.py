"""Sampling against transformers' processors, exact distributions, and other batches.

The definition, in plain torch, and where draws need not be replaced the compiled one too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.cpu import sampling as compiled
from kernels.philox import Purpose, uniforms
from kernels.sampling import (
    AllowedTokens,
    BannedTokens,
    LogitBias,
    SampleResult,
    process_logits,
)
from kernels.sampling import sample as define
from tests.kernels.cases.sampling import batch, integers, mixed_batch
from tests.kernels.triton.tiles import small_splits
from tests.pairwise import few

# What the interpreter computes with is numpy.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
GRID = 1000
Sample = Callable[..., SampleResult]


@pytest.fixture
def even_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the row's uniforms by the midpoints of an even grid."""

    def midpoints(seeds: NDArray[np.uint64], *_: object, **__: object) -> NDArray[np.float64]:
        return (np.arange(len(seeds)) + 0.5) / len(seeds)

    monkeypatch.setattr("kernels.sampling.uniforms", midpoints)


@pytest.fixture(params=["definition", "compiled"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """The function of each of the host's implementations."""
    return define if request.param == "definition" else compiled.sample


@pytest.fixture(params=["definition", "compiled", "triton"])
def any_sample(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Sample:
    """The function of each implementation."""
    if request.param == "triton":
        return small_splits(device, monkeypatch)
    return define if request.param == "definition" else compiled.sample


def integrate(logits: Tensor, **settings: object) -> Tensor:
    """Tokens chosen for one row of logits by GRID even uniforms, in order of the uniform."""
    return define(logits.expand(GRID, -1), batch(GRID, **settings)).tokens


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 24},
    {"top_k": 1000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.75},
    {"min_p": 0.05, "top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.1, "top_k": 8, "top_p": 0.95, "temperature": 1.3},
]


@pytest.mark.usefixtures("even_draws")
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_integrated_distribution_is_that_of_transformers(settings: dict[str, float]) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 2
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(settings.get("temperature", 1.0)))])
    if "min_p" in settings:
        chain.append(MinPLogitsWarper(settings["min_p"]))
    if "top_k" in settings:
        chain.append(TopKLogitsWarper(int(settings["top_k"])))
    if "top_p" in settings:
        chain.append(TopPLogitsWarper(settings["top_p"]))
    wanted = chain(torch.zeros(1, 0, dtype=torch.int64), logits[None].double())[0].softmax(-1)

    tokens = integrate(logits, **settings)
    assert torch.equal(tokens, tokens.sort().values), "the CDF does not ascend by token id"
    shares = torch.bincount(tokens, minlength=24) / GRID
    # An interval of the CDF holds its length times GRID midpoints, give or take one.
    torch.testing.assert_close(shares.double(), wanted, rtol=0, atol=1.01 / GRID)


@pytest.mark.usefixtures("even_draws")
def test_tokens_that_tie_stay_or_go_together() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0])
    assert integrate(logits, top_k=1).unique().tolist() == [1, 3]
    assert integrate(logits, top_k=3).unique().tolist() == [0, 1, 2, 3, 4]
    assert integrate(logits, top_p=0.1).unique().tolist() == [1, 3]


@pytest.mark.usefixtures("even_draws")
def test_a_nucleus_of_thousands() -> None:
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(2)) * 0.3
    kept = TopPLogitsWarper(0.9)(torch.zeros(1, 0), logits[None].double())[0]
    tokens = integrate(logits, top_p=0.9)
    assert kept[tokens].isfinite().all()
    cdf = kept.softmax(-1).cumsum(-1)
    midpoints = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    assert torch.equal(tokens, torch.searchsorted(cdf, midpoints, right=True))


def test_frequencies_over_seeds_fit_the_distribution(sample: Sample) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3))
    num_draws = 4000
    tokens = sample(
        logits.expand(num_draws, -1), batch(num_draws, seeds=torch.arange(num_draws), positions=0)
    ).tokens
    wanted = logits.double().softmax(-1) * num_draws
    statistic = ((torch.bincount(tokens, minlength=20) - wanted) ** 2 / wanted).sum()
    # 19 degrees of freedom; 50.8 is exceeded with probability 1e-4.
    assert statistic < 50.8


def test_a_low_temperature_is_nearly_greedy(any_sample: Sample) -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(4))
    tokens = any_sample(logits, batch(50, temperature=1e-4)).tokens
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 9e-6])
def test_a_tiny_temperature_is_greedy(sample: Sample, temperature: float) -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(4)) * 1e30
    logits[:, 7] = logits[:, 9] = logits.amax(-1)  # a random draw could choose either
    settings = {"top_p": 0.9, "min_p": 0.1}
    result = sample(logits, batch(50, temperature=temperature, **settings))
    assert result.valid.all()
    assert torch.equal(result.tokens, sample(logits, batch(50, temperature=0.0)).tokens)


@pytest.mark.parametrize(
    ("temperature", "settings"),
    [
        (0.0, {}),
        (1.0, {}),
        pytest.param(1.0, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_rows_without_usable_scores_are_invalid_and_harm_no_other(
    any_sample: Sample, temperature: float, settings: dict[str, float]
) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(10))
    beside = any_sample(logits, batch(6, temperature=temperature, **settings)).tokens
    # Row 0 overflows by its penalty, row 3 has every token banned.
    banned = BannedTokens(torch.full((40,), 3), torch.arange(40))
    logits[0, 1], logits[1, 5], logits[2, 5], logits[4] = 5.0, math.nan, math.inf, -math.inf
    result = any_sample(
        logits,
        batch(
            6,
            temperature=temperature,
            repetition_penalty=torch.tensor([1e-38, 1.0, 1.0, 1.0, 1.0, 1.0]),
            prompts=[[1]] * 6,
            outputs=[[]] * 6,
            banned=banned,
            **settings,
        ),
        num_top_logprobs=2,
    )
    assert result.valid.tolist() == [False] * 5 + [True]
    assert result.is_number.tolist() == [True, False, False, True, False, True]
    assert ((result.tokens >= 0) & (result.tokens < 40)).all()
    assert result.tokens[5] == beside[5]
    plain = any_sample(logits, batch(6, temperature=temperature, **settings))
    assert plain.valid.tolist() == [True, False, False, True, False, True]
    assert torch.equal(plain.tokens[[3, 5]], beside[[3, 5]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_hides_no_nan_of_the_model(any_sample: Sample, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = math.nan
    banned = BannedTokens(torch.tensor([0]), torch.tensor([2]))
    result = any_sample(logits, batch(2, temperature=temperature, banned=banned))
    assert result.valid.tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equals(any_sample: Sample, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 300, dtype=dtype)
    logits[0, [70, 299]], logits[1, [280, 133, 134]] = 1.0, 2.0
    assert any_sample(logits, batch(3, temperature=0.0)).tokens.tolist() == [70, 133, 0]


def test_greedy_rows_ignore_filters_but_not_penalties(any_sample: Sample) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
    settings = batch(
        2,
        temperature=0.0,
        top_k=2,
        top_p=0.1,
        frequency_penalty=torch.tensor([0.0, 0.6]),
        outputs=[[1, 1], [1, 1]],
    )
    assert any_sample(logits, settings).tokens.tolist() == [1, 2]


def test_nothing_to_apply_means_no_copy() -> None:
    logits = torch.zeros(2, 5)
    assert process_logits(logits, batch(2, temperature=0.5, top_k=3)) is logits


@pytest.mark.parametrize("as_tensor", [False, True])
def test_repetition_penalty_is_that_of_transformers(as_tensor: bool) -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(5))
    prompts, outputs = [[0, 1, 2, 2], [3], []], [[5, 2], [], [7, 7, 8]]
    penalties = [1.3, 1.0, 0.8]
    processed = process_logits(
        logits,
        batch(
            3,
            repetition_penalty=torch.tensor(penalties),
            prompts=[torch.tensor(p, dtype=torch.int64) for p in prompts] if as_tensor else prompts,
            outputs=outputs,
        ),
    )
    for row, penalty in enumerate(penalties):
        ids = torch.tensor([prompts[row] + outputs[row]])
        wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1].clone())
        torch.testing.assert_close(processed[row : row + 1], wanted)
    assert not torch.equal(processed[0], logits[0])


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(6))
    output = [4, 4, 4, 1]
    processed = process_logits(
        logits,
        batch(
            2,
            presence_penalty=torch.tensor([0.5, 0.0]),
            frequency_penalty=torch.tensor([0.25, 0.0]),
            prompts=[[0, 1], [0]],
            outputs=[output, output],
        ),
    )
    wanted = logits.clone()
    for token in range(8):
        wanted[0, token] -= 0.25 * output.count(token) + 0.5 * (token in output)
    torch.testing.assert_close(processed, wanted)


def test_penalties_then_bias_then_bans() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])
    before = logits.clone()
    processed = process_logits(
        logits,
        batch(
            1,
            repetition_penalty=2.0,
            frequency_penalty=0.5,
            prompts=[[0]],
            outputs=[[2, 2]],
            logit_bias=LogitBias(
                torch.tensor([0, 0, 0]), torch.tensor([0, 2, 3]), torch.tensor([5.0, 0.25, 9.0])
            ),
            banned=BannedTokens(torch.tensor([0]), torch.tensor([3])),
        ),
    )
    assert processed.tolist() == [[6.0, 1.0, -2.75, -math.inf]]
    assert torch.equal(logits, before)


@pytest.mark.usefixtures("even_draws")
def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.tensor([9.0, 1.0, 1.0, 9.0])
    rows = torch.arange(GRID).repeat_interleave(2)
    banned = BannedTokens(rows, torch.tensor([0, 3]).repeat(GRID))
    for settings in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.5}):
        assert integrate(logits, banned=banned, **settings).unique().tolist() == [1, 2]


def allowed_tokens(rows: Sequence[int], allowed: Sequence[Sequence[bool]]) -> AllowedTokens:
    """Rows and their masks, the bits set one by one."""
    bits = np.zeros((len(rows), -(-len(allowed[0]) // 32)), dtype=np.uint32)
    for place, each in enumerate(allowed):
        for token, is_allowed in enumerate(each):
            bits[place, token // 32] |= np.uint32(is_allowed << token % 32)
    return AllowedTokens(integers(rows), torch.from_numpy(bits.view(np.int32)))


@pytest.mark.parametrize("vocab", [1, 32, 33, 150])
def test_only_allowed_tokens_are_drawn(vocab: int, sample: Sample) -> None:
    rng = torch.Generator().manual_seed(vocab)
    allowed = (torch.rand(5, vocab, generator=rng) < 0.4).tolist()
    for each in allowed:
        each[int(torch.randint(vocab, (1,), generator=rng))] = True
    rows = [7, 0, 11, 3, 4]
    logits = torch.randn(12, vocab, generator=rng)
    bias = LogitBias(integers([7]), integers([0]), torch.tensor([50.0]))
    masked = logits.clone()
    masked[7, 0] += 50
    for row, each in zip(rows, allowed, strict=True):
        for token in range(vocab):
            if not each[token]:
                masked[row, token] = -math.inf
    for temperature in (0.0, 1.0):
        asked = batch(
            12,
            temperature=temperature,
            top_p=0.9,
            allowed=allowed_tokens(rows, allowed),
            logit_bias=bias,
        )
        result = sample(logits, asked, num_top_logprobs=1)
        wanted = sample(masked, batch(12, temperature=temperature, top_p=0.9))
        assert torch.equal(result.tokens, wanted.tokens)
        assert all(each[result.tokens[r]] for r, each in zip(rows, allowed, strict=True))
        assert result.logprobs is not None
        probabilities = logits.log_softmax(-1)[range(12), result.tokens]
        torch.testing.assert_close(result.logprobs, probabilities, rtol=1e-5, atol=1e-5)


def test_a_row_that_allows_nothing_is_invalid_alone(any_sample: Sample) -> None:
    result = any_sample(torch.zeros(3, 40), batch(3, allowed=allowed_tokens([1], [[False] * 40])))
    assert result.valid.tolist() == [True, False, True]
    assert result.is_number.all()


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.5, 3), (1 - 2.0**-53, 3)])
def test_borders_of_the_cdf_belong_to_the_next_token_with_any_probability(
    uniform: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens 1 and 3 have probability one half each; 0, 2 and 4 have zero and are never chosen."""
    monkeypatch.setattr("kernels.sampling.uniforms", lambda *_, **__: np.array([uniform]))
    never = -math.inf
    logits = torch.tensor([[never, 0.0, never, 0.0, never]])
    assert define(logits, batch(1)).tokens.tolist() == [token]


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.bfloat16))
def test_logprobs_are_of_the_model_not_of_the_processing(
    dtype: torch.dtype, any_sample: Sample
) -> None:
    logits = torch.randn(4, 230, generator=torch.Generator().manual_seed(7)).to(dtype)
    logits[1, :200] = -math.inf
    bias = LogitBias(torch.tensor([0]), torch.tensor([17]), torch.tensor([100.0]))
    settings = batch(4, temperature=0.3, top_k=5, logit_bias=bias)
    result = any_sample(logits, settings, num_top_logprobs=3)
    wanted = F.log_softmax(logits.double(), -1).float()
    assert result.tokens[0] == 17
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    torch.testing.assert_close(result.logprobs, wanted[range(4), result.tokens])
    best = wanted.sort(-1, descending=True)
    assert torch.equal(wanted.gather(1, result.top_ids), best.values[:, :3])
    torch.testing.assert_close(result.top_logprobs, best.values[:, :3])


def test_logprobs_only_when_asked(any_sample: Sample) -> None:
    logits = torch.zeros(2, 5)
    assert any_sample(logits, batch(2))[3:] == (None, None, None)
    chosen_only = any_sample(logits, batch(2), num_top_logprobs=0)
    assert chosen_only.logprobs is not None
    assert chosen_only.top_ids is not None
    assert chosen_only.top_ids.shape == (2, 0)
    none = any_sample(logits[:0], batch(0), num_top_logprobs=1)
    assert (none.tokens.shape, none.top_ids.shape) == ((0,), (0, 1))
    more_than_there_are = any_sample(logits, batch(2), num_top_logprobs=20)
    assert more_than_there_are.top_ids is not None
    assert more_than_there_are.top_ids.shape == (2, 5)


def test_the_uniforms_are_philox(any_sample: Sample) -> None:
    """Equal scores: the token is the uniform's place among them."""
    names = [(0, 0, 0), (-1, 3, 17), (-(1 << 63), 2**32 - 1, 1 << 40), ((1 << 63) - 1, 1, 5 << 32)]
    seeds, choices, positions = torch.tensor(names).T.contiguous()
    where = uniforms(
        *(seeds.numpy().view(np.uint64), choices.numpy(), positions.numpy()), purpose=Purpose.TOKEN
    )
    asked = batch(len(names), seeds=seeds, choices=choices, positions=positions)
    tokens = any_sample(torch.zeros(len(names), 500), asked).tokens
    assert tokens.tolist() == (where * 500).astype(int).tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it(sample: Sample) -> None:
    logits = torch.randn(24, 500, generator=torch.Generator().manual_seed(9)) * 2
    every = list(range(24))
    whole = sample(logits, mixed_batch(every)).tokens
    splits = [[r] for r in every] + [every[:5], every[5:], every[::-1], every[1::2], [7, 3, 20]]
    for rows in splits:
        part = sample(logits[rows], mixed_batch(rows)).tokens
        assert torch.equal(part, whole[rows]), rows


def test_draws_of_one_request_differ_by_position_and_choice(sample: Sample) -> None:
    logits = torch.zeros(200, 1000)
    by_position = sample(logits, batch(200, seeds=5)).tokens
    by_choice = sample(logits, batch(200, seeds=5, positions=0, choices=torch.arange(200))).tokens
    assert by_position.unique().numel() > 150
    assert by_choice.unique().numel() > 150
    assert torch.equal(by_position, sample(logits, batch(200, seeds=5)).tokens)
