"""What a user of --quantization is told at the start: what it covers and what it costs.

Owns the sentence and its figures, those of `topspin bench quantization` on the default model
(benchmarks/results/quantization.json; a test keeps them equal). Knows no tensors. Called by
topspin.serve_command.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from topspin.config import ModelSection

MEASURED_ON: Final = "smollm2-moe"


class Loss(NamedTuple):
    """A mode beside the model in fp32, over the positions of a text."""

    mean_kl: float
    same_most_likely_token: float
    perplexity: float


PLAIN_PERPLEXITY: Final = 28.0116
LOSSES: Final = {
    "int8": Loss(0.00374, 0.9715, 28.0394),
    "int4": Loss(0.00379, 0.9753, 28.26),
}


def describe_loss(model: ModelSection) -> str | None:
    """Return what to print for a model's quantization, None without one."""
    loss = LOSSES.get(model.quantization)
    if loss is None:
        return None
    same = f"{loss.same_most_likely_token:.1%}"
    return (
        f"quantization {model.quantization}: experts, MLPs and attention projections (LM head: "
        f"int8); expected loss, measured on {MEASURED_ON}: mean KL {loss.mean_kl:.2g} nats, "
        f"most likely token the same at {same} of positions, perplexity "
        f"{PLAIN_PERPLEXITY:.2f} -> {loss.perplexity:.2f}; `topspin bench quantization MODEL` "
        "measures another model"
    )
