"""The facts of a model on which an engine plan depends.

Knows no tensors. Called by whoever makes or checks a plan: `topspin serve` and the planner.
"""

from __future__ import annotations

from pathlib import Path

from models.description.config import ModelConfig
from models.quantised.precision import checkpoint_rules, presumed_rules
from models.rope import is_length_dependent
from topspin.plan.rules.model_facts import ModelFacts


def facts_of(model: ModelConfig, path: Path | None = None) -> ModelFacts:
    """Return what a plan depends on.

    `path` is the checkpoint, for the precision of its weights; without it config.json says that.
    Raises CheckpointError if it is quantised and cannot be read.
    """
    has_experts = model.moe is not None and len(model.moe_layers) > 0
    return ModelFacts(
        dtype=model.dtype,
        max_positions=model.context_length,
        num_layers=model.num_layers,
        moe_layers=tuple(model.moe_layers),
        num_experts=model.moe.num_experts if model.moe is not None and has_experts else 0,
        # With dynamic NTK a key is rotated by its own prompt's length.
        shares_prefixes=not is_length_dependent(model.rope),
        windows=model.windows,
        head_dim=model.head_dim,
        latent_rank=None if model.latent is None else model.latent.rank,
        num_mtp_layers=model.num_mtp_layers,
        precision=presumed_rules(model) if path is None else checkpoint_rules(path, model),
    )
