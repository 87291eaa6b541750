"""Executes a stage's part of each step: its layers, over the rows that its attention node sends.

Owns the stage's copy of the sequences, which follows the same plans as the attention node's: block
tables and lengths are equal, token values are not known here. Steps of few rows are recorded
(recorded_steps.py); the way of rows in and out is Python between their ops. Knows no embeddings, no
sampling and no sockets. Called by worker.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attention_nodes.loading import held_layers, needs_of
from attention_nodes.long_contexts.contexts import Contexts
from attention_nodes.sampling.sampler import Sampled
from attention_nodes.stages.relay import StageLinkEnd
from attention_nodes.step import kv_cache
from attention_nodes.step.absent_experts import NoNet
from attention_nodes.step.decoder import NodeLayers
from attention_nodes.step.executor import flights_of
from attention_nodes.step.plan_chain import PlanChain
from attention_nodes.step.rally import Companions, Passage, RowsInFlight, rally
from attention_nodes.step.recorded_steps import recorded_steps
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import SequenceTable, TableLimits
from attention_nodes.step.slow_decoder import SlowLayers
from attention_nodes.step.step_inputs import StepInputs, host_inputs
from kernels.dispatch import select_ops
from kernels.runtime import Runtime, open_runtime
from m2n_comm.net import AttentionNet, NetShape
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import stream_layers
from models.description.config import ModelConfig, load_model_config
from topspin.messages import StepPlan
from topspin.plan.precision import formats
from topspin.plan.spec import NodeConfig
from topspin.process import release_freed_memory
from topspin.processes.progress import Beat, no_beat
from topspin.processes.trace_node import ring_of
from topspin.trace import Kind, NoStamps


class StageRunner:
    """Executes StepPlans, one after the other, as ModelRunner does for the layers before.

    Invariant: nothing of a failed step is kept (a stage stops serving after one).
    """

    def __init__(
        self, model: ModelConfig, layers: NodeLayers, config: NodeConfig, runtime: Runtime
    ) -> None:
        self._model = model
        self._layers = layers
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.num_blocks = layers.kv.num_blocks
        table = SequenceTable(
            TableLimits(
                max_len=config.model.max_model_len,
                block_size=config.kv_cache.block_size,
                num_blocks=self.num_blocks,
                vocab_size=model.vocab_size,
                num_groups=layers.kv.num_groups,
            )
        )
        max_tokens = config.attention.max_num_batched_tokens
        self._table = table
        self._plans = PlanChain(
            table, None, Contexts(self.num_blocks), max_tokens=max_tokens, trims=False
        )
        self._rotary = RotaryTable(model, max_len=config.model.max_model_len)
        self._residual = torch.empty(max_tokens, model.hidden_size, dtype=self._dtype)
        self._combined = torch.empty(max_tokens, model.hidden_size)
        self._runtime = runtime
        self._steps = recorded_steps(
            layers, runtime, self._rotary, vocab_size=0, recordings=config.execution.recordings
        )
        self._no_net = NoNet(frozenset(range(len(model.moe_layers))))
        self.trace = ring_of(config)

    @property
    def hidden_size(self) -> int:
        """Return the numbers in a row of the residual stream."""
        return self._model.hidden_size

    def net_shape(self, config: NodeConfig) -> NetShape:
        """Return the shape of the net between this node and each expert node."""
        assert self._model.moe is not None
        return NetShape.from_config(
            config,
            hidden_size=self._model.hidden_size,
            top_k=self._model.moe.top_k,
            num_layers=len(self._model.moe_layers),
        )

    def run(
        self,
        plan: StepPlan,
        net: AttentionNet | None,
        link: StageLinkEnd,
        *,
        of: int,
        beat: Beat = no_beat,
    ) -> None:
        """Run one step's layers for attention node `of`; `beat` as in rally().

        Raises ProtocolError for a plan that contradicts the node's state, TransportError if the
        rows or the experts' answers do not come.
        """
        net = self._no_net if net is None else net
        trace = self._runtime.stamps_of(self.trace) or NoStamps()
        trace.step = plan.ticket.step
        trace.stamp(Kind.PLAN_RECEIVED)
        self._plans.follow(plan, of)
        micro_batches = self._plans.slice_up(plan, {}, may_wait=False, trace=trace).micro_batches
        # Each gets a place for the token that the attention node samples, which is never needed.
        self._table.reserve(Sampled.of(micro_batches).rows)
        net.trace = trace
        net.begin(plan.ticket)
        link.begin(plan.ticket)
        placed = self._steps.place(
            micro_batches,
            lambda: host_inputs(micro_batches, self._rotary),
            may_record=net.is_graph_safe,
        )
        trace.stamp(Kind.STEP_BEGAN)
        beat()
        companions = Companions(
            trace,
            beat if placed.key is None else no_beat,
            passage=_Between(link, net, self._runtime),
        )
        self._steps.run(
            placed,
            lambda inputs, logits: self._run_layers(inputs, net, companions),
            (net, net.epoch, link),
        )

    def _run_layers(self, inputs: StepInputs, net: AttentionNet, companions: Companions) -> None:
        flights = flights_of(inputs, self._residual, self._combined)
        rally(self._layers, net, flights, companions)
        companions.trace.stamp(Kind.RALLIED)

    def forget(self) -> None:
        """Drop all recordings: their net and link are not used again."""
        self._steps.clear()


class _Between(Passage):
    """The way of rows from the attention node, and back to it with the times of the net."""

    def __init__(self, link: StageLinkEnd, net: AttentionNet, runtime: Runtime) -> None:
        self._link = link
        self._net = net
        self._runtime = runtime

    def arrive(self, micro_batch: int, flight: RowsInFlight) -> None:
        if len(flight.residual):
            self._runtime.call_again(partial(self._link.receive, micro_batch, flight.residual))

    def leave(self, micro_batch: int, flight: RowsInFlight) -> None:
        if len(flight.residual):
            self._runtime.call_again(partial(self._send, micro_batch, flight.residual))

    def _send(self, micro_batch: int, rows: Tensor) -> None:
        self._link.send(micro_batch, rows, self._net.times())


def load_stage(path: Path, config: NodeConfig) -> StageRunner:
    """Read the stage's layers from `path` and allocate the cache of their keys.

    Raises ConfigError and CheckpointError as loading.load_runner().
    """
    if config.node.num_threads is not None:
        torch.set_num_threads(config.node.num_threads)
    runtime = open_runtime(config.node.device, config.node.kernels)
    model = load_model_config(path, config.model.hf_overrides)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    own = held_layers(config, model)
    max_len = config.model.max_model_len
    layers_kept = kv_cache.layer_specs(model, dtype, config.kv_cache, max_len=max_len)
    cache = kv_cache.allocate(
        layers_kept[own.start : own.stop],
        needs=needs_of(config, model),
        size_bytes=config.stage.kv_cache_bytes,
        max_len=max_len,
    )
    ops = select_ops(
        config.node.kernels, dtype, formats(config.precision, "attention"), config.node.device
    )
    weights = stream_layers(
        Checkpoint(path), model, dtype=dtype, layers=own, precision=config.precision
    )
    slow = config.node.slow
    make = NodeLayers if slow == 1 else partial(SlowLayers, slow=slow)
    layers = make(model, weights, ops, cache, precision=config.precision, first=own.start)
    layers.warm_up()
    if config.execution.recordings:
        runtime.prepare_capture()
    release_freed_memory()
    return StageRunner(model, layers, config, runtime)
