"""The parts of one engine's scheduler, made from its plan and model.

Owns the values that follow from both together, computed once: at the start, or when the
nodes' sizes are known. Pure. Called by service.py.
"""

from __future__ import annotations

import msgspec

from server.scheduler.engine_facts import EngineFacts, shares_cores
from server.scheduler.experts.local_layers import LocalLayers
from server.scheduler.micro_batching.cost import CostModel, linked_cost_model
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.recovery import table_without
from server.scheduler.nodes.roster import Member, Roster
from server.scheduler.nodes.watermark import Watermark
from server.scheduler.planning.attention_replica import DraftTokens
from server.scheduler.planning.policy import Policy
from server.scheduler.planning.telemetry import JournalNote
from spec_decode.controller import Controller
from topspin.expert_table import ExpertTable, contiguous_table
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import Speculation

# How long all nodes of a step may wait for one another, in addition to the links' latency,
# before the awaited rows count as lost. They report waiting after
# topspin.processes.progress.INTERVAL_S: together that is less than the 3 s within which a partition
# must be noticed.
STANDSTILL_S = 1.5


def places(plan: EnginePlan) -> list[Member]:
    """Return the places of the engine's nodes."""
    attention = [Member("attention", node.index) for node in plan.attention]
    attention += [Member("stage", node.index) for node in plan.stages]
    return attention + [Member("expert", node.index) for node in plan.experts]


def optional_places(plan: EnginePlan) -> list[Member]:
    """Return the places of the nodes without which the engine is ready."""
    nodes = [node for node in (*plan.attention, *plan.experts) if node.optional]
    return [Member(node.role, node.index) for node in nodes]


def required_experts(plan: EnginePlan) -> list[int] | None:
    """Return the expert nodes that must together hold every expert; None: all of them."""
    required = [node.index for node in plan.experts if not node.optional]
    return required if len(required) < len(plan.experts) else None


def make_formation(plan: EnginePlan, facts: EngineFacts) -> Formation:
    """Return the formation of the nodes with which the engine starts."""
    formation = Formation(first_table(plan, facts))
    absent = {node.index for node in plan.experts if node.optional}
    if absent:
        full = formation.full_table
        table = table_without(full, absent, current=full)
        assert table is not None, "topspin.plan.rules.checks.check_model() first"
        formation.use_part(table)
    return formation


def first_table(plan: EnginePlan, facts: EngineFacts) -> ExpertTable:
    """Return the expert table of all places; optional nodes hold second and further copies."""
    order = sorted(plan.experts, key=lambda node: node.optional)
    table = contiguous_table(
        num_layers=facts.num_moe_layers,
        num_experts=facts.num_experts,
        capacities=[node.experts for node in order],
    )
    rank = {node.index: idx for idx, node in enumerate(order)}
    slots = tuple(tuple(layer[rank[node.index]] for node in plan.experts) for layer in table.slots)
    table = msgspec.structs.replace(table, slots=slots)
    if plan.local_experts is None or plan.local_experts.when != "always":
        return table
    local = named_layers(plan, facts)
    empty = ((),) * len(plan.experts)
    slots = tuple(empty if layer in local else held for layer, held in enumerate(table.slots))
    return msgspec.structs.replace(table, slots=slots, local=local)


def named_layers(plan: EnginePlan, facts: EngineFacts) -> tuple[int, ...]:
    """Return the layers of the plan's local_experts, counted among MoE layers."""
    named = () if plan.local_experts is None else plan.local_experts.layers
    return tuple(idx for idx, layer in enumerate(facts.moe_layers) if layer in named)


def make_watermark(plan: EnginePlan) -> Watermark:
    """Return the detector of nodes that make no progress."""
    # Without restarts the waits' own deadline decides: a short stall must not end the engine.
    standstill_s = STANDSTILL_S + 2e-6 * plan.link.latency_us
    return Watermark(
        silent_limit_s=plan.failover.progress_deadline_s,
        standstill_limit_s=standstill_s if plan.failover.restart else None,
    )


def make_policy(
    plan: EnginePlan,
    facts: EngineFacts,
    roster: Roster,
    formation: Formation,
    note: JournalNote,
    local_layers: LocalLayers | None = None,
) -> Policy:
    """Return the policy over the roster's nodes, all of which are ready."""
    return Policy(
        plan,
        formation=formation,
        num_blocks=roster.num_blocks(),
        num_frames=roster.num_frames(),
        vocab_size=facts.vocab_size,
        shares_cores=shares_cores(plan, roster.expert_addresses(), facts.num_cores),
        num_layers=facts.num_moe_layers,
        cost=_prior(plan, facts),
        windows=facts.windows,
        draft_tokens=_draft_tokens(plan.speculation),
        controller=_controller(plan.speculation),
        note=note,
        local_layers=local_layers,
    )


def make_local_layers(plan: EnginePlan, facts: EngineFacts) -> LocalLayers | None:
    """Return what decides whether the plan's local_experts are so; None: it is fixed."""
    if plan.local_experts is None or plan.local_experts.when == "always":
        return None
    return LocalLayers(_prior(plan, facts), named_layers(plan, facts))


def _prior(plan: EnginePlan, facts: EngineFacts) -> CostModel:
    return linked_cost_model(
        latency_us=plan.link.latency_us, gbps=plan.link.gbps, hidden_size=facts.hidden_size
    )


def _draft_tokens(speculation: Speculation | None) -> DraftTokens | None:
    """Return how many tokens nodes may draft for each request in a step, where that is fixed."""
    if speculation is None or speculation.adaptive:
        return None
    most = speculation.num_speculative_tokens
    return lambda request: most


def _controller(speculation: Speculation | None) -> Controller | None:
    """Return what decides on that from step to step; None: it is fixed."""
    if speculation is None or not speculation.adaptive:
        return None
    return Controller(
        speculation.num_speculative_tokens, most_requests=speculation.disable_by_batch_size
    )
