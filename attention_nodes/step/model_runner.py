"""Executes the steps of one attention node: its weights, its cache and its sequences.

Joins the parts: plan -> indices (plan_chain.py) -> layers -> sample, which launch() enqueues,
and -> result, for which collect() waits. On the CPU the work is done when launch() returns; on a
GPU a second step may be launched while one runs: its slices then begin with tokens that only the
device knows.
Knows no checkpoint (loading.py) and no sockets: worker.py passes plans and the net in, and sends
the results.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final

import numpy as np
import torch

from attention_nodes.device.executor import DeviceExecutor
from attention_nodes.grammars.processes import Grammars
from attention_nodes.long_contexts.contexts import PreparedSlices, contexts_of
from attention_nodes.sampling.sampler import AskedRows, Sampled, Sampler, report
from attention_nodes.stages.relay import Relay
from attention_nodes.step.absent_experts import NoNet
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.drafts import RowDrafter, final_rows
from attention_nodes.step.executor import Executor
from attention_nodes.step.host_executor import HostExecutor
from attention_nodes.step.launched import LaunchedStep, check_of
from attention_nodes.step.plan_chain import PlanChain
from attention_nodes.step.rally import NO_PASSAGE, Companions
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import IntArray, Reserved, SequenceTable, TableLimits
from attention_nodes.step.step_inputs import slice_up
from kernels.runtime import HostRuntime, Runtime
from m2n_comm.net import AttentionNet, NetShape
from models.description.config import ModelConfig
from spec_decode.draft import Draft, Drafter
from topspin.logs import about
from topspin.messages import (
    SAMPLE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTicket,
    pack_ints,
)
from topspin.plan.spec import NodeConfig
from topspin.processes.progress import Beat, no_beat
from topspin.processes.trace_node import ring_of
from topspin.trace import Kind, NoStamps, Stamps

_log = logging.getLogger("attention")

# One runs and one is queued: as many as the scheduler plans ahead.
MAX_LAUNCHED: Final = 2


class ModelRunner:
    """Executes StepPlans, one after the other.

    Invariant: a sequence's committed positions are in the cache before a later step reads
    them, and nothing of a failed step is kept (a node stops serving after a failed step).
    """

    def __init__(
        self,
        model: ModelConfig,
        decoder: Decoder,
        num_blocks: int,
        config: NodeConfig,
        runtime: Runtime | None = None,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Serve with `decoder` and `num_blocks` blocks, of which its cache has all, or the frames.

        `runtime` None: the host's.
        `drafter` None: nothing is drafted, whatever plans allow. `grammars` None: sequences with a
        grammar are refused.
        """
        self._model = model
        self._decoder = decoder
        self.num_blocks = num_blocks
        self._table = SequenceTable(
            TableLimits(
                max_len=config.model.max_model_len,
                block_size=config.kv_cache.block_size,
                num_blocks=num_blocks,
                vocab_size=model.vocab_size,
                num_groups=decoder.kv.num_groups,
            )
        )
        self._sampler = Sampler(self._table, decoder.ops, grammars)
        self._drafter = drafter
        self._row_drafter = drafter if isinstance(drafter, RowDrafter) else None
        if self._row_drafter is not None:
            self._row_drafter.follow(decoder)
        self.runtime = runtime or HostRuntime()
        self._stream = self.runtime.current_stream()
        self._max_tokens = config.attention.max_num_batched_tokens
        self._contexts = contexts_of(
            *(model, config, decoder, self._table), num_blocks=num_blocks, runtime=self.runtime
        )
        self._plans = PlanChain(
            self._table,
            drafter,
            self._contexts,
            max_tokens=self._max_tokens,
            # Recorded steps have a number of rows each.
            trims=config.execution.recordings and not config.node.place.is_device,
            ended=self._sampler.end,
        )
        self._executor = self._make_executor(config)
        self._launched: deque[LaunchedStep] = deque()
        self._relay: Relay | None = None
        self._no_net = NoNet(frozenset(range(len(model.moe_layers))))
        self.trace = ring_of(config)
        self._finished_s: float | None = None

    def _make_executor(self, config: NodeConfig) -> Executor:
        rotary = RotaryTable(self._model, max_len=self._table.limits.max_len)
        if not config.node.place.is_device:
            return HostExecutor(
                self._decoder,
                rotary,
                self.runtime,
                max_tokens=self._max_tokens,
                recordings=config.execution.recordings,
                keeps_final=self._row_drafter is not None,
            )
        return DeviceExecutor(
            self._decoder,
            rotary,
            self.runtime,
            self._table.limits,
            config,
            # Steps may end all sequences and begin as many before the ends are reported.
            max_rows=4 * config.attention.max_num_seqs,
        )

    def record_steps(
        self, net: AttentionNet | None, config: NodeConfig, *, check: Callable[[], None]
    ) -> None:
        """Record decode steps of every size, if this node records; before the net's first begin().

        Takes a while; `check` is called repeatedly meanwhile.
        """
        self._executor.record_all(
            self._or_none(net), num_micro_batches=config.micro_batches or 1, check=check
        )

    @property
    def num_recordings(self) -> int:
        """Return how many steps record_steps() records."""
        return len(self._executor.sizes)

    def warm_up_largest(self, config: NodeConfig) -> None:
        """Select keys as the largest step would, if sequences may."""
        self._contexts.warm_up_largest(self._model, config)

    def warm_up(self) -> None:
        """Run a whole step of one token, so that the first request finds code and memory.

        Uses block 0, whose content is not in use yet, and leaves no sequence behind.
        """
        self._table.admit(
            NewSequence(
                seq_id=0,
                tokens=pack_ints([0]),
                num_prompt_tokens=1,
                num_computed=0,
                blocks=pack_ints([0] * self.num_groups),
                max_length=2,
                sampling=SamplingParams(max_tokens=1, seed=0, temperature=1.0, logprobs=1),
            )
        )
        slices = slice_up(
            MicroBatch(
                seq_ids=pack_ints([0]),
                num_tokens=pack_ints([1]),
                wanted=bytes([SAMPLE]),
                block_counts=pack_ints([0]),
                block_ids=b"",
            ),
            self._table,
        )
        inputs = self._executor.inputs_of([slices])
        residual = self._decoder.embed(inputs.tokens)
        for layer in self._decoder.layers:
            normed = self._decoder.attention_half(layer, residual, None, inputs.parts[0])
            if layer.router is not None:
                self._decoder.route(layer, normed)
            self._decoder.local_mlp(layer, normed)
        asked = self._sampler.ask(Sampled.of([slices]))
        self._sampler.draw(self._decoder.logits(residual), asked)
        self._table.clear()
        self._decoder.warm_up()
        self._contexts.warm_up(self._model, residual.dtype)

    @property
    def num_groups(self) -> int:
        """Return how many groups of layers have block tables of their own."""
        return self._table.limits.num_groups

    @property
    def num_frames(self) -> int:
        """Return how many blocks are in memory at once."""
        return self._contexts.num_frames

    @property
    def local_layers(self) -> frozenset[int]:
        """Return the MoE layers whose routed experts are here."""
        experts = self._decoder.experts
        return frozenset() if experts is None else experts.layers

    def _or_none(self, net: AttentionNet | None) -> AttentionNet:
        return self._no_net if net is None else net

    def _num_hops(self, net: AttentionNet) -> int:
        """Return in how many MoE layers rows leave this node."""
        return len(self._no_net.local - net.local)

    @property
    def hidden_size(self) -> int:
        """Return the numbers in a row of the residual stream."""
        return self._model.hidden_size

    def use_relay(self, relay: Relay) -> None:
        """Have rows pass through stages; until then no step may be launched."""
        assert isinstance(self._executor, HostExecutor), "a plan has no stages of such nodes"
        self._relay = relay

    def net_shape(self, config: NodeConfig) -> NetShape:
        """Return the shape of the net between this node and each expert node."""
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
        beat: Beat = no_beat,
    ) -> StepResult:
        """Run one step as attention node `index`; `beat` as in Companions.

        Raises ProtocolError for a plan that contradicts the node's state, TransportError if the
        experts' answers do not come.
        """
        self.launch(plan, net, index=index, beat=beat)
        return self.collect()

    @property
    def num_launched(self) -> int:
        """Return how many steps were launched and not collected."""
        return len(self._launched)

    @property
    def head(self) -> StepTicket | None:
        """Return the ticket of the oldest launched step; None: there is none."""
        return self._launched[0].ticket if self._launched else None

    @property
    def is_done(self) -> bool:
        """Return whether the oldest launched step has ended; never waits."""
        return self._launched[0].receipt.ended.is_done()

    def runs_ahead(self, net: AttentionNet | None) -> bool:
        """Return whether the step just launched runs without the host, which may launch another.

        With a net whose host takes part in every layer the step has ended by now.
        """
        return self.runtime.is_asynchronous and self._or_none(net).is_graph_safe

    def launch(
        self, plan: StepPlan, net: AttentionNet | None, *, index: int, beat: Beat = no_beat
    ) -> None:
        """Enqueue one step, behind at most one other; raises as execute()."""
        assert len(self._launched) < MAX_LAUNCHED, "collect() first"
        started = time.perf_counter()
        net, trace = self._or_none(net), self._stamps(plan.ticket)
        trace.stamp(Kind.PLAN_RECEIVED)
        self._plans.follow(plan, index)
        drafts, draft_s = self._drafts(plan)
        prepared = self._plans.slice_up(
            plan, drafts, may_wait=self._num_hops(net) > 0, trace=trace, beat=beat
        )
        self._decoder.watch = prepared.watch
        asked, reserved = self._ask(prepared)
        self._begin(net, plan.ticket, trace)
        placed = self._executor.place(prepared.micro_batches, net)
        trace.stamp(Kind.STEP_BEGAN)
        enqueued, began = time.perf_counter(), self._stream.record(timed=True)
        learning = self._contexts.learning(prepared, num_layers=self._num_hops(net))
        passage = self._relay or NO_PASSAGE
        ran = self._executor.run(placed, net, Companions(trace, beat, learning, passage))
        times = net.times()
        if self._relay is not None:
            times = self._relay.add_times(times)
        drawn = self._sampler.draw(ran.logits, asked) if len(asked.sampled.rows) else []
        if drawn:
            self._executor.keep(placed, drawn[0])
        launched = LaunchedStep(
            ticket=plan.ticket,
            index=index,
            asked=asked,
            reserved=reserved,
            receipt=self._executor.fetch([*drawn, *ran.scores]),
            started_s=started,
            draft_s=draft_s,
            prepared_s=enqueued,
            began=began,
            rallied=ran.rallied,
            times=times,
            num_drawn=len(drawn),
            scored=tuple(chain.from_iterable(each.scored for each in prepared.micro_batches)),
            ended=tuple(chain.from_iterable(each.ended for each in prepared.micro_batches)),
            check=check_of(net),
        )
        self._launched.append(launched)
        if not self._executor.keeps_tokens:
            self._settle(launched)
        if self._row_drafter is not None and ran.final is not None:
            rows = final_rows(prepared.micro_batches, ran.final, launched.verdict, self._table)
            self._row_drafter.take(rows)
        launched.followed = self._contexts.follow(prepared)

    def _ask(self, prepared: PreparedSlices) -> tuple[AskedRows, Reserved]:
        """Return what the sampler needs for a step, and the places of the tokens to come."""
        sampled = Sampled.of(prepared.micro_batches)
        self._settle_for(sampled.rows)
        asked = self._sampler.ask(sampled)
        return asked, self._table.reserve(sampled.of_roots(sampled.rows))

    def _begin(self, net: AttentionNet, ticket: StepTicket, trace: Stamps) -> None:
        """Open a step with the node's peers."""
        net.trace = trace
        net.begin(ticket)
        if self._relay is not None:
            self._relay.begin(ticket)

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""
        launched = self._launched.popleft()
        arrays = self._settle(launched)
        num_drawn, asked = launched.num_drawn, launched.asked
        drawn = self._sampler.answer(asked, arrays[:num_drawn], launched.verdict, launched.ended)
        for reason in drawn.refused.values():
            _log.info("a request fails: %s", reason)
        scores = report(launched.scored, arrays[num_drawn:])
        self._stamps(launched.ticket).stamp(Kind.STEP_ENDED)
        previous_s, self._finished_s = self._finished_s, time.perf_counter()
        counts = self._contexts.take_counts()
        result = launched.result(drawn, scores, previous_s=previous_s, kv=counts)
        for seq_id, reason in result.errors.items():
            named = about(request_id=self._table.request_of(seq_id))
            _log.warning("attention: a request failed: %s", reason, extra=named)
        return result

    def _stamps(self, ticket: StepTicket) -> Stamps:
        """Return what takes the stamps of a step, until those of another are asked for."""
        trace = self.runtime.stamps_of(self.trace) or NoStamps()
        trace.step = ticket.step
        return trace

    def close(self) -> None:
        """Give back what outlives the process's memory: a spill's file."""
        self._contexts.close()

    def discard(self) -> None:
        """Forget launched and recorded steps, once all have ended; their generation is over."""
        self.runtime.synchronize()
        self._launched.clear()
        self._executor.forget()

    def _settle(self, launched: LaunchedStep) -> list[np.ndarray]:
        """Wait for a step's draws and store them in the table."""
        if launched.arrays is None:
            launched.arrays = launched.wait()
            drawn, sampled = launched.arrays[: launched.num_drawn], launched.asked.sampled
            if drawn:
                launched.verdict = self._sampler.judge(launched.asked, drawn)
                # Failed rows too: the next step may be planned already, and continues from a token
                # that is not reported.
                self._table.fill(launched.reserved, sampled.of_roots(drawn[0]))
            if sampled.drafted:
                self._move(*launched.keep_accepted(self._table))
        return launched.arrays

    def _move(self, sources: IntArray, targets: IntArray) -> None:
        """Copy cache slots i64[groups, n] to others, if any."""
        if sources.size:
            device = self.runtime.device
            places = map(self._contexts.slots, (sources, targets))
            slots = [torch.from_numpy(each).to(device) for each in places]
            self._decoder.kv.move(*slots)

    def _drafts(self, plan: StepPlan) -> tuple[dict[int, Draft], float]:
        """Return the drafts for a step, by sequence id, and the seconds that they took.

        Waits for a step under way that has some itself: this one's slices begin where it ends.
        """
        started, may_draft = time.perf_counter(), self._plans.may_draft(plan)
        for launched in self._launched:
            if may_draft or launched.asked.sampled.drafted:
                self._settle(launched)
        drafts = self._plans.drafts(plan)
        return drafts, time.perf_counter() - started if self._drafter is not None else 0.0

    def _settle_for(self, sampled: IntArray) -> None:
        """Wait for steps under way if sampling these rows needs their tokens."""
        if not self._launched:
            return
        if self._sampler.needs_values(sampled) and self._table.has_pending(sampled):
            for launched in self._launched:
                self._settle(launched)
