"""Compiled draws against distributions and nuclei computed in fp64 by sorting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.cpu.compiled.sampling import choose_rows
from kernels.philox import Purpose, uniforms
from kernels.sampling import SamplingBatch, sample


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Drawn(NamedTuple):
    """The fields of Chosen as tensors."""

    best: Tensor
    rest: Tensor
    counts: Tensor
    tokens: Tensor
    ids: Tensor


def draw(scores: Tensor, **parameters: float | Tensor) -> Drawn:
    given = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "uniforms": 0.5}
    kinds = {"top_k": torch.int64, "uniforms": torch.float64}
    columns = {
        name: torch.as_tensor(value).to(kinds.get(name, torch.float32)).expand(len(scores))
        for name, value in (given | parameters).items()
    }
    chosen = choose_rows(scores, **{name: each.contiguous() for name, each in columns.items()})
    return Drawn(*(torch.from_numpy(each) for each in chosen))


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 4099])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_draw_inverts_the_distribution(vocab: int, temperature: float) -> None:
    scores = torch.randn(40, vocab) * 3
    where = torch.rand(40).double()
    drawn = draw(scores, temperature=temperature, uniforms=where)
    assert torch.equal(drawn.best.float(), scores.amax(-1))
    cdf = (scores.double() / temperature).softmax(-1).cumsum(-1)
    tokens = drawn.tokens.long()[:, None]
    above = cdf.gather(1, tokens)[:, 0]
    below = torch.where(tokens > 0, cdf.gather(1, (tokens - 1).clamp(min=0)), 0.0)[:, 0]
    assert (above >= where - 1e-6).all()
    assert (below <= where + 1e-6).all()


@pytest.mark.parametrize("where", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_distribution(where: float) -> None:
    scores = torch.full((1, 50), -torch.inf)
    scores[0, [17, 18, 33]] = torch.tensor([0.0, 1.0, 0.5])
    token = int(draw(scores, uniforms=where).tokens[0])
    assert token == (17 if where == 0 else 33)


def test_scores_that_are_not_kept_are_not_drawn() -> None:
    scores = torch.randn(30, 200)
    kth = scores.topk(5).values[:, -1]
    drawn = draw(scores, top_k=5, uniforms=torch.rand(30))
    assert (scores.gather(1, drawn.tokens.long()[:, None])[:, 0] >= kth).all()
    drawn = draw(scores, min_p=0.6, uniforms=torch.rand(30))
    kept = scores >= scores.amax(-1, keepdim=True) + math.log(0.6)
    assert kept.gather(1, drawn.tokens.long()[:, None]).all()


@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 2000])
def test_greedy_rows_take_the_first_of_the_greatest(vocab: int) -> None:
    scores = (torch.randn(50, vocab) * 2).round()
    drawn = draw(scores, temperature=0)
    assert torch.equal(
        drawn.tokens.long(), (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    )


@pytest.mark.parametrize("k", [1, 2, 7, 64, 900, 999])
def test_the_kth_score_counts_equal_scores(k: int) -> None:
    scores = (torch.randn(20, 1000) * 20).round()
    kept = scores >= scores.topk(k).values[:, -1:]
    drawn = draw(scores, top_k=k, top_p=0.999999, temperature=1e6)
    assert [int(each) for each in drawn.counts] == kept.sum(-1).tolist()
    for row in range(20):
        ids = drawn.ids[row, : int(drawn.counts[row])].long()
        assert torch.equal(ids, kept[row].nonzero()[:, 0])


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.95, 0.999999])
def test_candidates_hold_the_nucleus(top_p: float, spread: float) -> None:
    scores = torch.randn(5, 3001) * spread
    drawn = draw(scores, top_p=top_p)
    weights = (scores.double() - scores.double().amax(-1, keepdim=True)).exp()
    for row in range(5):
        ids = drawn.ids[row, : int(drawn.counts[row])].long()
        assert (ids.diff() > 0).all()
        ordered, order = weights[row].sort(descending=True, stable=True)
        size = 1 + int((ordered.cumsum(0) < top_p * ordered.sum() * (1 - 1e-6)).sum())
        assert set(order[:size].tolist()) <= set(ids.tolist())
        together = weights[row, ids].sum() + drawn.rest[row]
        torch.testing.assert_close(together, weights[row].sum(), rtol=1e-5, atol=0)


def test_rows_without_numbers() -> None:
    scores = torch.randn(5, 40)
    scores[1, 20], scores[2, 39], scores[3] = torch.nan, torch.inf, -torch.inf
    drawn = draw(scores)
    assert drawn.best.isfinite().tolist() == [True, False, False, False, True]
    assert drawn.tokens[1:4].tolist() == [0, 0, 0]


def test_threads_and_other_rows_do_not_change_a_draw() -> None:
    scores, where = torch.randn(20, 5000), torch.rand(20)
    torch.set_num_threads(1)
    together = draw(scores, uniforms=where, temperature=1.3)
    torch.set_num_threads(3)
    again = draw(scores, uniforms=where, temperature=1.3)
    assert torch.equal(together.tokens, again.tokens)
    for row in range(20):
        alone = draw(scores[row : row + 1], uniforms=where[row : row + 1], temperature=1.3)
        assert torch.equal(alone.tokens[0], together.tokens[row])


def test_a_nucleus_is_drawn_as_by_sorting_everything() -> None:
    """The whole path that a node uses, against fp64 over the sorted row."""
    rows, vocab, top_p, temperature = 64, 20000, 0.9, 0.8
    logits = torch.randn(rows, vocab) * 2.5
    zeros, ones = torch.zeros(rows), torch.ones(rows)
    ids = torch.arange(rows)
    batch = SamplingBatch(
        temperature=ones * temperature,
        top_k=ids * 0,
        top_p=ones * top_p,
        min_p=zeros,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=ones,
        seeds=ids,
        choices=ids * 0,
        positions=ids,
    )
    where = uniforms(
        ids.numpy().astype("uint64"), (ids * 0).numpy(), ids.numpy(), purpose=Purpose.TOKEN
    )
    probabilities = (logits.double() / temperature).softmax(-1)
    ordered = probabilities.sort(descending=True).values
    sizes = 1 + (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True)
    kept = probabilities >= ordered.gather(1, sizes - 1)
    cdf = (probabilities * kept).cumsum(-1)
    targets = cdf[:, -1:] * torch.as_tensor(where).double()[:, None]
    wanted = torch.searchsorted(cdf, targets, right=True)[:, 0]
    assert torch.equal(sample(logits, batch).tokens, wanted)
