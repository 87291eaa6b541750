"""Answers of one row per (token, chosen expert), and their sum in a fixed order.

With partial sums the bits of a token's sum depend on which experts share a node. Here an
expert node answers with the unweighted row of every choice that it serves, by ascending
(row, choice); RowSum puts the rows of all nodes together and adds a token's rows by ascending
logical expert id, in fp32. Pure but for the buffer; knows no transport. parts.py uses it if
NetShape.per_expert_answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.deterministic import add_by_expert, order_of
from m2n_comm.layout import SendPlan, num_parts
from m2n_comm.net import NetShape


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The answer rows of each expert node, and their order of addition.

    `places[n]` i64[P]: the places of node n's rows among the T * K choices; part r of its
    answers has `bounds[n][r] : bounds[n][r + 1]` of them. `order` i64[K, T]: a token's
    choices by ascending expert id, the first of all tokens first; `weights` f32[K, T, 1] theirs.
    """

    places: tuple[torch.Tensor, ...]
    bounds: tuple[tuple[int, ...], ...]
    order: torch.Tensor
    weights: torch.Tensor

    def num_rows(self, node: int, part: int) -> int:
        """Return the rows of one answer."""
        return self.bounds[node][part + 1] - self.bounds[node][part]


def plan_rows(
    plan: SendPlan, experts: torch.Tensor, weights: torch.Tensor, *, window_rows: int
) -> RowPlan:
    """Plan the answers to the sends of `plan`; experts [T, K] logical ids, weights f32[T, K]."""
    places, bounds = [], []
    for node, count in enumerate(plan.counts):
        here = plan.slots[node] >= 0
        places.append(here.reshape(-1).nonzero().view(-1))
        per_token = here.sum(dim=1)
        rows = plan.rows[node]
        ends = (per_token if rows is None else per_token[rows]).cumsum(0).tolist()
        bounds.append(
            (
                0,
                *(
                    ends[min((part + 1) * window_rows, count) - 1] if count else 0
                    for part in range(num_parts(count, window_rows))
                ),
            )
        )
    return RowPlan(tuple(places), tuple(bounds), *order_of(experts, weights))


class RowSum:
    """The rows of one dispatch's choices, while its answers arrive.

    The buffer grows to the largest dispatch and is kept; combine() runs one dispatch at a
    time, so that one buffer serves all micro-batches.
    """

    def __init__(self, shape: NetShape) -> None:
        self._rows = torch.empty((shape.window_rows * shape.top_k, shape.hidden_size)).to(
            shape.payload
        )

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the buffer."""
        return self._rows.nbytes

    def put(self, plan: RowPlan, node: int, part: int, rows: torch.Tensor) -> None:
        """Take the answer rows [P, H] of one part of `node`."""
        num_choices = plan.order.numel()
        if len(self._rows) < num_choices:
            # This is the dispatch's first part: after it the buffer is large enough.
            self._rows = self._rows.new_empty(num_choices, self._rows.shape[1])
        low, high = plan.bounds[node][part : part + 2]
        self._rows.index_copy_(0, plan.places[node][low:high], rows)

    def add_up(self, plan: RowPlan, out: torch.Tensor) -> None:
        """Fill out [T, H] fp32."""
        add_by_expert(self._rows, plan.order, plan.weights, out)


def count_choices(slots: torch.Tensor) -> int:
    """Return the number of answer rows for request rows with `slots` [R, K]."""
    return int((slots >= 0).sum())
