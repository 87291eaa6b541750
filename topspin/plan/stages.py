"""Stages: the layers of an attention node, cut over several processes.

Owns which node computes which layers of which attention node (LLM-PQ's partition, arXiv
2403.01136), the checks of a plan's `layers`, and which process sends expert nodes the rows of an
attention node in a layer. An attention node computes the first layers of its model; its stages
follow, by index, each where the one before ends. Pure: knows no net and no weights. Called by
topspin.plan.spec, topspin.plan.from_flags, both ends of M2N and the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from topspin.errors import ConfigError

if TYPE_CHECKING:  # a plan checks its stages
    from topspin.plan.spec import EnginePlan, NodeSpec, StageNode


class Stage(NamedTuple):
    """The layers first, ..., end - 1 of attention node `of`."""

    of: int
    first: int
    end: int


def stages_of(nodes: Sequence[StageNode]) -> tuple[Stage, ...]:
    """Return the stages of an engine by index, once check_stages() has passed."""
    found = []
    for node in nodes:
        assert node.layers is not None, "check_stages() first"
        found.append(Stage(node.of, *node.layers))
    return tuple(found)


def sender(stages: Sequence[Stage], *, num_attention: int, of: int, layer: int) -> int:
    """Return who sends the rows of attention node `of` in a decoder layer.

    Senders are numbered: attention nodes first, then stages.
    """
    for index, stage in enumerate(stages):
        if stage.of == of and stage.first <= layer < stage.end:
            return num_attention + index
    return of


def senders(
    stages: Sequence[Stage], *, num_attention: int, layers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return, by each of the decoder `layers`, the sender of each attention node's rows."""
    return tuple(
        tuple(
            sender(stages, num_attention=num_attention, of=each, layer=layer)
            for each in range(num_attention)
        )
        for layer in layers
    )


def check_stages(plan: EnginePlan) -> None:
    """Raise ConfigError, naming the node, if ranges of layers do not join, or nothing serves them.

    Where the last range ends, check_ends() compares with the model.
    """
    for node in plan.nodes:
        if node.role in ("expert", "draft") and node.layers is not None:
            raise ConfigError(
                f"{node}: layers {list(node.layers)}: only attention nodes and stages have some"
            )
    for stage in plan.stages:
        if stage.of >= len(plan.attention):
            raise ConfigError(f"{stage}: of {stage.of}: there is no such attention node")
    for attention in plan.attention:
        own = [stage for stage in plan.stages if stage.of == attention.index]
        if not own:
            if attention.layers is not None:
                raise ConfigError(
                    f"{attention}: layers {list(attention.layers)}: no stage computes the others; "
                    "add nodes of role stage, or leave layers out"
                )
            continue
        _check_chain([attention, *own])
    if plan.stages:
        _check_served(plan)


def _check_chain(nodes: Sequence[NodeSpec]) -> None:
    """Check that each node's layers begin where those of the one before end."""
    end, before = 0, "the model"
    for node in nodes:
        if node.layers is None:
            raise ConfigError(f"{node}: it shares its layers with stages; give its layers")
        first, last = node.layers
        if first >= last:
            raise ConfigError(f"{node}: layers {[first, last]}: there are none")
        if first != end:
            what = "begins" if before == "the model" else "ends"
            kind = "an overlap" if first < end else "a gap"
            raise ConfigError(
                f"{node}: layers {[first, last]}: {before} {what} at layer {end}, so this is {kind}"
            )
        end, before = last, str(node)


def _check_served(plan: EnginePlan) -> None:
    """Refuse what engines with stages do not do."""
    transport = plan.link.transport
    if transport not in ("shm", "tcp"):
        raise ConfigError(
            f"links[0]: transport {transport}: stages pass rows on over shm or tcp; use one of them"
        )
    for node in (*plan.attention, *plan.stages):
        if node.place.is_device:
            raise ConfigError(
                f"{node}: device {node.device}, kernels {node.kernels}: stages, and attention "
                "nodes that have some, compute on the CPU with kernels for it"
            )
    if plan.speculation is not None:
        raise ConfigError(
            f"{plan.stages[0]}: speculation: how many tokens of a draft are kept, stages do not "
            "know; leave out speculation, or the stages"
        )
    if plan.local_experts is not None:
        raise ConfigError(
            f"{plan.stages[0]}: local_experts: stages hold no routed experts; leave out "
            "local_experts, or the stages"
        )
    if plan.kv_cache.retrieval is not None:
        raise ConfigError(
            f"{plan.stages[0]}: kv_cache.retrieval: codes of keys are not cut by layers; leave out "
            "retrieval, or the stages"
        )


def check_ends(plan: EnginePlan, num_layers: int) -> None:
    """Raise ConfigError unless the last stage of each attention node ends with the model."""
    for attention in plan.attention:
        own = [stage for stage in plan.stages if stage.of == attention.index]
        if own and own[-1].layers is not None and own[-1].layers[1] != num_layers:
            raise ConfigError(
                f"{own[-1]}: layers {list(own[-1].layers)}: the model has {num_layers} layers, and "
                f"this is the last stage of {attention}"
            )
