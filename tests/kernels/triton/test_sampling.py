"""The sampling kernels against an fp64 definition in numpy, and against the CPU's sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import sampling
from kernels.philox import Purpose, as_signed, uniforms
from kernels.sampling import AllowedTokens, BannedTokens, LogitBias, SamplingBatch, process_logits
from kernels.triton.sampling import launches as triton_sampling
from kernels.triton.sampling.launches import plan_sampling, processed
from tests.kernels.test_sampling import batch
from tests.pairwise import cover_values

NUMPY_COMPLAINS = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the tests' few scores into several splits of several blocks."""
    monkeypatch.setattr(triton_sampling, "SPLIT_SIZE", 128)
    monkeypatch.setattr(triton_sampling, "BLOCK", 64)
    monkeypatch.setattr(triton_sampling, "TALLY_BLOCK", 64)


def draw_logits(num_rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def distribution(scores: Tensor, batch: SamplingBatch, row: int) -> np.ndarray:
    """Return the probabilities f64[V] of a row by definition: sort, cut, normalise."""
    values = scores[row].double().numpy()
    temperature, top_p = float(batch.temperature[row]), float(batch.top_p[row])
    top_k, min_p = int(batch.top_k[row]), float(batch.min_p[row])
    weights = np.exp((values - values.max()) / temperature)
    kept = np.ones(len(values), dtype=bool)
    if min_p > 0:
        kept &= values >= np.float32(values.max() + temperature * math.log(min_p))
    if 0 < top_k < len(values):
        kept &= values >= np.sort(values)[-top_k]
    if top_p < 1:
        order = np.argsort(-values[kept], kind="stable")
        mass = weights[kept][order].cumsum()
        num_kept = 1 + int((mass < top_p * mass[-1]).sum())
        kept &= values >= values[kept][order][num_kept - 1]
    return np.where(kept, weights, 0) / weights[kept].sum()


def by_definition(scores: Tensor, batch: SamplingBatch) -> tuple[list[int], list[float]]:
    """Return each row's token and the distance of its uniform from a border of the CDF."""
    draws = uniforms(
        batch.seeds.numpy().view(np.uint64),
        batch.choices.numpy(),
        batch.positions.numpy(),
        purpose=Purpose.TOKEN,
    )
    tokens, distances = [], []
    for row, uniform in enumerate(draws):
        if batch.temperature[row] < sampling.MIN_TEMPERATURE:
            tokens.append(int(scores[row].argmax()))
            distances.append(1.0)
            continue
        cdf = distribution(scores, batch, row).cumsum()
        tokens.append(int((cdf <= cdf[-1] * uniform).sum()))
        distances.append(float(np.abs(cdf - uniform).min()))
    return tokens, distances


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1000},
        {"top_p": 0.0},
        {"min_p": 0.02, "top_k": 30, "top_p": 0.9, "temperature": 1.3},
        # By default in rows of one batch: see below.
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
    assert result.tokens.tolist() == by_definition(logits, rows)[0]
    assert result.valid.all()


def test_every_row_has_settings_of_its_own(device: torch.device) -> None:
    num_rows = 12
    row = torch.arange(num_rows)
    rows = batch(
        num_rows,
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.8])[row % 4],
        top_k=torch.tensor([0, 10, 3])[row % 3],
        top_p=torch.tensor([1.0, 0.9, 0.6, 1.0, 0.99])[row % 5],
        min_p=torch.tensor([0.0, 0.0, 0.1])[row % 3],
        seeds=torch.tensor([as_signed((1 << 64) - 1 - 3 * r) for r in range(num_rows)]),
        choices=row % 2,
        positions=row * 7 + (row % 2 << 40),
    )
    logits = draw_logits(num_rows, 150, seed=1)
    result = triton_sampling.sample(logits.to(device), rows)
    wanted, distances = by_definition(logits, rows)
    assert result.tokens.tolist() == wanted
    # The CPU computes weights in fp32.
    clear = torch.tensor(distances) > 1e-5
    assert clear.sum() >= num_rows - 2
    cpus = sampling.sample(logits, rows).tokens
    assert torch.equal(result.tokens.cpu()[clear], cpus[clear])
    alone = triton_sampling.sample(logits[5:6].to(device), one_row(rows, 5))
    assert alone.tokens[0] == result.tokens[5]


