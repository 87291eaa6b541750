"""Layers whose routed experts stay on the attention nodes: what a plan says of them.

Owns the structure of that part of the plan, and its check against the model. Which of the layers
are local at a time is in the expert table (topspin.expert_table); the scheduler decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from topspin.errors import ConfigError


class LocalExperts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decoder layers (counted from 0) whose routed experts every attention node holds too.

    `when` "always": expert nodes hold nothing of these layers. "measured": they do, and the layers
    are local, all at once, while that has been measured to be faster.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    when: Literal["always", "measured"] = "measured"

    def check(self, moe_layers: Sequence[int], *, num_expert_nodes: int) -> None:
        """Raise ConfigError if the model with these `moe_layers`, or the engine, does not fit."""
        if list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"local_experts.layers {list(self.layers)}: must ascend")
        for layer in self.layers:
            if layer not in moe_layers:
                raise ConfigError(
                    f"local_experts.layers: layer {layer} has no routed experts; the model has "
                    f"them in {_ranges(moe_layers)}"
                )
        is_whole = self.when == "always" and len(self.layers) == len(moe_layers)
        if is_whole and num_expert_nodes:
            raise ConfigError(
                f"local_experts: always local in all layers: {num_expert_nodes} expert nodes would "
                "have nothing to do; leave them out, or set when to measured"
            )
        if not is_whole and not num_expert_nodes:
            raise ConfigError(
                "local_experts: without expert nodes every MoE layer must be always local; name "
                "all of them, or add expert nodes"
            )


def _ranges(layers: Sequence[int]) -> str:
    """Return layers as text: "3 to 26", or "none"."""
    if not layers:
        return "none"
    is_run = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if is_run else ", ".join(map(str, layers))
