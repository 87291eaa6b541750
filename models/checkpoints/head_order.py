"""The order of heads' numbers in memory: those that are rotated together are half a head apart.

Owns the reordering of what comes from a checkpoint, and back. With it kernels know one kind of
rotation only, whatever share of a head is rotated and in which pairs (models.rope.pair_order), and
one size of heads: values narrower than keys have zeros behind them, which change no sum. Other
values and outputs keep the checkpoint's order. Called by models.checkpoints.weights, and by those
who write checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.description.config import ModelConfig
from models.quantised.coded import padded_columns
from models.quantised.matrices import Matrix
from models.rope import pair_order


class HeadOrder:
    """The order of the numbers of query and key heads, and the padding of values, of one model.

    `value_dim` is the size of a value's head in the checkpoint.
    """

    def __init__(self, config: ModelConfig) -> None:
        order = pair_order(config.rope, config.head_dim)
        self._head_dim = config.head_dim
        self.value_dim = config.value_dim or config.head_dim
        self._of_head = None if order is None else torch.from_numpy(order)
        self._of_rows: Tensor | None = None
        if self._of_head is None and config.value_dim is None:
            return
        of_head = torch.arange(config.head_dim) if self._of_head is None else self._of_head
        heads = torch.arange(config.num_heads + config.num_kv_heads)
        rotated = (heads[:, None] * config.head_dim + of_head).flatten()
        values = torch.arange(config.num_kv_heads * self.value_dim) + len(rotated)
        padding = (0, self._head_dim - self.value_dim)
        values = F.pad(values.view(-1, self.value_dim), padding, value=-1)
        self._of_rows = torch.cat((rotated, values.flatten()))

    def qkv(self, matrix: Matrix) -> Matrix:
        """Return the projection, of rows as they are stored, as [q + 2 kv, H] in memory's order."""
        if self._of_rows is None:
            return matrix
        if isinstance(matrix, Tensor):
            return self._rows(matrix, self._of_rows)
        found = matrix.rows(self._of_rows)
        found.scales[self._of_rows < 0] = 0
        return found

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias of that projection as [q + 2 kv] in memory's order."""
        return bias if self._of_rows is None or bias is None else self._rows(bias, self._of_rows)

    def _rows(self, stored: Tensor, order: Tensor) -> Tensor:
        found = stored[order]
        found[order < 0] = 0
        return found

    def out(self, matrix: Matrix) -> Matrix:
        """Return the projection [H, heads * value_dim] behind attention as [H, q]."""
        if self.value_dim == self._head_dim:
            return matrix
        if isinstance(matrix, Tensor):
            return padded_columns(matrix, self.value_dim, self._head_dim)
        return matrix.padded(self.value_dim, self._head_dim)

    def norm(self, weight: Tensor | None) -> Tensor | None:
        """Return the weight of a norm per head [D], or over all heads [heads * D]."""
        if self._of_head is None or weight is None:
            return weight
        return weight.view(-1, len(self._of_head))[:, self._of_head].flatten()

    def places(self) -> Tensor | None:
        """Return which rows of qkv() are those of the checkpoint, in its order; None: as they are.

        [q + 2 kv], for models whose values have no zeros behind them.
        """
        assert self.value_dim == self._head_dim, "zeros in place of values"
        return None if self._of_rows is None else self._of_rows.argsort()


class LatentOrder:
    """The order of the rotated numbers, the last of queries and of the key that heads share."""

    def __init__(self, config: ModelConfig) -> None:
        latent = config.latent
        assert latent is not None
        order = pair_order(config.rope, latent.rope_dim)
        rotated = torch.arange(latent.rope_dim) if order is None else torch.from_numpy(order)
        of_query = torch.cat((torch.arange(latent.nope_dim), rotated + latent.nope_dim))
        heads = torch.arange(config.num_heads)[:, None] * latent.head_dim
        self._of_queries = (heads + of_query).flatten()
        of_cached = torch.cat((torch.arange(latent.rank), rotated + latent.rank))
        first = self._of_queries if latent.q_rank is None else torch.arange(latent.q_rank)
        self._of_inputs = torch.cat((first, of_cached + len(first)))

    def inputs(self, matrix: Matrix) -> Matrix:
        """Return the projection of hidden states, as LayerWeights.qkv."""
        return _rows_of(matrix, self._of_inputs)

    def bias(self, bias: Tensor) -> Tensor:
        """Return that projection's bias."""
        return bias[self._of_inputs]

    def queries(self, matrix: Matrix) -> Matrix:
        """Return the projection of the queries' latent."""
        return _rows_of(matrix, self._of_queries)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return which rows of inputs() and queries() are those of the checkpoint, in its order."""
        return self._of_inputs.argsort(), self._of_queries.argsort()


def _rows_of(matrix: Matrix, order: Tensor) -> Matrix:
    return matrix[order] if isinstance(matrix, Tensor) else matrix.rows(order)
