"""The facts of a checkpoint that a plan depends on.

Owns their structure. models.description.facts reads them; topspin.plan.from_flags makes plans by
them, topspin.plan.rules.checks compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from topspin.plan.precision import Rules


class ModelFacts(NamedTuple):
    """The facts of a checkpoint that a plan depends on.

    `num_experts` is the number of routed experts per MoE layer; 0, for a dense model, makes an
    engine without expert nodes. `shares_prefixes`: a token's key and value depend only on the
    tokens before it. `windows` are those of all layers, None where a layer has none; (): of none.
    `head_dim`: the numbers of a key, None: not known. `latent_rank`: the first so many of them are
    the value too (latents), None: heads have values. `num_mtp_layers`: layers of multi-token
    prediction behind the others. `precision` are a quantised checkpoint's rules by the kernels that
    serve it as it is.
    """

    dtype: str
    max_positions: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    shares_prefixes: bool = True
    windows: tuple[int | None, ...] = ()
    head_dim: int | None = None
    latent_rank: int | None = None
    num_mtp_layers: int = 0
    precision: Mapping[str, Rules] = MappingProxyType({})
