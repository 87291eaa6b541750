"""Changed copies of nested frozen structs, such as an engine plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from topspin.plan.spec import EnginePlan

Changed = TypeVar("Changed", bound=msgspec.Struct)


def changed(struct: Changed, fields: Mapping[str, object]) -> Changed:
    """Return `struct` with other values of some fields, named by path ("node.kernels")."""
    for path, value in fields.items():
        name, _, rest = path.partition(".")
        new = changed(getattr(struct, name), {rest: value}) if rest else value
        struct = msgspec.structs.replace(struct, **{name: new})
    return struct


def one_of_each(plan: EnginePlan, *, num_experts: int) -> EnginePlan:
    """Return the plan of its first attention node, with all layers, and its first expert node.

    That one has all experts.
    """
    attention = msgspec.structs.replace(plan.attention[0], layers=None)
    expert = msgspec.structs.replace(plan.experts[0], experts=num_experts)
    return msgspec.structs.replace(plan, nodes=(attention, expert))


def with_nodes(plan: EnginePlan, role: str | None = None, **fields: object) -> EnginePlan:
    """Return `plan` with these fields in every node (of `role`)."""
    nodes = tuple(
        changed(node, fields) if role in (None, node.role) else node for node in plan.nodes
    )
    return msgspec.structs.replace(plan, nodes=nodes)
