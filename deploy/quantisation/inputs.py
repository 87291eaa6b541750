"""The calibration text's inputs of each matrix of a layer, as compensated rounding needs them.

Owns the sums over rows. It is an observer of deploy.quantisation.forward, one per layer, and is
read by deploy.quantisation.rounding.
"""

from __future__ import annotations

from torch import Tensor


class LayerInputs:
    """The inputs of one layer's matrices by source and expert."""

    def __init__(self) -> None:
        self._hessians: dict[tuple[str, int | None], Tensor] = {}

    def __call__(self, source: str, rows: Tensor, expert: int | None = None) -> None:
        """Take the rows x [R, I] of an input."""
        self._hessians[source, expert] = rows.T @ rows

    def hessian(self, source: str, expert: int | None = None) -> Tensor:
        """Return the sum over rows of x x^T [I, I]; of all experts' common input by any expert."""
        found = self._hessians.get((source, expert))
        return self._hessians[source, None] if found is None else found
