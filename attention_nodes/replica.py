"""One attention replica: its weights, its cache, its sequences, and how it does a step.

Owns the chain of steps (a plan out of order is refused) and joins the parts: plan ->
inputs -> rally -> commit -> sample -> result. Knows no sockets: worker.py brings plans
and takes results away, and hands in the net.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from attention_nodes import kv_cache
from attention_nodes.decoder import Decoder
from attention_nodes.rally import Flight, rally
from attention_nodes.rotary import RotaryTable
from attention_nodes.sampler import Sampler
from attention_nodes.sequences import Limits, SequenceTable, unpack
from attention_nodes.step_inputs import build_inputs
from kernels.dispatch import select_ops
from m2n_comm.net import AttentionNet, NetShape, NetTimes
from models.checkpoint import Checkpoint
from models.config import ModelConfig, load_model_config
from models.unused_tensors import describe_unused, unused_tensors
from models.weights import stream_attention_weights
from topspin.config import NodeConfig
from topspin.errors import ProtocolError
from topspin.messages import (
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTicket,
    StepTimings,
    pack_ints,
)
from topspin.process import release_freed_memory
from topspin.progress import Beat
from topspin.trace import Kind
from topspin.trace_node import ring_of

_log = logging.getLogger("attention")


class Replica:
    """Executes StepPlans, one after the other.

    Invariant: between steps every sequence's committed positions are in the cache, and
    nothing of a failed step is kept (the node that failed one does not go on).
    """

    def __init__(self, model: ModelConfig, decoder: Decoder, num_blocks: int, config: NodeConfig):
        assert config.model.max_model_len is not None
        self._model = model
        self._decoder = decoder
        self.num_blocks = num_blocks
        self._table = SequenceTable(
            Limits(
                max_len=config.model.max_model_len,
                block_size=config.cache.block_size,
                num_blocks=num_blocks,
                vocab_size=model.vocab_size,
            )
        )
        self._rotary = RotaryTable(model, max_len=config.model.max_model_len)
        self._sampler = Sampler(self._table)
        # The sum of the experts' answers, fp32 [T, H]; a slice of it per micro-batch.
        self._combined = torch.empty(config.max_num_batched_tokens, model.hidden_size)
        self._generation = 0
        self._last_step = 0
        self.trace = ring_of(config)
        self._finished_s: float | None = None

    @classmethod
    def load(cls, path: Path, config: NodeConfig) -> Replica:
        """Read the attention role's weights from `path`, allocate the cache, warm up."""
        assert config.model.max_model_len is not None
        if config.compute.num_threads is not None:
            torch.set_num_threads(config.compute.num_threads)
        model = load_model_config(path)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        assert config.cache.kv_cache_bytes is not None
        cache = kv_cache.allocate(
            model,
            block_size=config.cache.block_size,
            size_bytes=config.cache.kv_cache_bytes,
            dtype=dtype,
            max_len=config.model.max_model_len,
        )
        checkpoint = Checkpoint(path)
        weights = stream_attention_weights(checkpoint, model, dtype=dtype)
        ops = select_ops(
            config.compute.kernels_on(config.compute.attention_device),
            dtype,
            config.model.quantization,
        )
        decoder = Decoder(model, weights, ops, cache)
        unused = unused_tensors(checkpoint.names, model, read=checkpoint.tensors_read)
        if unused:
            _log.warning("%s: config.json leaves unused %s", path, describe_unused(unused))
        replica = cls(model, decoder, cache.num_blocks, config)
        replica._warm_up()
        release_freed_memory()
        return replica

    def _warm_up(self) -> None:
        """Run a whole step of one token, so that the first request finds code and memory.

        Uses block 0, whose content nobody relies on yet, and leaves no sequence behind.
        """
        self._table.admit(
            NewSequence(
                seq_id=0,
                tokens=pack_ints([0]),
                num_prompt_tokens=1,
                num_computed=0,
                blocks=pack_ints([0]),
                sampling=SamplingParams(max_tokens=1, seed=0, temperature=1.0),
            )
        )
        inputs = build_inputs(
            MicroBatch(
                seq_ids=pack_ints([0]),
                num_tokens=pack_ints([1]),
                sample=b"\x01",
                block_counts=pack_ints([0]),
                block_ids=b"",
            ),
            self._table,
            self._rotary,
        )
        residual = self._decoder.embed(inputs.tokens)
        for layer in self._decoder.layers:
            normed = self._decoder.attention_half(layer, residual, None, inputs)
            if layer.router is not None:
                self._decoder.route(layer, normed)
            self._decoder.local_mlp(layer, normed)
        self._table.commit(inputs.rows, inputs.counts)
        self._sampler.sample(self._decoder.logits(residual), [inputs])
        self._table.clear()

    @property
    def is_moe(self) -> bool:
        """Return whether any layer has routed experts."""
        return bool(self._model.moe_layers)

    def net_shape(self, config: NodeConfig) -> NetShape:
        """Return the shape of the pairs that this node takes part in."""
        assert self._model.moe is not None
        return NetShape.from_config(
            config,
            hidden_size=self._model.hidden_size,
            top_k=self._model.moe.top_k,
            num_layers=len(self._model.moe_layers),
        )

    def execute(
        self,
        plan: StepPlan,
        net: AttentionNet | None,
        *,
        index: int,
        beat: Beat | None = None,
    ) -> StepResult:
        """Do one step as attention node `index`; `beat` as in rally().

        Raises ProtocolError for a plan that does not follow from what came before,
        TransportError if the experts' answers do not come.
        """
        started = time.perf_counter()
        trace = self.trace
        if trace is not None:
            trace.step = plan.ticket.step
            trace.stamp(Kind.PLAN_RECEIVED)
        self._follow(plan, index)
        flights = self._take_off(plan)
        if net is not None:
            net.trace = trace
            net.begin(plan.ticket)
        if trace is not None:
            trace.stamp(Kind.STEP_BEGAN)
        prepared = time.perf_counter()
        rally(self._decoder, net, flights, trace, beat=beat)
        for flight in flights:
            self._table.commit(flight.inputs.rows, flight.inputs.counts)
        rallied = time.perf_counter()
        if trace is not None:
            trace.stamp(Kind.RALLIED)
        drawn = self._sampler.sample(
            self._decoder.logits(self._rows_to_sample(flights)),
            [flight.inputs for flight in flights],
        )
        finished = time.perf_counter()
        if trace is not None:
            trace.stamp(Kind.STEP_ENDED)
        gap_s = 0.0 if self._finished_s is None else started - self._finished_s
        self._finished_s = finished
        times = net.times() if net is not None else NetTimes(0.0, 0.0, None)
        return StepResult(
            step=plan.ticket.step,
            generation=plan.ticket.generation,
            index=index,
            seq_ids=drawn.seq_ids,
            tokens=drawn.tokens,
            logprobs=drawn.logprobs,
            errors=drawn.errors,
            timings=StepTimings(
                total_s=finished - started,
                attention_s=rallied - prepared - times.wait_s,
                wait_s=times.wait_s,
                sample_s=finished - rallied,
                prepare_s=prepared - started,
                expert_s=times.expert_s,
                link_s=times.link_s,
                gap_s=gap_s,
            ),
        )

    def _follow(self, plan: StepPlan, index: int) -> None:
        """Check the plan's place in the chain; forget and admit sequences."""
        ticket = plan.ticket
        self._check_ticket(ticket, index)
        if len(plan.micro_batches) != ticket.num_micro_batches:
            raise ProtocolError(f"{len(plan.micro_batches)} micro-batches, not the ticket's")
        if ticket.generation > self._generation:
            self._table.clear()
        self._generation = ticket.generation
        self._last_step = ticket.step
        for seq_id in unpack(plan.finished, what="finished").tolist():
            self._table.forget(seq_id)
        for new in plan.new:
            self._table.admit(new)

    def _check_ticket(self, ticket: StepTicket, index: int) -> None:
        if ticket.generation < self._generation:
            raise ProtocolError(f"generation {ticket.generation} after {self._generation}")
        if ticket.generation == self._generation and ticket.step <= self._last_step:
            raise ProtocolError(f"step {ticket.step} after step {self._last_step}")
        if index not in ticket.participants:
            raise ProtocolError(f"step {ticket.step} is not for attention node {index}")

    def _take_off(self, plan: StepPlan) -> list[Flight]:
        flights = []
        used = 0
        for micro_batch in plan.micro_batches:
            inputs = build_inputs(micro_batch, self._table, self._rotary)
            end = used + inputs.num_tokens
            if end > len(self._combined):
                raise ProtocolError(f"{end} tokens in a step, more than {len(self._combined)}")
            flights.append(
                Flight(
                    inputs=inputs,
                    residual=self._decoder.embed(inputs.tokens),
                    combined=self._combined[used:end],
                )
            )
            used = end
        return flights

    @staticmethod
    def _rows_to_sample(flights: list[Flight]) -> Tensor:
        rows = [flight.residual[flight.inputs.sample_rows] for flight in flights]
        return rows[0] if len(rows) == 1 else torch.cat(rows)
