"""The steps of an engine from the cost model's parts, layer by layer: what steps.py must equal.

Plain and slow: nothing is kept that was asked for once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deploy.placement.cost import Rows, attention_layer_s, barrier_s, experts_layer_s, link_s
from deploy.placement.devices import DeviceProfile, Link
from deploy.placement.routing import rows_reached, shares_of_nodes, touched
from deploy.placement.shapes import ModelShape, PrecisionOf
from deploy.placement.tables import rally_factors
from topspin.pipeline import HopTimes

# Of a row's frame beside its numbers: an expert's id and its weight, four bytes each.
_PAIR_BYTES: Final = 8


class Replica(NamedTuple):
    """An attention node, and its rows in each micro-batch.

    `spread`: the standard deviation of its keys over all rows, as a share of their mean (contexts
    differ from replica to replica, and the step waits for the slowest).
    """

    device: DeviceProfile
    rows: Rows
    threads: int = 1
    spread: float = 0.0
    slow: float = 1.0


class ExpertHost(NamedTuple):
    """An expert node that holds so many experts of each layer."""

    device: DeviceProfile
    held: int
    threads: int = 1
    slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step is run, for layer_hops().

    `payload_itemsize`: bytes of a number on the way to the experts (answers have the model's).
    `local_layers` keep their routed experts on the attention nodes. `skew`: see routing.py.
    """

    micro_batches: int = 1
    shares_cores: bool = False
    skew: float = 0.0
    payload_itemsize: float = 2.0
    local_layers: frozenset[int] = field(default_factory=frozenset)


def layer_hops(
    model: ModelShape,
    precision_of: PrecisionOf,
    replicas: Sequence[Replica],
    hosts: Sequence[ExpertHost],
    link: Link,
    setting: Setting,
) -> list[HopTimes]:
    """Return the times of each layer for one micro-batch: of the slowest replica and host.

    A layer without a hop has t_e = t_c = 0; its experts' time, if any, is in t_a.
    """
    shares = _host_shares(model, hosts, setting.skew)
    everyone = shares_of_nodes(model.num_experts, model.top_k, [model.num_experts], setting.skew)
    found: list[HopTimes] = []
    known: dict[tuple[object, ...], HopTimes] = {}
    for layer, kind in enumerate(model.layers):
        is_local = layer in setting.local_layers
        formats = (precision_of("attention", layer), precision_of("mlp", layer))
        key = (kind, is_local, formats, kind.is_moe and precision_of("experts", layer))
        if key not in known:
            known[key] = _hop(
                model,
                layer,
                precision_of,
                replicas,
                () if is_local or not kind.is_moe else hosts,
                everyone if is_local else shares,
                link,
                setting,
            )
        found.append(known[key])
    return found


def _host_shares(model: ModelShape, hosts: Sequence[ExpertHost], skew: float) -> list[list[float]]:
    if not hosts:
        return []
    return shares_of_nodes(model.num_experts, model.top_k, [host.held for host in hosts], skew)


def _hop(
    model: ModelShape,
    layer: int,
    precision_of: PrecisionOf,
    replicas: Sequence[Replica],
    hosts: Sequence[ExpertHost],
    shares: Sequence[Sequence[float]],
    link: Link,
    setting: Setting,
) -> HopTimes:
    weight_format = precision_of("experts", layer)
    moments = []
    for replica in replicas:
        mean_s = replica.slow * _replica_s(
            model, layer, precision_of, replica, None if hosts else shares, setting
        )
        more = replica.rows._replace(context=replica.rows.context * (1 + replica.spread))
        deviation_s = 0.0
        if replica.spread:
            moved = replica._replace(rows=more)
            deviation_s = replica.slow * _replica_s(
                model, layer, precision_of, moved, None if hosts else shares, setting
            )
            deviation_s -= mean_s
        moments.append((mean_s, max(0.0, deviation_s)))
    t_a = barrier_s(moments)
    if not hosts:
        return HopTimes(t_a, 0.0, 0.0)
    rows = sum(replica.rows.total for replica in replicas)
    widest = max(replica.rows.total for replica in replicas)
    t_e = t_c = 0.0
    sent = 0.0
    for host, chosen in zip(hosts, shares, strict=True):
        factor = rally_factors(
            host.device,
            shares_cores=setting.shares_cores,
            micro_batches=setting.micro_batches,
            rows=rows,
        ).experts
        reached = rows_reached(chosen, rows)
        host_s = experts_layer_s(
            host.device,
            model,
            layer,
            weight_format,
            rows=reached,
            pairs=rows * math.fsum(chosen),
            touched=touched(chosen, rows),
            threads=host.threads,
        )
        t_e = max(t_e, host.slow * factor * host_s)
        t_c = max(t_c, link_s(link, reached * _row_bytes(model, setting)))
        sent += rows_reached(chosen, widest) * _row_bytes(model, setting)
    return HopTimes(t_a, t_e, max(t_c, link_s(link, sent)))


def _row_bytes(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of a row on the wire, the mean of both ways."""
    there = model.hidden_size * setting.payload_itemsize + model.top_k * _PAIR_BYTES
    return (there + model.hidden_size * model.itemsize) / 2


def _replica_s(
    model: ModelShape,
    layer: int,
    precision_of: PrecisionOf,
    replica: Replica,
    local: Sequence[Sequence[float]] | None,
    setting: Setting,
) -> float:
    """Return the seconds of a layer on a replica; with its experts if they are `local`."""
    device, rows, threads = replica.device, replica.rows, replica.threads
    factor = rally_factors(
        device,
        shares_cores=setting.shares_cores,
        micro_batches=setting.micro_batches,
        rows=rows.total,
    ).attention
    found_s = factor * attention_layer_s(device, model, layer, precision_of, rows, threads=threads)
    if local is None or not model.layers[layer].is_moe:
        return found_s
    chosen = local[0]
    return found_s + experts_layer_s(
        device,
        model,
        layer,
        precision_of("experts", layer),
        rows=rows.total,
        pairs=rows.total * model.top_k,
        touched=touched(chosen, rows.total),
        threads=threads,
    )
