"""The order of heads' numbers in memory: those that are rotated together are half a head apart.

Owns the reordering of what comes from a checkpoint, and back. With it kernels know one kind of
rotation only, whatever the share of a head that is rotated (models.rope.pair_order). Values and
outputs keep the checkpoint's order. Called by models.checkpoints.weights, and by those who write
checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.description.config import ModelConfig
from models.quantised.matrices import Matrix
from models.rope import pair_order


class HeadOrder:
    """The order of the numbers of query and key heads of one model."""

    def __init__(self, config: ModelConfig) -> None:
        order = pair_order(config.rope, config.head_dim)
        self._of_head = None if order is None else torch.from_numpy(order)
        if self._of_head is None:
            return
        heads = torch.arange(config.num_heads + config.num_kv_heads)
        rotated = (heads[:, None] * config.head_dim + self._of_head).flatten()
        values = torch.arange(config.kv_size) + len(rotated)
        self._of_rows = torch.cat((rotated, values))

    def qkv(self, matrix: Matrix) -> Matrix:
        """Return the projection [q + 2 kv, H] with its rows in memory's order."""
        if self._of_head is None:
            return matrix
        if isinstance(matrix, Tensor):
            return matrix[self._of_rows]
        return matrix.rows(self._of_rows)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias [q + 2 kv] of that projection in memory's order."""
        return bias if self._of_head is None or bias is None else bias[self._of_rows]

    def norm(self, weight: Tensor | None) -> Tensor | None:
        """Return the weight of a norm per head [D], or over all heads [heads * D]."""
        if self._of_head is None or weight is None:
            return weight
        return weight.view(-1, len(self._of_head))[:, self._of_head].flatten()

    def published(self, matrix: Tensor) -> Tensor:
        """Return a projection as qkv() returns it with its rows in the checkpoint's order."""
        return matrix if self._of_head is None else matrix[self._of_rows.argsort()]
