"""Attention to latents (MLA): one vector a token is the key and the value of all heads.

Owns a layer's weights that turn queries into those of latents, and what was attended to into the
values of heads (arXiv 2405.04434, section 2.1 and appendix C, "absorbed"). Knows no layer norm
around it and no experts; decoder.py calls it.

Dimensions as in models.description.parts.LatentConfig: R rank, C the numbers cached, N heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contracts import HeadMatrices, HeadRows, LinearWeight, Matrix
from kernels.dispatch import Ops
from models.checkpoints.weights import LayerWeights
from models.description.parts import LatentConfig
from topspin.plan.precision import Format


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """The weights of one layer beside those of decoder.Layer, packed."""

    config: LatentConfig
    num_heads: int
    queries: LinearWeight | None
    query_norm: Tensor | None
    norm: Tensor
    to_latent: HeadMatrices
    to_values: HeadMatrices


def pack_latent(
    config: LatentConfig, num_heads: int, weights: LayerWeights, ops: Ops, weight_format: Format
) -> LatentLayer:
    """Pack the weights of a layer that has latents."""
    own = weights.latent
    assert own is not None
    assert weights.k_norm is not None
    queries: Matrix | None = own.queries
    return LatentLayer(
        config=config,
        num_heads=num_heads,
        queries=None if queries is None else ops.pack_linear(queries, weight_format),
        query_norm=weights.q_norm,
        norm=weights.k_norm,
        to_latent=ops.pack_heads(own.to_latent),
        to_values=ops.pack_heads(own.to_values),
    )


def store_latents(
    ops: Ops,
    layer: LatentLayer,
    projected: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Write the latents and shared keys of rows to the cache; return queries of latents [T, N, C].

    `projected` [T, q rank + C] (without a queries' latent: [T, N * head_dim + C]) is changed.
    """
    own = layer.config
    first = projected[:, : -own.cached_dim]
    if layer.queries is not None:
        assert layer.query_norm is not None
        first = ops.rms_norm(first, layer.query_norm, eps=own.norm_eps)
        first = ops.linear(first, layer.queries)
    queries = first.view(len(first), layer.num_heads, own.head_dim)
    cached = projected[:, -own.cached_dim :]
    latent, shared = torch.split(cached, [own.rank, own.rope_dim], dim=1)
    ops.rms_norm(latent, layer.norm, eps=own.norm_eps, out=latent)
    ops.rotate_and_store(
        HeadRows(
            q=queries[..., own.nope_dim :],
            k=shared[:, None],
            v=latent[:, None],
            cos=cos,
            sin=sin,
            k_cache=cache[..., own.rank :],
            v_cache=cache[..., : own.rank],
            slots=slots,
        )
    )
    return ops.multiply_heads(queries, layer.to_latent)


def values_of(ops: Ops, layer: LatentLayer, attended: Tensor) -> Tensor:
    """Return the values [T, N * value_dim] of heads that attended to latents [T, N, R]."""
    return ops.multiply_heads(attended, layer.to_values).flatten(1)
