"""The steps of an engine from the cost model's parts, layer by layer: what steps.py must equal.

Plain and slow: nothing is kept that was asked for once, and no device is slowed or has rallies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deploy.placement.cost import AttentionLayer, BatchRows, ExpertLayer, link_s
from deploy.placement.devices import DeviceProfile, LinkProfile
from deploy.placement.routing import rows_reached, shares_of_nodes, touched
from deploy.placement.shapes import ModelShape, PrecisionOf
from topspin.pipeline import HopTimes

# Of a row's frame beside its numbers: an expert's id and its weight, four bytes each.
_PAIR_BYTES: Final = 8


class PlainReplica(NamedTuple):
    """The attention node, and its rows in each micro-batch."""

    device: DeviceProfile
    rows: BatchRows
    threads: int = 1


class PlainHost(NamedTuple):
    """An expert node that holds so many experts of each layer."""

    device: DeviceProfile
    held: int
    threads: int = 1


@dataclass(frozen=True)
class PlainStep:
    """A step of one attention node; `skew`: see routing.py.

    `local_layers` keep their routed experts on the attention node.
    """

    model: ModelShape
    precision_of: PrecisionOf
    replica: PlainReplica
    hosts: Sequence[PlainHost]
    link: LinkProfile
    skew: float = 0.0
    local_layers: frozenset[int] = field(default_factory=frozenset)

    def hops(self) -> list[HopTimes]:
        """Return the times of each layer for one micro-batch, of the slowest host.

        A layer without a hop has t_e = t_c = 0; its experts' time, if any, is in t_a.
        """
        return [self._hop(layer) for layer in range(self.model.num_layers)]

    def _hop(self, layer: int) -> HopTimes:
        model, (device, rows, threads) = self.model, self.replica
        half = AttentionLayer(device, model, layer, self.precision_of, threads=threads)
        t_a = half.seconds(rows)
        if not model.layers[layer].is_moe:
            return HopTimes(t_a, 0.0, 0.0)
        if layer in self.local_layers:
            own = PlainHost(device, model.num_experts, threads)
            (chosen,) = self._chosen([own])
            return HopTimes(t_a + self._experts_s(own, layer, chosen, rows.total), 0.0, 0.0)
        there = model.hidden_size * model.itemsize
        row_bytes = there + model.top_k * _PAIR_BYTES / 2  # the mean of both ways
        t_e = t_c = sent = 0.0
        for host, chosen in zip(self.hosts, self._chosen(self.hosts), strict=True):
            reached = rows_reached(chosen, rows.total)
            t_e = max(t_e, self._experts_s(host, layer, chosen, reached))
            t_c = max(t_c, link_s(self.link, reached * row_bytes))
            sent += reached * row_bytes
        return HopTimes(t_a, t_e, max(t_c, link_s(self.link, sent)))

    def _chosen(self, hosts: Sequence[PlainHost]) -> list[list[float]]:
        """Return how often each expert of each host is chosen."""
        held = [host.held for host in hosts]
        return shares_of_nodes(self.model.num_experts, self.model.top_k, held, self.skew)

    def _experts_s(
        self, host: PlainHost, layer: int, chosen: Sequence[float], reached: float
    ) -> float:
        rows = self.replica.rows.total
        precision, threads = self.precision_of("experts", layer), host.threads
        experts = ExpertLayer(host.device, self.model, layer, precision, threads=threads)
        return experts.seconds(
            rows=reached, pairs=rows * math.fsum(chosen), touched=touched(chosen, rows)
        )
