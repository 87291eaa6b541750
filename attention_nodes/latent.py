"""Attention to latents (MLA): one vector a token is the key and the value of all heads.

Owns a layer's weights that turn queries into those of latents, and what was attended to into the
values of heads (arXiv 2405.04434, section 2.1 and appendix C, "absorbed"); and those that make keys
and values of latents, which takes less arithmetic where a long prompt attends. Knows no layer norm
around it and no experts; decoder.py calls it.

Dimensions as in models.description.parts.LatentConfig: R rank, C the numbers cached, N heads, D the
numbers of a head's query and key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.contracts import AttentionMeta, HeadMatrices, HeadRows, LinearWeight, Matrix
from kernels.dispatch import Ops
from kernels.long_prompts import LongRows, rows_by_length
from models.checkpoints.weights import LatentWeights, LayerWeights
from models.description.parts import LatentConfig
from topspin.plan.precision import Format

HEADS_AT_ONCE: Final = 4
"""Whose keys and values are made together, which bounds the memory that these take."""


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """The weights of one layer beside those of decoder.Layer, packed.

    `expand` [2 * heads * D, R] make the keys of HEADS_AT_ONCE heads of a latent, 0 where the shared
    key comes, and behind them their values, with 0 up to D numbers each; (): nothing is expanded.
    """

    config: LatentConfig
    num_heads: int
    queries: LinearWeight | None
    query_norm: Tensor | None
    norm: Tensor
    to_latent: HeadMatrices
    to_values: HeadMatrices
    expand: tuple[LinearWeight, ...]


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
        expand=tuple(ops.pack_linear(each) for each in _expansions(config, own, ops)),
    )


def _expansions(config: LatentConfig, own: LatentWeights, ops: Ops) -> Iterator[Tensor]:
    """Yield the matrices of LatentLayer.expand, where a prompt is faster with these.

    On GPUs it has not been tried, and with deterministic kernels how a prompt is cut must not
    matter.
    """
    if ops.name != "cpu" or not config.expands:
        return
    keys, values = own.to_latent.transpose(1, 2), own.to_values
    for first in range(0, len(keys), HEADS_AT_ONCE):
        heads = slice(first, first + HEADS_AT_ONCE)
        parts = keys.new_zeros(2, len(keys[heads]), config.head_dim, config.rank)
        parts[0, :, : config.nope_dim] = keys[heads]
        parts[1, :, : config.value_dim] = values[heads]
        yield parts.flatten(0, 2)


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
    """Write the latents and shared keys of rows to the cache; return their queries [T, N, D].

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
    return queries


def attend(
    ops: Ops,
    layer: LatentLayer,
    queries: Tensor,
    cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
) -> Tensor:
    """Return the values [T, N * value_dim] of heads whose queries [T, N, D] attend to the cache.

    The rows' own latents are in the cache [B, block_size, 1, C] already. Those of long prompts
    attend to keys and values made for them, if the layer expands latents.
    """
    by_length = rows_by_length(meta) if layer.expand else None
    if by_length is None:
        return _absorbed(ops, layer, queries, cache, meta, scale)
    out = queries.new_empty(len(queries), layer.num_heads * layer.config.value_dim)
    if len(by_length.others):
        chosen = queries.index_select(0, by_length.others)
        found = _absorbed(ops, layer, chosen, cache, by_length.meta, scale)
        out.index_copy_(0, by_length.others, found)
    for each in by_length.long:
        _expanded(ops, layer, queries[each.rows], cache, each, scale=scale, out=out[each.rows])
    return out


def _absorbed(
    ops: Ops,
    layer: LatentLayer,
    queries: Tensor,
    cache: Tensor,
    meta: AttentionMeta,
    scale: float,
) -> Tensor:
    """Attend to latents: queries are turned into theirs, and what is found into values."""
    of_latents = ops.multiply_heads(queries, layer.to_latent)
    latents = cache[..., : layer.config.rank]
    attended = ops.paged_attention(of_latents, cache, latents, meta, scale=scale)
    return ops.multiply_heads(attended, layer.to_values).flatten(1)


def _expanded(
    ops: Ops,
    layer: LatentLayer,
    queries: Tensor,
    cache: Tensor,
    prompt: LongRows,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Attend to keys and values that are made of latents, some heads at a time.

    Writes the values [n, N * value_dim] of queries [n, N, D].
    """
    own = layer.config
    cached = _rows(cache, prompt.slots(cache.shape[1]), queries.dtype)
    latents, shared = cached[:, : own.rank].contiguous(), cached[:, None, own.rank :]
    values = out.view(len(out), layer.num_heads, own.value_dim)
    first = 0
    for weight in layer.expand:
        made = ops.linear(latents, weight).view(len(cached), 2, -1, own.head_dim)
        made[:, 0, :, own.nope_dim :] = shared
        heads = slice(first, first + made.shape[2])
        first = heads.stop
        found = ops.attend_prompt(queries[:, heads], made[:, 0], made[:, 1], scale=scale)
        values[:, heads] = found[..., : own.value_dim]


def _rows(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [n, C] of a cache [B, block_size, 1, C] in `dtype`."""
    rows = cache.flatten(0, 2)
    if cache.dtype == torch.float8_e4m3fn:  # torch takes no rows of these
        return rows.view(torch.uint8).index_select(0, slots).view(cache.dtype).to(dtype)
    return rows.index_select(0, slots)
