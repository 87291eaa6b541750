"""Runs a step's layers on the CPU: layer by layer, or, with few rows of each sequence, recorded.

Owns the choice between the two. If the kernels or the net cannot be recorded, nothing is. Knows no
plan. Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.executor import Ran, Receipt, run_layers
from attention_nodes.sampling.scores import score
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.recorded_steps import Key, key_of, recorded_steps
from attention_nodes.step.relay import Relay
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.step_inputs import Slices, StepInputs, host_inputs
from kernels.runtime import Event, Runtime, host_event
from m2n_comm.net import AttentionNet
from topspin.processes.progress import Beat
from topspin.trace import Kind, Ring, Stamps, read_stamps


class Placed(NamedTuple):
    """A step's tensors; `key` None: it is not recorded."""

    inputs: StepInputs
    key: Key | None


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
    ) -> None:
        """`relay`, once set, passes rows on to stages."""
        self.relay: Relay | None = None
        self._decoder = decoder
        self._rotary = rotary
        self._stream = runtime.current_stream()
        self._combined = torch.empty(max_tokens, decoder.config.hidden_size)
        self._steps = (
            recorded_steps(decoder, runtime, rotary, vocab_size=decoder.config.vocab_size)
            if recordings
            else None
        )
        # Its only stamp is when the layers of the last recorded step ended.
        self._clock = Ring(1)
        stamps = runtime.stamps_of(self._clock)
        assert stamps is not None
        self._stamps = stamps

    def record_all(
        self,
        net: AttentionNet | None,
        *,
        micro_batches: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        """Do nothing: steps are recorded as they come, in milliseconds."""

    def forget(self) -> None:
        if self._steps is not None:
            self._steps.clear()

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        return host_inputs(micro_batches, self._rotary)

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet | None) -> Placed:
        key = self._key(micro_batches, net)
        if key is not None and self._steps is not None:
            inputs = self._steps.take(key, micro_batches)
            if inputs is not None:
                return Placed(inputs, key)
        return Placed(host_inputs(micro_batches, self._rotary), key)

    def _key(self, micro_batches: Sequence[Slices], net: AttentionNet | None) -> Key | None:
        if self._steps is None or not (net is None or net.is_graph_safe):
            return None
        if self._decoder.watch is not None or any(each.scored for each in micro_batches):
            return None
        return key_of(micro_batches)

    def run(
        self,
        placed: Placed,
        net: AttentionNet | None,
        *,
        trace: Stamps | None,
        beat: Beat | None,
        meanwhile: Callable[[], bool] | None,
    ) -> Ran:
        if placed.key is not None:
            return self._replay(placed.inputs, placed.key, net, trace=trace, beat=beat)
        inputs = placed.inputs
        residual = run_layers(
            self._decoder,
            net,
            inputs,
            self._combined,
            trace=trace,
            beat=beat,
            meanwhile=meanwhile,
            relay=self.relay,
        )
        rallied = self._stream.record(timed=True)
        if trace is not None:
            trace.stamp(Kind.RALLIED)
        logits = self._decoder.logits(residual.index_select(0, inputs.sample_rows))
        return Ran(logits, rallied, score(self._decoder.logits, residual, inputs.to_score))

    def _replay(
        self,
        inputs: StepInputs,
        key: Key,
        net: AttentionNet | None,
        *,
        trace: Stamps | None,
        beat: Beat | None,
    ) -> Ran:
        def body(inputs: StepInputs, logits: Tensor) -> None:
            residual = run_layers(
                self._decoder,
                net,
                inputs,
                self._combined,
                trace=trace,
                beat=None,
                relay=self.relay,
            )
            self._stamps.stamp(Kind.RALLIED)
            if trace is not None:
                trace.stamp(Kind.RALLIED)
            self._decoder.logits(residual.index_select(0, inputs.sample_rows), out=logits)

        if beat is not None:
            beat()
        assert self._steps is not None
        state = (None if net is None else (net, net.epoch), self.relay)
        logits = self._steps.run(key, inputs, body, state)
        (rallied,) = read_stamps(self._clock.dump())
        return Ran(logits, host_event(rallied.t_ns), [])

    def keep(self, placed: Placed, tokens: Tensor) -> None:
        pass

    def fetch(self, tensors: Sequence[Tensor]) -> Receipt:
        return _HostReceipt([each.numpy() for each in tensors], self._stream.record(timed=True))


class _HostReceipt:
    def __init__(self, arrays: list[np.ndarray], ended: Event) -> None:
        self._arrays = arrays
        self.ended = ended

    def arrays(self) -> list[np.ndarray]:
        return self._arrays
