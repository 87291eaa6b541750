"""The activation of a routed expert's gated MLP.

Owns the formula's numbers. A family reads them from config.json (models.families), kernels compute
with them. Knows no tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """Hidden units of a gate and an up projection: (up + offset) * gate * sigmoid(alpha * gate).

    The gate is clamped to at most `limit` before, up to -limit .. limit. The defaults are SwiGLU:
    silu(gate) * up.
    """

    alpha: float = 1.0
    offset: float = 0.0
    limit: float = math.inf

    @property
    def is_swiglu(self) -> bool:
        """Return whether units are silu(gate) * up, for which all kernels have a shorter way."""
        return self == SWIGLU


SWIGLU: Final = ExpertActivation()
