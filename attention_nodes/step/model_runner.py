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
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
import torch

from attention_nodes.device_executor import DeviceExecutor
from attention_nodes.executor import Executor
from attention_nodes.grammars.processes import Grammars
from attention_nodes.host_executor import HostExecutor
from attention_nodes.long_contexts.long_contexts import LongContexts
from attention_nodes.long_contexts.retrieval import KeyIndex
from attention_nodes.sampling.sampler import Sampled, Sampler
from attention_nodes.sampling.scores import report
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.launched import LaunchedStep, check_of
from attention_nodes.step.plan_chain import PlanChain
from attention_nodes.step.relay import Relay
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import IntArray, Limits, SequenceTable
from attention_nodes.step.step_inputs import Slices, slice_up
from kernels.runtime import HostRuntime, Runtime
from m2n_comm.net import NO_TIMES, AttentionNet, NetShape, NetTimes
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
from topspin.processes.progress import Beat
from topspin.processes.trace_node import ring_of
from topspin.trace import Kind

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
            Limits(
                max_len=config.model.max_model_len,
                block_size=config.kv_cache.block_size,
                num_blocks=num_blocks,
                vocab_size=model.vocab_size,
            )
        )
        self._sampler = Sampler(self._table, decoder.ops, grammars)
        self._drafter = drafter
        self.runtime = runtime or HostRuntime()
        self._stream = self.runtime.current_stream()
        self._max_tokens = config.attention.max_num_batched_tokens
        self._long = self._make_long(config)
        self._plans = PlanChain(
            self._table,
            drafter,
            self._long,
            max_tokens=self._max_tokens,
            # Recorded steps have a number of rows each.
            trims=config.execution.recordings and not config.node.place.is_device,
            ended=self._sampler.end,
        )
        self._executor = self._make_executor(config)
        self._launched: deque[LaunchedStep] = deque()
        self._relay: Relay | None = None
        self.trace = ring_of(config)
        self._finished_s: float | None = None

    def _make_long(self, config: NodeConfig) -> LongContexts | None:
        """Return what serves long contexts, if sequences may attend to a selection of keys."""
        policy = config.kv_cache.retrieval
        if policy is None:
            return None
        model, cache, table = self._model, self._decoder.kv, self._table
        index = KeyIndex(
            model,
            self._decoder.ops,
            cache,
            table,
            policy,
            num_blocks=self.num_blocks,
            max_num_seqs=config.attention.max_num_seqs,
            runtime=self.runtime,
        )
        self._decoder.codes = index.codes
        return LongContexts.of(
            *(model, config, index, cache, table),
            num_blocks=self.num_blocks,
            runtime=self.runtime,
        )

    def _make_executor(self, config: NodeConfig) -> Executor:
        rotary = RotaryTable(self._model, max_len=self._table.limits.max_len)
        if not config.node.place.is_device:
            return HostExecutor(
                self._decoder,
                rotary,
                self.runtime,
                max_tokens=self._max_tokens,
                recordings=config.execution.recordings,
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
        self._executor.record_all(net, micro_batches=_micro_batches(config), check=check)

    def num_recordings(self, config: NodeConfig) -> int:
        """Return how many steps record_steps() records."""
        return len(self._executor.sizes) * len(_micro_batches(config))

    def warm_up_search(self, config: NodeConfig) -> None:
        """Select keys as the largest step would, if sequences may."""
        if self._long is not None:
            self._long.index.warm_up(
                self._model.num_heads,
                getattr(torch, config.model.dtype),
                num_seqs=config.attention.max_num_seqs,
                max_len=config.model.max_model_len,
            )

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
                blocks=pack_ints([0]),
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
        if self._long is not None:
            self._long.warm_up(self._model.num_heads, residual.dtype)

    @property
    def num_frames(self) -> int:
        """Return how many blocks are in memory at once."""
        return self.num_blocks if self._long is None else self._long.num_frames

    @property
    def local_layers(self) -> frozenset[int]:
        """Return the MoE layers whose routed experts are here."""
        experts = self._decoder.experts
        return frozenset() if experts is None else experts.layers

    def _hops(self, net: AttentionNet | None) -> set[int]:
        """Return the MoE layers whose rows leave this node."""
        layers = set(range(len(self._model.moe_layers)))
        return set() if net is None else layers - net.local

    @property
    def hidden_size(self) -> int:
        """Return the numbers in a row of the residual stream."""
        return self._model.hidden_size

    def use_relay(self, relay: Relay | None) -> None:
        """Have rows pass through stages; None: until then no step may be launched, or no more."""
        assert isinstance(self._executor, HostExecutor), "a plan has no stages of such nodes"
        self._relay = self._executor.relay = relay

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
        beat: Beat | None = None,
    ) -> StepResult:
        """Run one step as attention node `index`; `beat` as in rally().

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
        return self.runtime.is_asynchronous and (net is None or net.is_graph_safe)

    def launch(
        self, plan: StepPlan, net: AttentionNet | None, *, index: int, beat: Beat | None = None
    ) -> None:
        """Enqueue one step, behind at most one other; raises as execute()."""
        assert len(self._launched) < MAX_LAUNCHED, "collect() first"
        started = time.perf_counter()
        trace = self.runtime.stamps_of(self.trace)
        if trace is not None:
            trace.step = plan.ticket.step
            trace.stamp(Kind.PLAN_RECEIVED)
        self._plans.follow(plan, index)
        followed = time.perf_counter()
        drafts = self._drafts(plan)
        drafted = time.perf_counter()
        micro_batches, errors = self._plans.slice_up(
            plan,
            drafts,
            may_wait=bool(self._hops(net)),
            stamp=partial(self._stamp, ticket=plan.ticket),
            beat=beat,
        )
        if self._long is not None:
            self._decoder.watch = self._long.index.watch(micro_batches)
            if trace is not None:
                micro_batches = self._long.stamped(micro_batches, trace)
        sampled = Sampled.of(micro_batches)
        self._settle_for(sampled.rows)
        asked = self._sampler.ask(sampled)
        reserved = self._table.reserve(sampled.rows[sampled.roots])
        if net is not None:
            net.trace = trace
            net.begin(plan.ticket)
        if self._relay is not None:
            self._relay.begin(plan.ticket)
        placed = self._executor.place(micro_batches, net)
        if trace is not None:
            trace.stamp(Kind.STEP_BEGAN)
        prepared = time.perf_counter()
        began = self._stream.record(timed=True)
        ran = self._executor.run(
            placed,
            net,
            trace=trace,
            beat=beat,
            meanwhile=self._learning(micro_batches, errors, num_layers=len(self._hops(net))),
        )
        drawn = self._sampler.draw(ran.logits, asked) if len(sampled.rows) else []
        if drawn:
            self._executor.keep(placed, drawn[0])
        launched = LaunchedStep(
            ticket=plan.ticket,
            index=index,
            asked=asked,
            reserved=reserved,
            receipt=self._executor.fetch([*drawn, *ran.scores]),
            started_s=started,
            draft_s=0.0 if self._drafter is None else drafted - followed,
            prepared_s=prepared,
            began=began,
            rallied=ran.rallied,
            times=self._times(net),
            num_drawn=len(drawn),
            scored=tuple(chain.from_iterable(slices.scored for slices in micro_batches)),
            ended=tuple(chain.from_iterable(slices.ended for slices in micro_batches)),
            check=check_of(net),
            errors=errors,
        )
        self._launched.append(launched)
        if not self._executor.keeps_tokens:
            self._settle(launched)
        if self._long is not None:
            launched.errors |= self._long.follow(micro_batches, errors)
            launched.lost_blocks = self._long.take_lost()

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""
        launched = self._launched.popleft()
        arrays = self._settle(launched)
        num_drawn, asked = launched.num_drawn, launched.asked
        drawn = self._sampler.answer(asked, arrays[:num_drawn], launched.verdict, launched.ended)
        for reason in drawn.refused.values():
            _log.info("a request fails: %s", reason)
        scores = report(launched.scored, arrays[num_drawn:])
        self._stamp(Kind.STEP_ENDED, launched.ticket)
        previous_s, self._finished_s = self._finished_s, time.perf_counter()
        counts = None if self._long is None else self._long.take_counts()
        result = launched.result(drawn, scores, previous_s=previous_s, kv=counts)
        for seq_id, reason in result.errors.items():
            named = about(request_id=self._table.request_of(seq_id))
            _log.warning("attention: a request failed: %s", reason, extra=named)
        return result

    def _times(self, net: AttentionNet | None) -> NetTimes:
        times = NO_TIMES if net is None else net.times()
        return times if self._relay is None else self._relay.add_times(times)

    def _stamp(self, kind: Kind, ticket: StepTicket) -> None:
        if self.trace is not None:
            self.trace.step = ticket.step
            self.trace.stamp(kind)

    def close(self) -> None:
        """Give back what outlives the process's memory: a spill's file."""
        if self._long is not None:
            self._long.close()

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
                self._table.fill(launched.reserved, drawn[0][sampled.roots])
            if sampled.drafted:
                self._move(*launched.keep_accepted(self._table))
        return launched.arrays

    def _move(self, sources: IntArray, targets: IntArray) -> None:
        """Copy cache slots to others, if any."""
        if len(sources):
            device = self.runtime.device
            pairs = (sources, targets)
            if self._long is not None:
                pairs = self._long.slots(sources), self._long.slots(targets)
            slots = [torch.from_numpy(each).to(device) for each in pairs]
            self._decoder.kv.move(*slots)

    def _drafts(self, plan: StepPlan) -> dict[int, Draft]:
        """Return the drafts for a step, by sequence id.

        Waits for a step under way that has some itself: this one's slices begin where it ends.
        """
        may_draft = self._plans.may_draft(plan)
        for launched in self._launched:
            if may_draft or launched.asked.sampled.drafted:
                self._settle(launched)
        return self._plans.drafts(plan)

    def _settle_for(self, sampled: IntArray) -> None:
        """Wait for steps under way if sampling these rows needs their tokens."""
        if not self._launched:
            return
        if self._sampler.needs_values(sampled) and self._table.has_pending(sampled):
            for launched in self._launched:
                self._settle(launched)

    def _learning(
        self, micro_batches: list[Slices], failed: dict[int, str], *, num_layers: int
    ) -> Callable[[], bool] | None:
        """Return what learns codebooks in a step's waits for experts, if there is something."""
        if self._long is None:
            return None
        return self._long.learning(micro_batches, failed, num_layers=num_layers)


def _micro_batches(config: NodeConfig) -> tuple[int, ...]:
    """Return the numbers of micro-batches for which decode steps are recorded at start.

    Two are faster only if attention and experts compute at the same time.
    """
    if config.micro_batches is not None:
        return (config.micro_batches,)
    return (1, 2) if config.execution.gpu_streams == 2 else (1,)