def one_row(rows: SamplingBatch, row: int) -> SamplingBatch:
    columns = {
        name: value[row : row + 1]
        for name, value in vars(rows).items()
        if isinstance(value, Tensor)
    }
    return SamplingBatch(**columns)


def test_uniforms_are_philoxs_bit_for_bit(device: torch.device) -> None:
    """A row of n equal scores gives floor(uniform * n): its uniform to a precision of 1/n."""
    vocab = 500
    seeds = torch.tensor([as_signed(s) for s in (0, 1, (1 << 64) - 1, 0xFEDCBA9876543210)])
    rows = batch(
        4, seeds=seeds, choices=torch.tensor([0, 3, 2**32 - 1, 1]), positions=(5 << 32) + 17
    )
    result = triton_sampling.sample(torch.zeros(4, vocab, device=device), rows)
    draws = uniforms(
        seeds.numpy().view(np.uint64),
        rows.choices.numpy(),
        rows.positions.numpy(),
        purpose=Purpose.TOKEN,
    )
    assert result.tokens.tolist() == np.floor(draws * vocab).astype(int).tolist()
    scores = torch.zeros(4, 2, device=device)
    plan = plan_sampling(rows, 2, device)
    found = triton_sampling._Rows(scores, scores, plan)
    found.survey(with_norm=False)
    assert found._uniforms.tolist() == draws.tolist()


def test_greedy_takes_the_lowest_id_of_equals(device: torch.device) -> None:
    logits = torch.zeros(3, 300, dtype=torch.bfloat16, device=device)
    logits[0, [70, 299]], logits[1, [280, 133, 134]] = 1.0, 2.0
    assert triton_sampling.sample(logits, batch(3, temperature=0.0)).tokens.tolist() == [70, 133, 0]


def penalised(num_rows: int, **settings: Any) -> SamplingBatch:
    rng = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 60, (num_rows, 30), generator=rng)
    return batch(
        num_rows,
        prompts=[tokens[row, : row * 3].tolist() for row in range(num_rows)],
        outputs=[tokens[row, row * 3 :] for row in range(num_rows)],
        **settings,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": torch.tensor([0.5, 0.0, -1.1, 0.0])},
        {"frequency_penalty": torch.tensor([0.3, 0.0, 0.7, 0.1])},
        {"repetition_penalty": torch.tensor([1.3, 1.0, 0.8, 1.1])},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.23, "presence_penalty": 0.1},
    ],
    ids=lambda s: "+".join(s),
)
def test_penalties_are_the_cpus_to_the_last_bit(
    settings: dict[str, Any], device: torch.device
) -> None:
    logits = draw_logits(4, 130, seed=2)
    rows = penalised(4, **settings)
    bias = LogitBias(torch.tensor([0, 3]), torch.tensor([7, 7]), torch.tensor([1.5, -2.0]))
    rows = SamplingBatch(**{**vars_of(rows), "logit_bias": bias})
    scores = processed(logits.to(device), plan_sampling(rows, 130, device))
    wanted = process_logits(logits, rows)
    assert torch.equal(scores.cpu(), wanted)
    assert not torch.equal(wanted, logits)
    result = triton_sampling.sample(logits.to(device), rows)
    assert result.tokens.tolist() == by_definition(wanted, rows)[0]


def vars_of(rows: SamplingBatch) -> dict[str, Any]:
    """Return the fields of a batch without its derived attributes."""
    return {name: getattr(rows, name) for name in SamplingBatch.__dataclass_fields__}


def test_bans_and_biases_without_penalties(device: torch.device) -> None:
    logits = draw_logits(2, 100, seed=3).bfloat16()
    best = logits.float().argmax(-1)
    banned = BannedTokens(torch.tensor([0, 1]), best)
    bias = LogitBias(torch.tensor([1]), torch.tensor([42]), torch.tensor([100.0]))
    rows = batch(2, temperature=torch.tensor([0.0, 1.0]), banned=banned, logit_bias=bias)
    result = triton_sampling.sample(logits.to(device), rows)
    wanted = process_logits(logits, rows)
    assert result.tokens.tolist() == [int(wanted[0].argmax()), 42]
    assert result.tokens[0] != best[0]


