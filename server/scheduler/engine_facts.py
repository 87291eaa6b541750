"""The facts about the model and the machine that the scheduler needs.

Owns only the source of these facts; reading a checkpoint's configuration needs no torch.
Called by command.py and assembly.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models.config import load_model_config
from topspin.config import EngineConfig


class EngineFacts(NamedTuple):
    """A model's sizes (0 MoE layers and experts for a dense one) and this host's cores."""

    num_moe_layers: int
    num_experts: int
    vocab_size: int
    hidden_size: int
    num_cores: int


def read_facts(model_path: str, num_cores: int) -> EngineFacts:
    """Return the facts of the checkpoint at `model_path`; raises ConfigError."""
    model = load_model_config(Path(model_path))
    return EngineFacts(
        num_moe_layers=len(model.moe_layers),
        num_experts=model.moe.num_experts if model.moe is not None and model.moe_layers else 0,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_cores=num_cores,
    )


def shares_cores(config: EngineConfig, expert_addresses: Sequence[str], num_cores: int) -> bool:
    """Say whether attention and expert nodes compute on the same cores, and so take turns.

    They do when all run on this host and ask for more threads together than it has cores,
    and always in one process, where the experts run while the attention node waits. With
    `--layout split` every node has its own cores. A GPU shares nothing with a CPU; GPU nodes
    share if both roles use a common device.
    """
    nodes = config.nodes
    if nodes.attention.is_gpu != nodes.experts.is_gpu:
        return False
    if nodes.attention.is_gpu:
        return not set(config.devices.attention).isdisjoint(config.devices.experts)
    if "local" in expert_addresses:
        return True
    if config.compute.layout == "split":
        return False
    if not all(_is_local(address) for address in expert_addresses):
        return False
    num_threads = config.compute.num_threads
    num_nodes = config.topology.attention_nodes + config.topology.expert_nodes
    return num_threads is None or num_threads * num_nodes > num_cores


def _is_local(address: str) -> bool:
    handshake = address.removeprefix("nixl:")
    return address == "local" or handshake.startswith(("unix:", "tcp:127.", "tcp:localhost:"))
