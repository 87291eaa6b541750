"""What the calibration text puts into each matrix of a layer: moments, and Hessians if asked.

Owns the sums over rows. It is an observer of deploy.quantisation.forward, one per layer, and is
read by deploy.quantisation's rounding and sensitivity.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Moments:
    """Sums over `count` rows x [R, I]: of x, of x^2, [I] each, and of x x^T [I, I] or None."""

    count: int
    total: Tensor
    squares: Tensor
    hessian: Tensor | None

    @property
    def mean(self) -> Tensor:
        """Return E[x] [I]."""
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        """Return Var(x) [I]."""
        return (self.squares / self.count - self.mean.square()).clamp(min=0.0)


class LayerInputs:
    """The inputs of one layer's matrices by source and expert."""

    def __init__(self, *, with_hessians: bool) -> None:
        self._with_hessians = with_hessians
        self._moments: dict[tuple[str, int | None], Moments] = {}
        self.shares: Tensor | None = None
        """f32[E], the mean square of the weight with which each expert's output counts."""

    def __call__(self, source: str, rows: Tensor, expert: int | None = None) -> None:
        """Add the rows [R, I] of an input."""
        hessian = rows.T @ rows if self._with_hessians else None
        self._moments[source, expert] = Moments(
            len(rows), rows.sum(0), rows.square().sum(0), hessian
        )

    def routed(self, weights: Tensor) -> None:
        """Take the weights [R, E] of the experts' outputs."""
        self.shares = weights.square().mean(0)

    def moments(self, source: str, expert: int | None = None) -> Moments:
        """Return the moments of an input; those of all experts' common one by any expert."""
        found = self._moments.get((source, expert))
        return self._moments[source, None] if found is None else found
