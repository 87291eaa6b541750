"""Finds tensors that no role reads: a sign that config.json describes another model.

Owns the rule only. Knows no shapes and reads nothing; the attention node calls it once it
has read its own tensors, and warns, as transformers does.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final

from models.checkpoints.checkpoint_index import COMPUTED
from models.checkpoints.tensor_names import layer_name
from models.description.config import ModelConfig

# Of quantised matrices, of which their reader needs the codes and the scales only: sizes that the
# configuration has, GPTQ's order without desc_act, and the scales of rows and of the cache, which
# the kernels choose themselves.
_BESIDE_CODES: Final = (
    "weight_shape",
    "g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
)


def unused_tensors(names: Iterable[str], config: ModelConfig, *, read: frozenset[str]) -> list[str]:
    """Return, sorted, the `names` not `read` by the attention role and not of routed experts.

    They belong to layers or experts beyond those of `config`, or to parts that its family
    does not have.
    """
    rest = [name for name in names if name not in read and not name.endswith(COMPUTED)]
    if config.quantisation is not None:
        modules = {name.rpartition(".")[0] for name in read}
        rest = [name for name in rest if not _is_beside_codes(name, modules)]
    mtp = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    unread = tuple(layer_name(idx, "") for idx in mtp)
    return sorted(
        name for name in rest if not name.startswith(unread) and not _is_routed_expert(name, config)
    )


def _is_beside_codes(name: str, modules: Set[str]) -> bool:
    """Say whether `name` belongs to one of the quantised `modules` that were read."""
    module, _, suffix = name.rpartition(".")
    return suffix in _BESIDE_CODES and module in modules


def describe_unused(unused: list[str], *, num_named: int = 3) -> str:
    """Return a phrase that counts `unused` and names the first few."""
    named = ", ".join(unused[:num_named])
    more = len(unused) - num_named
    return f"{len(unused)} tensors: {named}" + (f" and {more} more" if more > 0 else "")


def _is_routed_expert(name: str, config: ModelConfig) -> bool:
    """Say whether an expert node may be asked to read `name`, in either layout."""
    if config.moe is None:
        return False
    for layer_idx in config.moe_layers:
        for block in config.moe.names.blocks:
            prefix = layer_name(layer_idx, f"{block}.experts.")
            if name.startswith(prefix):
                expert = name.removeprefix(prefix).split(".")[0]
                return not expert.isdecimal() or int(expert) < config.moe.num_experts
    return False
