"""The distance of a quantised model from its original, over a text.

Owns the two measures, the comparison of checkpoints, layer by layer, and its bound. Called by
deploy.quantisation's command and sensitivity, and by benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from deploy.quantisation.forward import last_hidden, log_probabilities
from deploy.quantisation.layers import Model, open_model
from topspin.errors import TopspinError

_ROWS_AT_ONCE: Final = 64
Name = TypeVar("Name", bound=Hashable)


class QualityMissed(TopspinError):
    """A written checkpoint is farther from its original than is allowed."""


class Quality(NamedTuple):
    """Mean KL divergence in nats per token, and both perplexities, over `positions` tokens."""

    kl: float
    original_perplexity: float
    perplexity: float
    positions: int


class Judged(NamedTuple):
    """Mean KL divergence from the original in nats per token, and perplexity."""

    kl: float
    perplexity: float


class ModelOutputs(NamedTuple):
    """A model's last hidden states [S, T, H], and the head [V, H] behind them."""

    hidden: Tensor
    head: Tensor


def judge(
    model: Model, plain: ModelOutputs, others: Mapping[Name, ModelOutputs], tokens: Tensor
) -> dict[Name, Judged]:
    """Compare the distributions of others with the plain ones, over tokens i64[S, T].

    All are behind the final norm of `model`.
    """
    following = tokens.roll(-1, dims=1)
    following[:, -1] = -1
    wanted = following.flatten()
    kls, losses = dict.fromkeys(others, 0.0), dict.fromkeys(others, 0.0)
    for start in range(0, len(wanted), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        (counted,) = torch.where(wanted[rows] >= 0)
        ids = wanted[rows][counted]
        expected = log_probabilities(model, plain.hidden.flatten(0, 1)[rows], plain.head)
        shares = expected.exp()
        for name, other in others.items():
            given = log_probabilities(model, other.hidden.flatten(0, 1)[rows], other.head)
            kls[name] += (shares * (expected - given)).sum().item()
            losses[name] -= given[counted, ids].sum().item()
    predicted = tokens.numel() - len(tokens)
    return {
        name: Judged(kls[name] / tokens.numel(), math.exp(losses[name] / predicted))
        for name in others
    }


@torch.inference_mode()
def compare(
    original: Path, coded: Path, tokens: Tensor, *, advance: Callable[[], None] = lambda: None
) -> Quality:
    """Return the quality of the checkpoint `coded` over tokens i64[S, T], dequantised, in fp32.

    `advance` is called after each layer of either.
    """
    plain, other = open_model(original), open_model(coded)
    expected = last_hidden(plain, tokens, advance=advance)
    found = last_hidden(other, tokens, advance=advance)
    before, after = ModelOutputs(expected, plain.lm_head), ModelOutputs(found, other.lm_head)
    both = judge(plain, before, {"before": before, "after": after}, tokens)
    return Quality(
        kl=both["after"].kl,
        original_perplexity=both["before"].perplexity,
        perplexity=both["after"].perplexity,
        positions=tokens.numel(),
    )


def check_bound(quality: Quality, max_kl: float | None) -> None:
    """Raise QualityMissed if the divergence is above what is allowed; None allows any."""
    if max_kl is not None and quality.kl > max_kl:
        raise QualityMissed(
            f"the checkpoint's measured KL is {quality.kl:.4g} nats per token, {max_kl:.4g} is "
            "allowed, and it is not kept: give sensitive layers more bits (`topspin sensitivity` "
            "ranks them), or allow more with --max-kl"
        )
