"""The facts about the model and the machine that the scheduler needs.

Owns only the source of these facts; reading a checkpoint's configuration needs no torch.
Called by command.py and assembly.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models.description.config import load_model_config
from topspin.plan.spec import EnginePlan, PlannedModel


class EngineFacts(NamedTuple):
    """A model's sizes (0 MoE layers and experts for a dense one) and this host's cores.

    `moe_layers` are the decoder layers that have routed experts; `windows` those of all layers,
    None where a layer has none.
    """

    num_moe_layers: int
    num_experts: int
    vocab_size: int
    hidden_size: int
    num_cores: int
    moe_layers: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()


def read_facts(planned: PlannedModel, num_cores: int) -> EngineFacts:
    """Return the facts of the `planned` checkpoint; raises ConfigError."""
    model = load_model_config(Path(planned.path), planned.hf_overrides)
    return EngineFacts(
        num_moe_layers=len(model.moe_layers),
        num_experts=model.moe.num_experts if model.moe is not None and model.moe_layers else 0,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_cores=num_cores,
        moe_layers=model.moe_layers,
        windows=model.windows,
    )


def shares_cores(plan: EnginePlan, expert_addresses: Sequence[str], num_cores: int) -> bool:
    """Say whether attention and expert nodes compute on the same cores, and so take turns.

    They do when all run on this host, have no cores of their own and more threads together than it
    has cores; and always in one process, where the experts run while the attention node waits. A
    GPU shares nothing with a CPU; GPU nodes share if both roles use a common device.
    """
    nodes = [*plan.attention, *plan.stages, *plan.experts]
    if any(node.place.is_gpu for node in nodes):
        devices = {node.device for node in plan.attention if node.place.is_gpu}
        return not devices.isdisjoint(node.device for node in plan.experts)
    if "local" in expert_addresses:
        return True
    if not all(_is_local(address) for address in expert_addresses):
        return False
    if all(node.cores for node in nodes):
        return False
    return sum(node.num_threads or num_cores for node in nodes) > num_cores


def _is_local(address: str) -> bool:
    handshake = address.removeprefix("nixl:")
    return address == "local" or handshake.startswith(("unix:", "tcp:127.", "tcp:localhost:"))
