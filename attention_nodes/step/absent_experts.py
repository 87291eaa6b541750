"""The net of a node without expert nodes.

Owns answers of 0, for a dry run whose experts are elsewhere. Knows no layers: which of them need no
net is said by its caller. Used by model_runner.py where no expert node is there, by loading.py, and
wherever an attention node is measured alone.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from m2n_comm.net import NO_TIMES, NetTimes
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Stamps


class AbsentExperts:
    """An AttentionNet to nobody: answers for layers that are not `local` are 0 and take no memory.

    A dry run needs the most memory if all layers are local whose experts are here.
    """

    trace: Stamps | None = None
    is_graph_safe: bool = False
    epoch: Final = 0

    def __init__(self, local: frozenset[int] = frozenset()) -> None:
        self.local = local

    def set_table(self, table: ExpertTable) -> None:
        pass

    def begin(self, ticket: StepTicket) -> None:
        pass

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None = None,
    ) -> None:
        pass

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        return torch.zero_(out)

    def wait_s(self) -> float:
        return 0.0

    def times(self) -> NetTimes:
        return NO_TIMES

    def close(self) -> None:
        pass


class NoNet(AbsentExperts):
    """Of a node whose layers are all local: nothing is sent, so every step may be recorded."""

    is_graph_safe = True
