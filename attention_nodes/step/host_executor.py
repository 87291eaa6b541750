"""Runs a step's layers on the CPU: layer by layer, or, with few rows of each sequence, recorded.

Owns the choice between the two. If the kernels or the net cannot be recorded, nothing is. Knows no
plan. Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attention_nodes.sampling.sampler import score
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.executor import Ran, Receipt, run_layers
from attention_nodes.step.rally import Companions, nothing_to_do
from attention_nodes.step.recorded_steps import KeyedInputs, recorded_steps
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.step_inputs import Slices, StepInputs, host_inputs
from kernels.runtime import Event, Runtime, host_event
from m2n_comm.net import AttentionNet
from topspin.processes.progress import no_beat
from topspin.trace import Kind, Ring


class HostExecutor:
    """The CPU: calls return when the work is done; indices become tensors without a copy."""

    keeps_tokens = False
    sizes = ()

    def __init__(
        self,
        decoder: Decoder,
        rotary: RotaryTable,
        runtime: Runtime,
        *,
        max_tokens: int,
        recordings: bool = False,
        keeps_final: bool = False,
    ) -> None:
        """`keeps_final`: a run has the final rows of all tokens."""
        self._decoder = decoder
        self._rotary = rotary
        self._stream = runtime.current_stream()
        self._combined = torch.empty(max_tokens, decoder.config.hidden_size)
        self._final: Tensor | None = None
        if keeps_final:
            self._final = decoder.final_buffer(max_tokens)
        self._steps = recorded_steps(
            decoder,
            runtime,
            rotary,
            vocab_size=decoder.config.vocab_size,
            recordings=recordings,
        )
        # Its only stamp is when the layers of the last recorded step ended.
        self._clock = Ring(1)
        stamps = runtime.stamps_of(self._clock)
        assert stamps is not None
        self._stamps = stamps

    def record_all(
        self,
        net: AttentionNet,
        *,
        num_micro_batches: int,
        check: Callable[[], None],
    ) -> None:
        """Do nothing: steps are recorded as they come, in milliseconds."""

    def forget(self) -> None:
        self._steps.clear()

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        return host_inputs(micro_batches, self._rotary)

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet) -> KeyedInputs:
        is_plain = self._decoder.watch is None and not any(each.scored for each in micro_batches)
        return self._steps.place(
            micro_batches,
            lambda: host_inputs(micro_batches, self._rotary),
            may_record=is_plain and net.is_graph_safe,
        )

    def run(self, placed: KeyedInputs, net: AttentionNet, companions: Companions) -> Ran:
        if placed.key is not None:
            return self._replay(placed, net, companions)
        inputs = placed.inputs
        residual = run_layers(self._decoder, net, inputs, self._combined, companions)
        rallied = self._stream.record(timed=True)
        companions.trace.stamp(Kind.RALLIED)
        final = self._final_rows(residual)
        logits = self._decoder.logits(residual.index_select(0, inputs.sample_rows))
        scores = score(self._decoder.logits, residual, inputs.to_score)
        return Ran(logits, rallied, scores, final)

    def _replay(self, placed: KeyedInputs, net: AttentionNet, companions: Companions) -> Ran:
        recorded = replace(companions, beat=no_beat, meanwhile=nothing_to_do)

        def body(inputs: StepInputs, logits: Tensor) -> None:
            residual = run_layers(self._decoder, net, inputs, self._combined, recorded)
            self._stamps.stamp(Kind.RALLIED)
            recorded.trace.stamp(Kind.RALLIED)
            self._final_rows(residual)
            self._decoder.logits(residual.index_select(0, inputs.sample_rows), out=logits)

        companions.beat()
        logits = self._steps.run(placed, body, (net, net.epoch, companions.passage))
        final = None if self._final is None else self._final[: len(placed.inputs.tokens)]
        return Ran(logits, host_event(self._clock.newest_ns), [], final)

    def _final_rows(self, residual: Tensor) -> Tensor | None:
        """Return the final rows [T, H] of a step, if they are kept."""
        if self._final is None:
            return None
        return self._decoder.final(residual, out=self._final[: len(residual)])

    def keep(self, placed: KeyedInputs, tokens: Tensor) -> None:
        pass

    def fetch(self, tensors: Sequence[Tensor]) -> Receipt:
        return _HostReceipt([each.numpy() for each in tensors], self._stream.record(timed=True))


class _HostReceipt:
    def __init__(self, arrays: list[np.ndarray], ended: Event) -> None:
        self._arrays = arrays
        self.ended = ended

    def arrays(self) -> list[np.ndarray]:
        return self._arrays
