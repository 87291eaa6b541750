"""The names of tensors that all families' checkpoints share.

Owns the published layout's names outside the parts that a family names itself (models.families).
Knows no tensors and no files.
"""

from __future__ import annotations

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


def layer_name(layer_idx: int, suffix: str) -> str:
    """Return the full name of tensor `suffix` of a decoder layer."""
    return f"model.layers.{layer_idx}.{suffix}"


def expert_name(
    layer_idx: int, *, block: str, expert_id: int, projection: str, kind: str = "weight"
) -> str:
    """Return the name of one routed expert's projection, or its `kind` "bias", as published."""
    return layer_name(layer_idx, f"{block}.experts.{expert_id}.{projection}.{kind}")


def fused_expert_name(layer_idx: int, *, block: str, projection: str) -> str:
    """Return the name of a layer's experts stacked in one tensor.

    transformers 5 has this layout in memory, and writes it when asked not to restore the published
    format: gate_up_proj [E, 2F, H] (gate rows first), down_proj [E, H, F].
    """
    return layer_name(layer_idx, f"{block}.experts.{projection}")