def test_masks_are_those_of_the_definition(device: torch.device) -> None:
    logits = draw_logits(4, 150, seed=3).bfloat16()
    bits = torch.randint(-(1 << 31), 1 << 31, (2, 5), dtype=torch.int32)
    rows = batch(4, allowed=AllowedTokens(torch.tensor([3, 1]), bits))
    scores = processed(logits.to(device), plan_sampling(rows, 150, device))
    assert torch.equal(scores.cpu(), process_logits(logits, rows))
    assert torch.equal(scores.cpu().isinf().any(-1), torch.tensor([False, True, False, True]))


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


@NUMPY_COMPLAINS
@pytest.mark.parametrize(
    ("temperature", "settings"),
    cover_values([0.0, 1.0], [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}]),
)
def test_rows_without_usable_scores_are_invalid_and_harm_no_other(
    temperature: float, settings: dict[str, float], device: torch.device
) -> None:
    logits = draw_logits(6, 140, seed=4)
    # Row 0 overflows by its penalty, row 3 has every token banned, row 1's NaN is banned too.
    banned = BannedTokens(
        torch.cat((torch.full((140,), 3), torch.tensor([1]))),
        torch.cat((torch.arange(140), torch.tensor([5]))),
    )
    logits[0, 1], logits[1, 5], logits[2, 5], logits[4] = 5.0, math.nan, math.inf, -math.inf
    rows = batch(
        6,
        temperature=temperature,
        repetition_penalty=torch.tensor([1e-38, 1.0, 1.0, 1.0, 1.0, 1.0]),
        prompts=[[1]] * 6,
        outputs=[[]] * 6,
        banned=banned,
        **settings,
    )
    result = triton_sampling.sample(logits.to(device), rows, num_top_logprobs=2)
    assert result.valid.dtype == torch.bool
    assert result.valid.tolist() == [False] * 5 + [True]
    assert result.is_number.tolist() == [True, False, False, True, False, True]
    assert ((result.tokens >= 0) & (result.tokens < 140)).all()
    plain = batch(6, temperature=temperature, **settings)
    beside = triton_sampling.sample(logits[5:].to(device), one_row(plain, 5))
    assert result.tokens[5] == beside.tokens[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_models(dtype: torch.dtype, device: torch.device) -> None:
    logits = draw_logits(4, 230, seed=7).to(dtype)
    logits[1, :200] = -math.inf
    bias = LogitBias(torch.tensor([0]), torch.tensor([17]), torch.tensor([100.0]))
    rows = batch(4, temperature=0.3, top_k=5, logit_bias=bias)
    result = triton_sampling.sample(logits.to(device), rows, num_top_logprobs=3)
    wanted = logits.double().log_softmax(-1).float()
    assert result.tokens[0] == 17
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    tokens = result.tokens.cpu()
    torch.testing.assert_close(result.logprobs.cpu(), wanted[range(4), tokens])
    torch.testing.assert_close(result.top_logprobs.cpu(), wanted.topk(3).values)
    torch.testing.assert_close(wanted.gather(1, result.top_ids.cpu()), wanted.topk(3).values)
    few = triton_sampling.sample(logits[2:, :2].to(device), batch(2), num_top_logprobs=20)
    assert few.top_ids is not None
    assert few.top_ids.shape == (2, 2)
    assert triton_sampling.sample(logits.to(device), batch(4))[3:] == (None, None, None)


def test_a_view_of_wider_logits(device: torch.device) -> None:
    wide = draw_logits(3, 300, seed=8).to(device)
    rows = batch(3, top_p=0.8, seeds=4)
    part = triton_sampling.sample(wide[:, 20:220], rows)
    whole = triton_sampling.sample(wide[:, 20:220].contiguous(), rows)
    assert torch.equal(part.tokens, whole.tokens)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    plan = plan_sampling(batch(3), 10, device)
    with pytest.raises(ValueError, match="2 rows of logits, 3 in the plan"):
        triton_sampling.draw(torch.zeros(2, 10, device=device), plan)
    with pytest.raises(ValueError, match="float16"):
        triton_sampling.draw(torch.zeros(3, 10, device=device, dtype=torch.float16), plan)


def test_no_rows(device: torch.device) -> None:
    result = triton_sampling.sample(torch.zeros(0, 10, device=device), batch(0), num_top_logprobs=1)
    assert result.tokens.shape == (0,)
    assert result.top_ids is not None
    assert result.top_ids.shape == (0, 1)
