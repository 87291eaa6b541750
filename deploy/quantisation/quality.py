"""How far a quantised checkpoint is from its original, over a text.

Owns the comparison of both, layer by layer, and its bound. Called by deploy.quantisation.command
and by benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deploy.quantisation.forward import divergences, last_hidden, perplexity
from deploy.quantisation.layers import open_model
from topspin.errors import TopspinError


class QualityMissed(TopspinError):
    """A written checkpoint is farther from its original than is allowed."""


class Quality(NamedTuple):
    """Mean KL divergence in nats per token, and both perplexities, over `positions` tokens."""

    kl: float
    original_perplexity: float
    perplexity: float
    positions: int


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
    return Quality(
        kl=divergences((plain, expected, None), (other, found, None)).mean().item(),
        original_perplexity=perplexity(plain, expected, tokens),
        perplexity=perplexity(other, found, tokens),
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
