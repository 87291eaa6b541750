"""The numbers of (token, expert) pairs that each logical expert and expert node serves.

Owns the sums since start, also of the experts woken, and moving averages per MoE layer, and gives
the nodes' times to speeds.py; turns the
slots of a node's report into logical experts by the table of the version that the report names
(formation.py keeps the tables). Called by service.py and balancer.py.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from server.scheduler.experts.balance import peak_and_mean
from server.scheduler.experts.speeds import NodeSpeeds
from server.scheduler.nodes.formation import Formation
from topspin.errors import ProtocolError
from topspin.messages import ExpertCounts, unpack_ints

# Averages are kept as sums whose weight grows; beyond this they are scaled down.
MAX_WEIGHT = 1e12


class LayerCounts(NamedTuple):
    """A node's counts in one layer: the experts in slot order, and their pairs."""

    experts: tuple[int, ...]
    counts: list[int]


class _Layer:
    """Sums of one layer. Later counts weigh more, which gives an exponential average.

    The weight doubles with every half-life. Reports gather in `_fresh` until fold(), so that
    those of one round weigh the same in any order of nodes.
    """

    def __init__(self, num_experts: int, num_nodes: int, half_life_pairs: float) -> None:
        self.tokens = [0] * num_experts
        self._recent = [0.0] * num_experts
        self._of_nodes = [0.0] * num_nodes
        self._fresh = [0] * num_experts
        self._fresh_of_nodes = [0] * num_nodes
        self._weight = 1.0
        self._half_life_pairs = half_life_pairs

    def add(self, node: int | None, found: LayerCounts) -> None:
        """Add counts; `node` None: they are of a table that is no longer in use."""
        for expert, count in zip(found.experts, found.counts, strict=True):
            self.tokens[expert] += count
            self._fresh[expert] += count
        if node is not None:
            self._fresh_of_nodes[node] += sum(found.counts)

    def fold(self) -> None:
        """End a round of reports."""
        self._recent, self._of_nodes = self.recent(), self.of_nodes()
        self._weight = self._next_weight()
        self._fresh = [0] * len(self._fresh)
        self._fresh_of_nodes = [0] * len(self._fresh_of_nodes)
        if self._weight > MAX_WEIGHT:
            self._recent = [value / self._weight for value in self._recent]
            self._of_nodes = [value / self._weight for value in self._of_nodes]
            self._weight = 1.0

    def recent(self) -> list[float]:
        """Return the averages by expert, in an arbitrary unit."""
        weight = self._next_weight()
        return [r + f * weight for r, f in zip(self._recent, self._fresh, strict=True)]

    def of_nodes(self) -> list[float]:
        """Return the averages by node, in the same unit."""
        weight = self._next_weight()
        return [r + f * weight for r, f in zip(self._of_nodes, self._fresh_of_nodes, strict=True)]

    def forget_nodes(self, num_nodes: int) -> None:
        """Reset the averages per node."""
        self._of_nodes = [0.0] * num_nodes
        self._fresh_of_nodes = [0] * num_nodes

    def _next_weight(self) -> float:
        return self._weight * float(2 ** min(sum(self._fresh) / self._half_life_pairs, 64))


class ExpertLoad:
    """Sums and averages per MoE layer and logical expert, and per node.

    `activations` and `batches` are the sums of the reports'.
    """

    def __init__(self, formation: Formation, *, half_life_pairs: int = 512) -> None:
        """`half_life_pairs` counts pairs per expert, in each layer."""
        self._formation = formation
        table = self._averaged = formation.table
        self._layers = [
            _Layer(table.num_experts, table.num_nodes, half_life_pairs * table.num_experts)
            for _ in table.slots
        ]
        self._reported: set[int] = set()
        self._speeds = NodeSpeeds(table.num_nodes)
        self.activations = 0
        self.batches = 0

    def _follow(self) -> None:
        """Reset the averages per node if the table in use has changed."""
        table = self._formation.table
        if table is not self._averaged:
            self._averaged = table
            for layer in self._layers:
                layer.forget_nodes(table.num_nodes)

    def add(self, report: ExpertCounts) -> None:
        """Add a node's report; raises ProtocolError, and adds nothing, if it does not fit."""
        self._follow()
        table = self._formation.recent_table(report.table_version)
        if table is None and report.table_version < self._formation.table.version:
            return  # too late: the table of its slots is forgotten; such pairs are few
        if table is None or not 0 <= report.index < table.num_nodes:
            raise ProtocolError(
                f"expert {report.index}: counts by table version {report.table_version}"
            )
        experts_of_layers = table.experts_of(report.index)
        counts_of_layers = [list(unpack_ints(layer)) for layer in report.counts]
        if [len(c) for c in counts_of_layers] != [len(e) for e in experts_of_layers]:
            raise ProtocolError(f"expert {report.index}: counts do not match its slots")
        all_counts = (report.activations, report.batches, *chain(*counts_of_layers))
        if any(count < 0 for count in (report.compute_s, *all_counts)):
            raise ProtocolError(f"expert {report.index}: a negative count")
        if report.index in self._reported:
            self._reported.clear()
            for layer in self._layers:
                layer.fold()
        self._reported.add(report.index)
        self.activations += report.activations
        self.batches += report.batches
        self._speeds.add(
            report.index,
            num_pairs=sum(map(sum, counts_of_layers)),
            activations=report.activations,
            batches=report.batches,
            compute_s=report.compute_s,
        )
        for layer, experts, counts in zip(
            self._layers, experts_of_layers, counts_of_layers, strict=True
        ):
            node = report.index if table is self._averaged else None
            layer.add(node, LayerCounts(experts, counts))

    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Return the sums, [layer][expert]."""
        return tuple(tuple(layer.tokens) for layer in self._layers)

    @property
    def pairs_per_expert(self) -> float:
        """Return how many pairs an expert has served on average, in the quietest layer.

        Layers that are local do not count: nodes report none for them.
        """
        table = self._formation.table
        served = [
            sum(layer.tokens) for idx, layer in enumerate(self._layers) if idx not in table.local
        ]
        return min(served, default=0) / max(1, table.num_experts)

    def recent(self) -> list[list[float]]:
        """Return the averages, [layer][expert]; only ratios within a layer are meaningful."""
        return [_shares(layer.recent()) for layer in self._layers]

    def speeds(self) -> tuple[float, ...] | None:
        """Return the nodes' speeds as shares of the fastest one's; None: they are equal."""
        return self._speeds.relative()

    def times(self) -> dict[int, float]:
        """Return how long nodes take for the same work, relative to the fastest one."""
        speeds = self.speeds() or (1.0,) * self._averaged.num_nodes
        return {node: 1 / max(speed, 0.01) for node, speed in enumerate(speeds)}

    def balance(self) -> float | None:
        """Return max/mean of the nodes' times under the table in use, None if there are none.

        Averaged and summed over layers as experts/balance.py does for predictions; a node's time is
        the pairs that it served, divided by its speed.
        """
        self._follow()
        speeds = self.speeds() or (1.0,) * self._averaged.num_nodes
        peak = mean = 0.0
        for slots, layer in zip(self._averaged.slots, self._layers, strict=True):
            layer_peak, layer_mean = peak_and_mean(_shares(layer.of_nodes()), slots, speeds)
            peak, mean = peak + layer_peak, mean + layer_mean
        return peak / mean if mean else None


def _shares(values: list[float]) -> list[float]:
    """Return `values` divided by their sum, so that every layer weighs the same."""
    total = sum(values)
    return [value / total for value in values] if total else [0.0] * len(values)
