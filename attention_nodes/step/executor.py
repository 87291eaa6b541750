"""Runs the layers of a step: the interface.

Owns the path from a step's indices to its logits, and of drawn tokens back to the host;
host_executor.py implements it for the CPU, device/executor.py for a GPU. Knows no plan and no
sequence. Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from attention_nodes.step.decoder import Decoder
from attention_nodes.step.rally import NO_COMPANIONS, Companions, RowsInFlight, rally
from attention_nodes.step.step_inputs import Slices, StepInputs
from kernels.runtime import Event
from m2n_comm.net import AttentionNet


class Ran(NamedTuple):
    """The logits f32[R, V] of the rows to sample, the timed event of the layers' end, scores."""

    logits: Tensor
    rallied: Event
    scores: list[Tensor]
    """As scores.score() returns them."""
    final: Tensor | None = None
    """The final rows [T, H] of all tokens, valid until the next run; None: nobody needs them."""


class Receipt(Protocol):
    """Tensors that are being copied to the host."""

    @property
    def ended(self) -> Event:
        """The timed event of the copy's end."""

    def arrays(self) -> list[np.ndarray]:
        """Wait for them and return them; valid until the second fetch() after this one."""


class Executor(Protocol):
    """Where the layers run. One step's calls: place, run, (draw,) keep, fetch."""

    @property
    def keeps_tokens(self) -> bool:
        """Return whether tokens may be PENDING: run() then uses the last one given to keep()."""

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet) -> Any:
        """Bring a step's indices to the device, for run() and keep()."""

    def run(self, placed: Any, net: AttentionNet, companions: Companions) -> Ran:
        """Enqueue all layers and the LM head. A recorded step has nothing else to do meanwhile."""

    def keep(self, placed: Any, tokens: Tensor) -> None:
        """Keep tokens i64[R], drawn from the logits of `placed`, for the next steps."""

    def fetch(self, tensors: Sequence[Tensor]) -> Receipt:
        """Enqueue the copy of small tensors to the host."""

    @property
    def sizes(self) -> Sequence[int]:
        """Return the rows of a micro-batch for which decode steps are recorded, ascending."""

    def record_all(
        self,
        net: AttentionNet,
        *,
        num_micro_batches: int,
        check: Callable[[], None],
    ) -> None:
        """Record every size."""

    def forget(self) -> None:
        """Drop all recordings: their net is not used again."""

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        """Return the tensors of a step that is not to be run as a whole (warm-up)."""


def flights_of(inputs: StepInputs, residual: Tensor, combined: Tensor) -> list[RowsInFlight]:
    """Return a step's micro-batches, whose rows are views of `residual` and `combined` [>= T, H].

    `combined` fp32 is the buffer for the sums of the experts' answers.
    """
    flights = []
    for part in inputs.parts:
        rows = slice(part.start, part.start + part.num_tokens)
        flights.append(RowsInFlight(inputs=part, residual=residual[rows], combined=combined[rows]))
    return flights


def run_layers(
    decoder: Decoder,
    net: AttentionNet,
    inputs: StepInputs,
    combined: Tensor,
    companions: Companions = NO_COMPANIONS,
) -> Tensor:
    """Run a step's micro-batches through all layers; return the final rows [T, H]."""
    residual = decoder.embed(inputs.tokens)
    rally(decoder, net, flights_of(inputs, residual, combined), companions)
    return residual
