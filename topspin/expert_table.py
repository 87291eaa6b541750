"""The expert table: the node and the slot of each routed expert.

Owns the mapping (per MoE layer) from logical expert to its replicas and its default,
uniform form. Pure data: knows no weights, no tensors and no loads. The scheduler makes
tables, attention nodes route by them, expert nodes load by them. A new placement is a
new version; frames carry the version that they were routed by.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec

from topspin.errors import ProtocolError

ACTIVATION_ROWS: Final = 8
"""Reading an expert's weights takes as long as computing about this many rows with them."""


class Replica(NamedTuple):
    """One copy of a logical expert: the expert node and the slot in that node's layer."""

    node: int
    slot: int


class ExpertTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`slots[layer][node]` lists the logical experts that the node holds, in slot order.

    Layers count MoE layers only. `local` are those whose experts attention nodes compute
    themselves: no row of theirs is sent, and whatever expert nodes hold of them is unused.
    Invariant (checked by `validate`): every logical expert 0..num_experts-1 has at least one
    replica in each other layer, never two on one node.

    `speeds[node]`, above 0, are the nodes' speeds in any unit, by which the replicas of an expert
    share its rows; empty: all are equal.
    """

    version: int
    num_experts: int
    slots: tuple[tuple[tuple[int, ...], ...], ...]
    speeds: tuple[float, ...] = ()
    local: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Return the number of expert nodes that the table spreads over."""
        return len(self.slots[0]) if self.slots else 0

    def experts_of(self, node: int) -> list[tuple[int, ...]]:
        """Return, per MoE layer, the logical experts of `node` in slot order."""
        return [layer[node] for layer in self.slots]

    def replicas(self, layer: int) -> list[list[Replica]]:
        """Return, for each logical expert of `layer`, its replicas in node order."""
        found: list[list[Replica]] = [[] for _ in range(self.num_experts)]
        for node, experts in enumerate(self.slots[layer]):
            for slot, expert in enumerate(experts):
                found[expert].append(Replica(node, slot))
        return found

    def validate(self) -> None:
        """Raise ProtocolError if an expert is missing, unknown, or twice on one node."""
        if self.speeds and (len(self.speeds) != self.num_nodes or min(self.speeds) <= 0):
            raise ProtocolError(
                f"expert table: speeds {self.speeds}: one above 0 for each of "
                f"{self.num_nodes} nodes"
            )
        everyone = set(range(self.num_experts))
        if list(self.local) != sorted(set(self.local) & set(range(len(self.slots)))):
            raise ProtocolError(
                f"expert table: local layers {self.local} of {len(self.slots)}: not ascending, or "
                "unknown"
            )
        for layer, nodes in enumerate(self.slots):
            if len(nodes) != self.num_nodes:
                raise ProtocolError(f"expert table: layer {layer} has {len(nodes)} nodes")
            for node, experts in enumerate(nodes):
                if len(set(experts)) != len(experts):
                    raise ProtocolError(f"expert table: layer {layer} node {node}: a second copy")
            held = {expert for experts in nodes for expert in experts}
            if held != everyone and not (layer in self.local and held < everyone):
                raise ProtocolError(
                    f"expert table: layer {layer}: missing {sorted(everyone - held)}, "
                    f"unknown {sorted(held - everyone)}"
                )


def uniform_table(
    *, num_layers: int, num_experts: int, num_nodes: int, num_redundant: int = 0
) -> ExpertTable:
    """Return contiguous_table() of equal nodes, which differ by one expert at most.

    `num_redundant` slots per layer, over all nodes, hold second and further copies.
    """
    return contiguous_table(
        num_layers=num_layers,
        num_experts=num_experts,
        capacities=even_shares(num_experts + num_redundant, num_nodes),
    )


def contiguous_table(
    *, num_layers: int, num_experts: int, capacities: Sequence[int]
) -> ExpertTable:
    """Return version 1: node i holds a run of `capacities[i]` experts in every layer.

    Slots beyond `num_experts` hold second and further copies, going round the experts in order.
    """
    assert max(capacities, default=0) <= num_experts, "an expert would be twice on a node"
    layer = tuple(
        tuple(place % num_experts for place in range(low, high))
        for low, high in pairwise(accumulate(capacities, initial=0))
    )
    return ExpertTable(version=1, num_experts=num_experts, slots=(layer,) * num_layers)


def even_shares(total: int, num_nodes: int) -> list[int]:
    """Return the slots of each node, which differ by one at most."""
    bounds = [total * node // num_nodes for node in range(num_nodes + 1)]
    return [high - low for low, high in pairwise(bounds)]


def shares_by_speed(total: int, speeds: Sequence[float]) -> list[int]:
    """Return how many of `total` equal experts each node gets, so that the last is done soonest.

    Node n takes 1 / speeds[n] for each; where it makes no difference the faster node gets one.
    """
    shares = [0] * len(speeds)
    for _ in range(total):
        soonest = min(
            range(len(speeds)), key=lambda n: ((shares[n] + 1) / speeds[n], -speeds[n], n)
        )
        shares[soonest] += 1
    return shares
