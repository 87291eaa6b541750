"""Optional nodes: an engine is ready without them; they join late, take load, and may leave again.

Owns the checks of a plan that names some. How they join and leave is the scheduler's
(server.scheduler.nodes.failover). Knows the plan's nodes by their fields only; called by
topspin.plan.spec and topspin.plan.from_flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topspin.errors import ConfigError

if TYPE_CHECKING:  # a plan checks its optional nodes
    from topspin.plan.spec import EnginePlan


def check_optional(plan: EnginePlan) -> None:
    """Raise ConfigError, naming the node, for optional nodes that could not join or be missed."""
    optional = [node for node in plan.nodes if node.optional]
    for node in optional:
        if node.role not in ("attention", "expert"):
            raise ConfigError(f"{node}: optional: only attention and expert nodes can be")
        if plan.is_one_process:
            raise ConfigError(
                f"{node}: optional: with transport local all nodes are one process, which is there "
                "or not; use shm or tcp"
            )
        if not plan.failover.restart:
            raise ConfigError(
                f"{node}: optional: nodes join late by failover.restart (--restart on), which is "
                "off; set it to true"
            )
    for stage in plan.stages:
        if plan.attention[stage.of].optional:
            raise ConfigError(
                f"attention {stage.of}: optional: {stage} computes layers of it, and stages do not "
                "join late; leave out optional, or the stages"
            )
    for role, nodes in (("attention", plan.attention), ("expert", plan.experts)):
        if nodes and all(node.optional for node in nodes):
            raise ConfigError(
                f"nodes: every {role} node is optional; an engine serves without these, so it "
                f"needs one that is not"
            )


def check_held(plan: EnginePlan, num_experts: int) -> None:
    """Raise ConfigError unless nodes that are not optional have room for all the experts."""
    held = [node.experts for node in plan.experts if not node.optional]
    if len(held) < len(plan.experts) and sum(held) < num_experts:
        raise ConfigError(
            f"nodes: expert nodes that are not optional hold {' + '.join(map(str, held))} experts "
            f"per layer of the model's {num_experts}; the engine must serve without the others"
        )
