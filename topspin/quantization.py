"""What a user of --quantization is told at the start: what it covers and what it costs.

Owns the sentence and its figures, those of `topspin bench quantization` on the default model
(benchmarks/results/quantization.json; a test keeps them equal), with the CPU's kernels; what a
GPU's formats cost was not measured, and it says so. Knows no tensors. Called by
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


def describe_loss(model: ModelSection, kernels: str = "cpu") -> str | None:
    """Return what to print for a model's quantization by `kernels`, None without one."""
    mode = model.quantization
    if mode == "none":
        return None
    head = "fp8" if mode == "fp8" else "int8"
    covered = f"quantization {mode}: experts, MLPs and attention projections (LM head: {head}); "
    loss = LOSSES.get(mode)
    if loss is None:
        return f"{covered}its loss of quality has not been measured"
    same = f"{loss.same_most_likely_token:.1%}"
    blocks = "" if kernels == "cpu" else " with the CPU's kernels (smaller groups of weights)"
    return (
        f"{covered}expected loss, measured on {MEASURED_ON}{blocks}: mean KL {loss.mean_kl:.2g} "
        f"nats, most likely token the same at {same} of positions, perplexity "
        f"{PLAIN_PERPLEXITY:.2f} -> {loss.perplexity:.2f}; `topspin bench quantization MODEL` "
        "measures another model"
    )
