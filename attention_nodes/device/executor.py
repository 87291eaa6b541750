"""Runs a step on a device: enqueued from the host, decode steps by recordings.

Owns the choice between the two: a step in which every sequence advances by one token is padded
to a bucket and recorded (buckets.py, kernels.recordings) if the net can be recorded; any other is
enqueued kernel by kernel. Knows no plan. Called by model_runner.py; also used on a CPU with
Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention_nodes.device.buckets import bucket_of, row_buckets
from attention_nodes.device.inputs import DeviceInputs, PlacedInputs
from attention_nodes.device.staging import Inbound
from attention_nodes.sampling.sampler import score
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.executor import Ran, Receipt, run_layers
from attention_nodes.step.rally import Companions
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import TableLimits
from attention_nodes.step.step_inputs import Slices, StepInputs, no_slices
from kernels.recordings import Recordings
from kernels.runtime import Runtime
from m2n_comm.net import AttentionNet
from topspin.devices import TRITON
from topspin.plan.settings import MAX_MICRO_BATCHES
from topspin.plan.spec import NodeConfig
from topspin.trace import Kind, NoStamps

_log = logging.getLogger("attention")

# A token, its validity and a few log-probabilities; the buffer grows if more are asked for.
_ANSWER_BYTES: Final = 64


class PlacedStep(NamedTuple):
    """A step on the device; `bucket`: the rows of each padded micro-batch (None: not padded)."""

    inputs: PlacedInputs
    bucket: int | None
    num_sampled: int

    @property
    def num_micro_batches(self) -> int:
        """Return m."""
        return len(self.inputs.metas)


class DeviceExecutor:
    """Runs steps on one device's current stream."""

    keeps_tokens = True

    def __init__(
        self,
        decoder: Decoder,
        rotary: RotaryTable,
        runtime: Runtime,
        limits: TableLimits,
        config: NodeConfig,
        *,
        max_rows: int,
    ) -> None:
        """Allocate buffers for the largest step; `max_rows` bounds the sequences known at once."""
        self._decoder = decoder
        self._runtime = runtime
        self._stream = runtime.current_stream()
        self.sizes: Final = _sizes(decoder, config)
        widest = MAX_MICRO_BATCHES * config.attention.max_num_seqs
        max_padded = widest if self.sizes else 0
        self._num_groups = limits.num_groups
        self._inputs = DeviceInputs(
            runtime,
            rotary,
            limits,
            max_tokens=config.attention.max_num_batched_tokens,
            max_seqs=config.attention.max_num_seqs,
            max_rows=max_rows,
            max_padded=max_padded,
        )
        self._inbound = Inbound(runtime, config.attention.max_num_seqs * _ANSWER_BYTES)
        rows = max(config.attention.max_num_batched_tokens, max_padded)
        device, size = runtime.device, decoder.config
        self._combined = torch.empty(rows, size.hidden_size, device=device)
        self._logits = torch.empty(config.attention.max_num_seqs, size.vocab_size, device=device)
        self._recordings: Recordings[tuple[int, int]] = Recordings(runtime)
        self._has_retrieved = False

    @property
    def num_recordings(self) -> int:
        """Return the number of recorded sizes."""
        return len(self._recordings)

    def forget(self) -> None:
        self._recordings.clear()

    def inputs_of(self, micro_batches: Sequence[Slices]) -> StepInputs:
        return self._inputs.complete(self._inputs.place(micro_batches, None))

    def place(self, micro_batches: Sequence[Slices], net: AttentionNet) -> PlacedStep:
        bucket = self._bucket(micro_batches, net)
        num_sampled = sum(len(slices.sampled) for slices in micro_batches)
        return PlacedStep(self._inputs.place(micro_batches, bucket), bucket, num_sampled)

    def _bucket(self, micro_batches: Sequence[Slices], net: AttentionNet) -> int | None:
        """Return the rows that each micro-batch is padded to; None: the step is not recorded."""
        if not self.sizes or not net.is_graph_safe:
            return None
        if any(slices.scored or (slices.counts != 1).any() for slices in micro_batches):
            return None
        if any(slices.retrieval is not None for slices in micro_batches):
            if not self._has_retrieved:
                _log.info("steps in which sequences select their keys are not recorded")
                self._has_retrieved = True
            return None
        return bucket_of(max(slices.num_tokens for slices in micro_batches), self.sizes)

    def run(self, placed: PlacedStep, net: AttentionNet, companions: Companions) -> Ran:
        if placed.bucket is None:
            return self._enqueue(placed, net, companions)
        self._replay(placed, net)
        return Ran(self._logits[: placed.num_sampled], self._stream.record(timed=True), [])

    def _enqueue(self, placed: PlacedStep, net: AttentionNet, companions: Companions) -> Ran:
        if self._runtime.is_asynchronous and net.is_graph_safe:
            # The host's stamps would not say when the device has finished.
            companions = replace(companions, trace=NoStamps())
        inputs = self._inputs.complete(placed.inputs)
        residual = run_layers(self._decoder, net, inputs, self._combined, companions)
        rallied = self._stream.record(timed=True)
        companions.trace.stamp(Kind.RALLIED)
        logits = self._logits[: placed.num_sampled]
        if len(logits) < placed.num_sampled:  # drafts have more rows than sequences
            logits = logits.new_empty(placed.num_sampled, logits.shape[1])
        if placed.num_sampled:
            self._decoder.logits(residual.index_select(0, inputs.sample_rows), out=logits)
        return Ran(logits, rallied, score(self._decoder.logits, residual, inputs.to_score))

    def _replay(self, placed: PlacedStep, net: AttentionNet) -> None:
        """Enqueue a padded step through the recordings of its shape."""
        assert placed.bucket is not None

        def body() -> None:
            inputs = self._inputs.complete(placed.inputs)
            residual = run_layers(self._decoder, net, inputs, self._combined)
            rows = residual.index_select(0, inputs.sample_rows)
            self._decoder.logits(rows, out=self._logits[: len(rows)])

        key = (placed.num_micro_batches, placed.bucket)
        self._recordings.run(key, body, (net, net.epoch))

    def keep(self, placed: PlacedStep, tokens: Tensor) -> None:
        self._inputs.keep(placed.inputs, tokens)

    def fetch(self, tensors: Sequence[Tensor]) -> Receipt:
        return self._inbound.fetch(tensors)

    def record_all(
        self,
        net: AttentionNet,
        *,
        num_micro_batches: int,
        check: Callable[[], None],
    ) -> None:
        """Record every size, the largest first.

        Call before the net's first begin(): recordable nets then send nothing to peers. All rows
        are padding: no sequence and no cache block is used.
        """
        if not self.sizes or not net.is_graph_safe:
            return
        empty = no_slices(self._num_groups)
        for done, bucket in enumerate(reversed(self.sizes)):
            if done % 8 == 0:
                _log.info("recording decode steps: %d of %d sizes", done, len(self.sizes))
            check()
            for _ in range(2):
                placed = self._inputs.place([empty] * num_micro_batches, bucket)
                self._replay(PlacedStep(placed, bucket, 0), net)
        self._runtime.synchronize()


def _sizes(decoder: Decoder, config: NodeConfig) -> tuple[int, ...]:
    """Return the buckets; none if recording is disabled or the kernels cannot be recorded."""
    if not config.execution.recordings or decoder.ops.name != TRITON:
        return ()
    return row_buckets(config.attention.max_num_seqs)
