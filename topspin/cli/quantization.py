"""What a user of --quantization is told at the start: what it covers and what it costs.

Owns the sentence and its figures, those of `topspin bench quantization` on the default model
(benchmarks/results/quantization.json; a test keeps them equal). Those of a GPU's formats were
computed without one. Knows no tensors. Called by topspin.cli.serve.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from topspin.config import ModelSection
from topspin.devices import Nodes

MEASURED_ON: Final = "smollm2-moe"


class Loss(NamedTuple):
    """A mode beside the model in fp32, over the positions of a text."""

    mean_kl: float
    same_most_likely_token: float
    perplexity: float


PLAIN_PERPLEXITY: Final = 28.0116
LOSSES: Final = {
    "cpu": {
        "int8": Loss(0.00374, 0.9715, 28.0394),
        "int4": Loss(0.00379, 0.9753, 28.26),
    },
    "triton": {
        "fp8": Loss(0.0379, 0.8631, 28.9483),
        "int8": Loss(0.00172, 0.9639, 27.9198),
        "int4": Loss(0.364, 0.6502, 42.9663),
    },
}
"""By the kernels whose formats they are."""


def describe_loss(model: ModelSection, nodes: Nodes) -> str | None:
    """Return what to print for a model's quantization on `nodes`, None without one.

    Most weights are the experts', so their nodes' kernels count, if there are any.
    """
    mode = model.quantization
    if mode == "none":
        return None
    head = "fp8" if mode == "fp8" else "int8"
    kernels = (nodes.experts if nodes.num_experts else nodes.attention).kernels
    loss = LOSSES[kernels][mode]
    is_cpu = kernels == "cpu"
    how = "" if is_cpu else " with a GPU's formats, by a CPU"
    other = "" if is_cpu else f" --modes gpu-{mode}"
    return (
        f"quantization {mode}: experts, MLPs and attention projections (LM head: {head}); "
        f"expected loss, measured on {MEASURED_ON}{how}: mean KL {loss.mean_kl:.2g} nats, most "
        f"likely token the same at {loss.same_most_likely_token:.1%} of positions, perplexity "
        f"{PLAIN_PERPLEXITY:.2f} -> {loss.perplexity:.2f}; "
        f"`topspin bench quantization MODEL{other}` measures another model"
    )
