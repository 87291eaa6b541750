"""Runs a step's layers on the CPU: layer by layer, or, with few rows of each sequence, recorded.

Owns the choice between the two, and the tensors that a recorded step reads and writes: each replay
gets its own numbers in them. A step is recorded per number of rows of each micro-batch and of rows
to sample; contexts and cache blocks are read from memory. If the kernels or the net cannot be
recorded, nothing is. Knows no plan. Called by model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.decoder import Decoder
from attention_nodes.executor import Ran, Receipt, run_layers
from attention_nodes.rotary import RotaryTable
from attention_nodes.scores import score
from attention_nodes.step_inputs import Slices, StepInputs, host_inputs
from kernels.contracts import AttentionMeta
from kernels.recordings import Recordings
from kernels.runtime import Event, Runtime, host_event
from m2n_comm.net import AttentionNet
from topspin.progress import Beat
from topspin.trace import Kind, Ring, Stamps, read_stamps

# Steps with more rows spend their time in the kernels.
MAX_RECORDED_ROWS: Final = 64
# Rows of one sequence: what paged_attention computes one by one.
MAX_SEQUENCE_ROWS: Final = 8
# Recordings that are kept: about 100 KB each for 30 layers, besides their rows.
MAX_RECORDINGS: Final = 64

Renew = Callable[[AttentionMeta, Sequence[int], Sequence[int], Tensor], None]
"""Lets a recorded step attend to other keys: kernels.cpu.attention.renew."""

_Key = tuple[tuple[int, ...], int]
"""The rows of each micro-batch, and the number of rows to sample."""


class _Recorded(NamedTuple):
    """What the recorded steps of one key read and write."""

    inputs: StepInputs
    logits: Tensor

    def take(self, micro_batches: Sequence[Slices], rotary: RotaryTable, renew: Renew) -> None:
        """Let the next replay run with the numbers of `micro_batches`.

        They are copied as arrays: a tensor's copy_ takes several times as long.
        """
        begin, tokens, sample_rows = 0, self.inputs.tokens.numpy(), self.inputs.sample_rows.numpy()
        for part, slices in zip(self.inputs.parts, micro_batches, strict=True):
            tokens[part.start : part.start + part.num_tokens] = slices.tokens
            end = begin + len(slices.sample_rows)
            sample_rows[begin:end] = slices.sample_rows + part.start
            begin = end
            rotary.gather(slices.positions, slices.prompt_lens, out=(part.cos, part.sin))
            part.kv_slots.numpy()[:] = slices.kv_slots
            renew(
                part.meta,
                slices.query_start.tolist(),
                slices.context_lens.tolist(),
                torch.from_numpy(slices.block_tables),
            )


class Placed(NamedTuple):
    """A step's tensors; `key` None: it is not recorded."""

    inputs: StepInputs
    key: _Key | None


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
        renew: Renew | None = None,
    ) -> None:
        """`renew` None: nothing is recorded."""
        self._decoder = decoder
        self._rotary = rotary
        self._stream = runtime.current_stream()
        self._combined = torch.empty(max_tokens, decoder.config.hidden_size)
        self._renew = renew
        # Its only stamp is when the layers of the last recorded step ended.
        self._clock = Ring(1)
        stamps = runtime.stamps_of(self._clock)
        assert stamps is not None
        self._stamps = stamps
        self._recordings: Recordings[_Key] = Recordings(runtime)
        self._recorded: dict[_Key, _Recorded] = {}

    def record_all(
        self,
        net: AttentionNet | None,
        *,
        micro_batches: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        """Do nothing: steps are recorded as they come, in milliseconds."""

    def forget(self) -> None:
        self._recordings.clear()
        self._recorded.clear()

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        return host_inputs(micro_batches, self._rotary)

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet | None) -> Placed:
        key = self._key(micro_batches, net)
        recorded = None if key is None else self._recorded.get(key)
        if recorded is None:
            return Placed(host_inputs(micro_batches, self._rotary), key)
        # The steps before have ended.
        assert self._renew is not None
        recorded.take(micro_batches, self._rotary, self._renew)
        return Placed(recorded.inputs, key)

    def _key(self, micro_batches: Sequence[Slices], net: AttentionNet | None) -> _Key | None:
        if self._renew is None or not (net is None or net.is_graph_safe):
            return None
        rows = tuple(slices.num_tokens for slices in micro_batches)
        if not 0 < sum(rows) <= MAX_RECORDED_ROWS:
            return None
        for slices in micro_batches:
            longest = slices.counts.max(initial=0)
            if longest > MAX_SEQUENCE_ROWS or slices.scored or slices.tree_mask is not None:
                return None
        return rows, sum(len(slices.sampled) for slices in micro_batches)

    def run(
        self, placed: Placed, net: AttentionNet | None, *, trace: Stamps | None, beat: Beat | None
    ) -> Ran:
        if placed.key is not None:
            return self._replay(placed.inputs, placed.key, net, trace=trace, beat=beat)
        inputs = placed.inputs
        residual = run_layers(self._decoder, net, inputs, self._combined, trace=trace, beat=beat)
        rallied = self._stream.record(timed=True)
        if trace is not None:
            trace.stamp(Kind.RALLIED)
        logits = self._decoder.logits(residual.index_select(0, inputs.sample_rows))
        return Ran(logits, rallied, score(self._decoder.logits, residual, inputs.to_score))

    def _replay(
        self,
        inputs: StepInputs,
        key: _Key,
        net: AttentionNet | None,
        *,
        trace: Stamps | None,
        beat: Beat | None,
    ) -> Ran:
        recorded = self._recorded.get(key)
        if recorded is None:
            shape = (key[1], self._decoder.config.vocab_size)
            recorded = self._recorded[key] = _Recorded(inputs, torch.empty(shape))
            if len(self._recorded) > MAX_RECORDINGS:
                # A recording writes to the tensors that go with it: they end together.
                oldest = next(iter(self._recorded))
                del self._recorded[oldest]
                self._recordings.drop(oldest)
        else:
            self._recorded[key] = self._recorded.pop(key)
        logits = recorded.logits

        def body() -> None:
            residual = run_layers(
                self._decoder, net, inputs, self._combined, trace=trace, beat=None
            )
            self._stamps.stamp(Kind.RALLIED)
            if trace is not None:
                trace.stamp(Kind.RALLIED)
            self._decoder.logits(residual.index_select(0, inputs.sample_rows), out=logits)

        if beat is not None:
            beat()
        self._recordings.run(key, body, None if net is None else (net, net.epoch))
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
