"""Runs the layers of a step: the interface, and its implementation on the CPU.

Owns the path from a step's indices to its logits, and of drawn tokens back to the host.
`HostExecutor` copies nothing; device_executor.py implements it for a GPU. Knows no plan and no
sequence. Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attention_nodes.decoder import Decoder
from attention_nodes.rally import Flight, rally
from attention_nodes.rotary import RotaryTable
from attention_nodes.scores import score
from attention_nodes.step_inputs import Slices, StepInputs, host_inputs
from kernels.runtime import Event, Runtime
from m2n_comm.net import AttentionNet
from topspin.progress import Beat
from topspin.trace import Kind, Ring


class Ran(NamedTuple):
    """The logits f32[R, V] of the rows to sample, the timed event of the layers' end, scores."""

    logits: Tensor
    rallied: Event
    scores: list[Tensor]
    """As scores.score() returns them."""


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

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet | None) -> Any:
        """Bring a step's indices to the device, for run() and keep()."""

    def run(
        self, placed: Any, net: AttentionNet | None, *, trace: Ring | None, beat: Beat | None
    ) -> Ran:
        """Enqueue all layers and the LM head; `trace` and `beat` as in rally()."""

    def keep(self, placed: Any, tokens: Tensor) -> None:
        """Keep tokens i64[R], drawn from the logits of `placed`, for the next steps."""

    def fetch(self, tensors: Sequence[Tensor]) -> Receipt:
        """Enqueue the copy of small tensors to the host."""

    @property
    def sizes(self) -> Sequence[int]:
        """Return the rows of a micro-batch for which decode steps are recorded, ascending."""

    def record_all(
        self,
        net: AttentionNet | None,
        *,
        micro_batches: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        """Record every size for each of these numbers of micro-batches."""

    def forget(self) -> None:
        """Drop all recordings: their net is not used again."""

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        """Return the tensors of a step that is not to be run as a whole (warm-up)."""


def run_layers(
    decoder: Decoder,
    net: AttentionNet | None,
    inputs: StepInputs,
    combined: Tensor,
    *,
    trace: Ring | None,
    beat: Beat | None,
) -> Tensor:
    """Run a step's micro-batches through all layers; return the final rows [T, H].

    `combined` fp32 [>= T, H] is the buffer for the sums of the experts' answers.
    """
    residual = decoder.embed(inputs.tokens)
    flights = []
    for part in inputs.parts:
        rows = slice(part.start, part.start + part.num_tokens)
        flights.append(Flight(inputs=part, residual=residual[rows], combined=combined[rows]))
    rally(decoder, net, flights, trace, beat=beat)
    return residual


class HostExecutor:
    """The CPU: calls return when the work is done; indices become tensors without a copy."""

    keeps_tokens = False
    sizes = ()

    def __init__(
        self, decoder: Decoder, rotary: RotaryTable, runtime: Runtime, *, max_tokens: int
    ) -> None:
        self._decoder = decoder
        self._rotary = rotary
        self._stream = runtime.current_stream()
        self._combined = torch.empty(max_tokens, decoder.config.hidden_size)

    def record_all(
        self,
        net: AttentionNet | None,
        *,
        micro_batches: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        pass

    def forget(self) -> None:
        pass

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        return host_inputs(micro_batches, self._rotary)

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet | None) -> StepInputs:
        return host_inputs(micro_batches, self._rotary)

    def run(
        self, placed: StepInputs, net: AttentionNet | None, *, trace: Ring | None, beat: Beat | None
    ) -> Ran:
        residual = run_layers(self._decoder, net, placed, self._combined, trace=trace, beat=beat)
        rallied = self._stream.record(timed=True)
        if trace is not None:
            trace.stamp(Kind.RALLIED)
        logits = self._decoder.logits(residual.index_select(0, placed.sample_rows))
        return Ran(logits, rallied, score(self._decoder.logits, residual, placed.to_score))

    def keep(self, placed: StepInputs, tokens: Tensor) -> None:
        pass

    def fetch(self, tensors: Sequence[Tensor]) -> Receipt:
        return _HostReceipt([each.numpy() for each in tensors], self._stream.record(timed=True))


class _HostReceipt:
    def __init__(self, arrays: list[np.ndarray], ended: Event) -> None:
        self._arrays = arrays
        self.ended = ended

    def arrays(self) -> list[np.ndarray]:
        return self._arrays
