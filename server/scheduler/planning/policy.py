"""The policy of one engine: plans steps, and turns their results into outputs.

Owns every request from add() to its end. Pure: no socket, no clock (`now` is an
argument), no tensor. Called by service.py, in three lines: `step = policy.schedule(now)`,
send, `policy.update(result, now)`.

At most two steps are in flight: step k+1 is planned while step k runs, so a decode slice
names no token; the node feeds the one that it sampled last. If the sequence stops in step k,
its token of step k+1 is discarded, never emitted nor counted. A slice whose node may draft
reserves blocks for the longest advance; its result says how long it was, and the rest is given
back. Step k+1 needs no such verdict: it begins wherever the node has got to. Blocks are
released, and become findable as a prefix, only when the last step that writes them has succeeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from server.scheduler.experts.local_layers import LocalLayers
from server.scheduler.micro_batching.cost import CostFits, CostModel, StepLoad
from server.scheduler.micro_batching.split import DEFAULT_NUM_LAYERS
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.suspects import SUSPICIOUS, Suspects
from server.scheduler.nodes.wrong_rows import WrongRows, rows_of
from server.scheduler.planning.adaptive_depths import AdaptiveDepths
from server.scheduler.planning.admission import Admission
from server.scheduler.planning.attention_replica import (
    AttentionReplica,
    DraftTokens,
)
from server.scheduler.planning.compilations import Compilations
from server.scheduler.planning.frames import FrameBudget
from server.scheduler.planning.in_flight import (
    NodePart,
    RunningStep,
    StepsInFlight,
    StepUnderWay,
    fed,
)
from server.scheduler.planning.intake import Intake
from server.scheduler.planning.load_balancing import Pace, token_budgets
from server.scheduler.planning.outbox import (
    Arrivals,
    Outbox,
    Slice,
    accept,
    accept_prompt,
    failure,
    new_scores,
)
from server.scheduler.planning.plans import StepBuilder, StepMessages
from server.scheduler.planning.sequence import Request
from server.scheduler.planning.sequence import Sequence as RunningSequence
from server.scheduler.planning.telemetry import Counters, Journal, JournalNote, no_note
from server.scheduler.waiting.entrance import Entrance
from server.scheduler.waiting.pace import SeatLimit
from server.scheduler.waiting.tenants import TenantState, charge
from spec_decode.controller import Controller
from topspin.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Poison,
    TopspinError,
)
from topspin.messages import (
    AddRequest,
    GrammarLost,
    GrammarReady,
    Progress,
    RequestFailed,
    Stats,
    StepResult,
    StepTimings,
    unpack_ints,
)
from topspin.plan.kv_cache import block_needs
from topspin.plan.spec import EnginePlan

# A request that takes part in so many lost generations without a token ends with the next, even
# if no node died.
MAX_REPLAYS = 5

# Nodes report twice a second that they work.
STALLED_S = 1.0


def _frames(plan: EnginePlan, num_frames: int) -> FrameBudget | None:
    """Return what a node with a spill can have in memory; None: it has none."""
    policy = plan.kv_cache.retrieval
    if plan.kv_cache.spill is None or policy is None:
        return None
    return FrameBudget(num_frames, block_size=plan.kv_cache.block_size, policy=policy)


class Policy:
    """The scheduler's decisions, for M attention nodes that step together.

    Invariant: a request that add() accepted is in `_requests` until it ends, and ends once:
    by an output with a finish reason, by a RequestFailed, or by abort().
    """

    def __init__(
        self,
        plan: EnginePlan,
        *,
        formation: Formation,
        num_blocks: Sequence[int],
        num_frames: Sequence[int] | None = None,
        vocab_size: int,
        shares_cores: bool,
        cost: CostModel,
        windows: Sequence[int | None] = (),
        num_layers: int = DEFAULT_NUM_LAYERS,
        draft_tokens: DraftTokens | None = None,
        controller: Controller | None = None,
        note: JournalNote = no_note,
        local_layers: LocalLayers | None = None,
    ) -> None:
        """Serve the attention nodes whose caches have `num_blocks` blocks each; 0: it is absent.

        `windows` are those of the model's layers, where any has one. If the plan has a spill,
        `num_frames` of the blocks can be in memory at once.
        Nodes may draft as many tokens for a request as `controller` or else `draft_tokens` says;
        without both they have no drafter. `note` takes what happens to single requests,
        `local_layers` the times of steps.
        """
        # Called with each step that has ended; None: nobody watches.
        self.on_step: Callable[[RunningStep, Mapping[int, StepTimings]], None] | None = None
        self._depths = None if controller is None else AdaptiveDepths(controller)
        if self._depths is not None:
            draft_tokens = self._depths.of
        self._plan = plan
        self._formation = formation
        self._fit = CostFits(cost, num_layers, formation)
        self._last_load: StepLoad | None = None
        self._local_layers = local_layers
        self._was_idle = True
        self._needs = block_needs(
            windows,
            plan.kv_cache,
            max_len=plan.model.max_model_len,
            max_step_tokens=max(node.max_num_batched_tokens for node in plan.attention),
        )
        self._replicas = [
            AttentionReplica(
                node=node,
                num_blocks=count,
                needs=self._needs,
                draft_tokens=draft_tokens,
                frames=_frames(plan, in_memory),
            )
            for node, count, in_memory in zip(
                plan.attention, num_blocks, num_frames or num_blocks, strict=True
            )
        ]
        self._intake = Intake(
            vocab_size=vocab_size,
            needs=self._needs,
            max_model_len=plan.model.max_model_len,
            max_request_tokens=self.max_request_tokens,
            retrieval=plan.kv_cache.retrieval,
        )
        self._builder = StepBuilder(
            formation=formation,
            num_micro_batches=plan.scheduling.micro_batches,
            shares_cores=shares_cores,
            costs=self._fit,
        )
        self._requests: dict[tuple[bytes, str], Request] = {}
        self._in_flight = StepsInFlight()
        self._is_halted = False
        self._suspects = Suspects()
        self.wrong_rows = WrongRows()
        self._counters = Counters()
        self.compilations = Compilations()
        self._arrivals = Arrivals()
        self._journal = Journal(note)
        self._num_arrivals = 0
        self._num_choices = 0
        num_seats = sum(replica.node.max_num_seqs for replica in self._replicas)
        self._entrance = Entrance(plan.scheduling, num_seats=num_seats)
        self._seat_limit = SeatLimit(num_seats)
        self._admission = Admission(
            plan,
            self._replicas,
            self._entrance.tenants,
            self._seat_limit,
            needs=self._needs,
            costs=self._fit,
            compilations=self.compilations,
            counters=self._counters,
            journal=self._journal,
        )

    @property
    def max_request_tokens(self) -> int:
        """Return the longest request, prompt and output, that fits the largest node.

        Optional nodes do not count: they may leave.
        """
        required = [replica for replica in self._replicas if not replica.node.optional]
        largest = max(replica.max_blocks for replica in required)
        block_size, max_len = self._needs.block_size, self._plan.model.max_model_len
        num_columns = self._needs.columns_within(largest, -(-max_len // block_size))
        return min(max_len, num_columns * block_size)

    @property
    def num_running(self) -> int:
        """Return how many requests are on a node."""
        return sum(replica.num_running for replica in self._replicas)

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a node, preempted ones too."""
        return len(self._requests) - self.num_running

    # Requests.

    def add(self, message: AddRequest, *, peer: bytes, now: float) -> RequestFailed | None:
        """Queue a request of gateway `peer`, or return its refusal."""
        try:
            if (peer, message.request_id) in self._requests:
                raise InvalidRequest(f"request id {message.request_id!r} is in use")
            self._entrance.check(message, now=now, num_requests=len(self._requests))
            request = self._intake.request(
                message, peer=peer, arrival=self._num_arrivals, number=self._num_choices
            )
            request.account = self._entrance.tenants.account(message.tenant)
            request.prompt_s = self._prompt_s(request)
            if not message.replayed:
                self._entrance.check_wait(request, timeout_s=message.timeout_s)
            if grammar := message.sampling.grammar:
                nodes = () if self._is_halted else self._present()
                request.grammar_key = self.compilations.ask(
                    grammar, nodes, now=now, may_refuse=not message.replayed
                )
            request.added_at = now
        except TopspinError as error:
            return failure(message.request_id, error)
        self._num_choices += 1
        self._num_arrivals += not request.place
        self._counters.num_replays += message.replayed
        self._was_idle |= not self._requests
        self._requests[peer, message.request_id] = request
        self._entrance.entered(request, message, now)
        self._arrivals.add(request)
        return None

    def take_arrivals(self, now: float) -> Outbox:
        """Return what gateways are to be told of the requests that add() has queued, once."""
        return self._arrivals.take(self.compilations.is_under_way, now)

    def _present(self) -> list[int]:
        return [replica.index for replica in self._replicas if replica.is_present]

    def _prompt_s(self, request: Request) -> float:
        """Return the predicted time of what is not cached of a prompt; nodes work side by side."""
        num_cached = self._admission.num_cached(request)
        present = self._present() or [0]
        num_new = len(request.tokens) - num_cached
        return self._fit.prompt_s(present[0], num_new, num_cached) / len(present)

    def expire(self, now: float) -> Outbox:
        """Fail the requests whose time is over."""
        outbox = Outbox()
        if self._is_halted:
            self._entrance.pause(now)
        elif self._in_flight.head is not None and now - self._in_flight.progress_s > STALLED_S:
            # A node hangs, or is about to be lost.
            self._entrance.pause(now, since=self._in_flight.progress_s)
        else:
            self._entrance.resume(now)
        expired = self._entrance.expired(now, is_excused=self._admission.waits_apart)
        for request, error in expired.items():
            self._fail(request, error, outbox)
        return outbox

    def abort(self, request_id: str, *, peer: bytes) -> bool:
        """End a request silently; False if it has ended already or is unknown."""
        request = self._requests.get((peer, request_id))
        if request is None:
            return False
        self._end(request)
        self._journal.aborted(request)
        return True

    def abort_peer(self, peer: bytes) -> int:
        """End every request of a gateway that has gone; returns how many."""
        requests = [request for request in self._requests.values() if request.peer == peer]
        for request in requests:
            self._end(request)
            self._journal.aborted(request)
        return len(requests)

    def fail_all(self, error: EngineError) -> Outbox:
        """End every request with `error`; nothing of theirs is emitted afterwards."""
        outbox = Outbox()
        for request in list(self._requests.values()):
            self._fail(request, error, outbox)
        return outbox

    def _fail(self, request: Request, error: TopspinError, outbox: Outbox) -> None:
        self._end(request)
        outbox.fail(request, error)
        self._journal.failed(request, error)

    def _end(self, request: Request) -> None:
        """Forget `request`; the results of running steps for it will be discarded."""
        assert not request.ended
        request.ended = True
        self.compilations.release(request.grammar_key)
        if self._depths is not None:
            self._depths.forget(request)
        del self._requests[request.peer, request.request_id]
        self._entrance.left(request)
        seq = request.sequence
        if seq is not None and not seq.closed:
            self._replicas[seq.replica_idx].close(seq)

    # Grammars.

    def compiled(self, message: GrammarReady, now: float) -> Outbox:
        """Note that a node has compiled a grammar, or fail the requests that wait for it."""
        outbox = Outbox()
        if not message.error:
            self.compilations.answered(message.index, message.key)
            return outbox
        error: TopspinError = InvalidRequest(message.error, param="grammar")
        if message.may_retry:
            error = EngineUnavailable(message.error)
            self.compilations.failed(message.key)
        else:
            self.compilations.refused(message.key, message.error, now=now)
        self._fail_waiting(message.key, error, outbox)
        return outbox

    def displace_grammars(self) -> Outbox:
        """Fail the requests whose grammars take longest to compile, where too many wait."""
        outbox = Outbox()
        while (key := self.compilations.displaced()) is not None:
            error = Overloaded("other grammars wait for this one, which compiles for long")
            self._fail_waiting(key, error, outbox)
        return outbox

    def _fail_waiting(self, key: str, error: TopspinError, outbox: Outbox) -> None:
        for request in list(self._requests.values()):
            if request.grammar_key == key and request.sequence is None:
                self._fail(request, error, outbox)

    def lost_grammar(self, message: GrammarLost, now: float) -> None:
        """Note that a node has a grammar no longer; its sequences' results say so themselves."""
        if message.error:
            self.compilations.refused(message.key, message.error, now=now)
        else:
            self.compilations.lost(message.key, self._present())

    # Planning.

    def schedule(self, now: float) -> StepMessages | None:
        """Return the next step; None if there is no work, two steps are in flight, or halted."""
        if self._in_flight.is_full or self._is_halted:
            return None
        preempted: list[RunningSequence] = []
        present = [replica.node for replica in self._replicas if replica.is_present]
        budgets = token_budgets(present, self._fit.of)
        if self._depths is not None:
            self._depths.plan(self._replicas, budgets)
        if (seq := self._admission.to_give_way()) is not None:
            self._replicas[seq.replica_idx].close(seq)
            preempted.append(seq)
        following = self._entrance.tenants.first()
        num_next = 0 if following is None else len(following.tokens)
        num_prompts = self.num_waiting + sum(len(replica.prefilling) for replica in self._replicas)
        is_paced = num_prompts > 0 and any(replica.decoding for replica in self._replicas)
        batches = [
            replica.plan_running(
                preempted,
                budgets.get(replica.index, 0),
                num_next=num_next,
                pace=Pace(self._fit, replica.index, num_prompts) if is_paced else None,
            )
            for replica in self._replicas
        ]
        for seq in preempted:
            self._counters.num_preemptions += 1
            self._journal.preempted(seq.request)
            if not seq.num_in_flight:
                self._requeue(seq.request)
        if self._suspects.held and (suspect := self._suspects.take_next()) is not None:
            self._requeue(suspect)
        self._admission.admit(batches, now)
        self._entrance.note(now, is_waited=self._admission.is_full)
        work = [
            (replica, batch)
            for replica, batch in zip(self._replicas, batches, strict=True)
            if batch.seqs
        ]
        if not work:
            return None
        planned = self._builder.build(work, now)
        planned.running.after_idle, self._was_idle = self._was_idle, False
        self._in_flight.push(planned.running)
        return planned.step

    def _requeue(self, request: Request) -> None:
        request.sequence = None
        self._entrance.tenants.push(request)

    # Failover.

    @property
    def num_steps_in_flight(self) -> int:
        """Return how many steps have been sent and not been answered by all their nodes."""
        return len(self._in_flight)

    def halt(self) -> Outbox:
        """Give up the steps in flight; plans no more until resume() of a new generation.

        Every running request keeps its emitted tokens, and returns to its place in the queue when
        the engine goes on; the next token is computed again. After more than MAX_REPLAYS replays
        the request fails.
        """
        outbox = Outbox()
        self._in_flight.clear()
        self.wrong_rows.forget()
        self.compilations.halt()
        self._is_halted = True
        for replica in self._replicas:
            for seq in replica.halt():
                request = seq.request
                if request.ended:
                    continue
                self._counters.num_replays += 1
                request.num_replays += 1
                request.sequence = None
                self._suspects.give_up(request, was_at_work=seq.num_in_flight > 0)
                self._journal.replayed(request)
                if request.num_replays > MAX_REPLAYS:
                    error = NodeLost(f"{request.num_replays} attempts have failed")
                    self._fail(request, error, outbox)
        return outbox

    def node_died(self) -> Outbox:
        """Note that a node died in the generation that was given up; ends a request that caused it.

        One that was only silent, or the scheduler gave up, has not. node_lives() takes it back.
        """
        outbox = Outbox()
        if (cause := self._suspects.died()) is not None:
            error = Poison(f"nodes died {SUSPICIOUS} times or more while they computed it")
            self._fail(cause, error, outbox)
        return outbox

    def node_lives(self) -> None:
        """Note that the last node that seemed to have died has not."""
        self._suspects.lives()

    def lose(self, index: int) -> None:
        """Remove attention node `index`; halt() must come before."""
        self._replicas[index].leave()

    def equip(self, index: int, num_blocks: int, num_frames: int) -> None:
        """Note the cache of attention node `index`, which is absent, before it joins."""
        self._replicas[index].equip(num_blocks, _frames(self._plan, num_frames))

    @property
    def uses_one_table(self) -> bool:
        """Say whether no step in flight is of an older table than the next one."""
        head = self._in_flight.head
        return head is None or head.ticket.table_version == self._formation.table.version

    def resume(self, attention: Iterable[int]) -> None:
        """Continue with these attention nodes; those that are back have empty caches."""
        assert self._is_halted
        self._is_halted = False
        self._builder.begin_chain()
        for index in attention:
            self._replicas[index].is_present = True
        for request in self._suspects.go_on():
            self._requeue(request)
        self.compilations.resume(self._present())

    # Results.

    def update(self, result: StepResult, now: float) -> Outbox:
        """Record one node's result; returns the messages of the steps that it completes.

        Raises ProtocolError if no such result was awaited; the state is then unchanged.
        """
        if result.generation < self._formation.generation:
            return Outbox()  # it was on its way when its generation was given up
        self._in_flight.accept(result)
        self._entrance.note(now, is_waited=self._admission.is_full)
        outbox = Outbox()
        for step in self._in_flight.finished(now):
            self._counters.num_steps += 1
            self._counters.step_seconds += step.took_s
            self._seat_limit.stepped(step.took_s)
            results = {node: part.result for node, part in step.parts.items() if part.result}
            timings = {node: each.timings for node, each in results.items()}
            for each in timings.values():
                self._counters.observe(each, after_idle=step.after_idle)
            for node, part in step.parts.items():
                step.loads[node] = fed(step.loads[node], part)
            self._learn(step, timings)
            if self.on_step is not None:
                self.on_step(step, timings)
            if self._depths is not None:
                self._depths.learn(step)
            self._counters.observe_tokens(sum(load.num_tokens for load in step.loads.values()))
            if self.wrong_rows.runs or any(each.errors for each in results.values()):
                self.wrong_rows.heard(
                    {node: rows_of(step.parts[node], each.errors) for node, each in results.items()}
                )
            for node, result in sorted(results.items()):
                self._apply(self._replicas[node], step.parts[node], result, outbox, now)
        return outbox

    def _note_pace(self, request: Request, now: float) -> None:
        if request.num_preemptions == 0:
            num_micro_batches = self._builder.num_micro_batches
            present = self._present() or [0]
            self._seat_limit.finished(
                decoding_s=now - request.begun_at,
                num_tokens=request.num_output_tokens,
                num_running=self.num_running,
                fixed_s=num_micro_batches * self._fit.fixed_s(present[0]),
            )

    def _learn(self, step: RunningStep, timings: Mapping[int, StepTimings]) -> None:
        table = self._formation.recent_table(step.ticket.table_version)
        if table is None:
            return  # of many tables ago
        self._fit.add_step(table.local, step.loads, timings)
        self._last_load = max(step.loads.values(), default=None)
        if self._local_layers is not None:
            self._local_layers.learn(step.loads, timings, is_local=bool(table.local))

    def _apply(
        self,
        replica: AttentionReplica,
        part: NodePart,
        result: StepResult,
        outbox: Outbox,
        now: float,
    ) -> None:
        """Commit one node's slices of a step that has succeeded."""
        errors, refused = result.errors, result.refused
        caches = self._plan.scheduling.prefix_caching
        counters, varies = self._counters, bool(result.counts) or any(part.drafts)
        if result.kv is not None:
            counters.kv += result.kv
        if result.lost_blocks:
            replica.pool.unpublish(unpack_ints(result.lost_blocks))
        if part.drafted:
            for length, tokens in zip(part.drafted, part.tokens, strict=True):
                if length and tokens:
                    counters.observe_draft(length, len(tokens) - 1)
        is_plain = not (errors or refused or varies or part.scored or result.logprobs)
        served: list[TenantState] = []
        slices: Iterable[Slice] = (
            outbox.accept_next(part, counters, served)
            if is_plain
            else zip(part.seqs, part.counts, part.drafts, part.tokens, strict=True)
        )
        for seq, count, draft, tokens in slices:
            seq.num_in_flight -= 1
            request = seq.request
            was_closed = seq.closed
            if request.ended:
                pass
            elif errors and seq.seq_id in errors:
                self._fail(request, EngineError(errors[seq.seq_id]), outbox)
            elif refused and seq.seq_id in refused:
                self._fail(request, InvalidRequest(refused[seq.seq_id]), outbox)
            else:
                seq.num_committed += count
                finish = None
                if varies and tokens is not None:
                    seq.correct(draft, len(tokens) - 1)
                scores = new_scores(seq, part, result) if part.scored else ()
                if tokens:
                    finish = accept(seq, tokens, scores, result, outbox, counters, now)
                elif scores or not request.samples:
                    finish = accept_prompt(seq, scores, outbox, counters, now)
                if not request.has_begun and (tokens or scores or finish is not None):
                    self._entrance.begun(request, now)
                if tokens:
                    served += [request.account] * len(tokens)
                if seq.num_committed >= seq.publish_at:
                    replica.tables.filled(seq, publishes=caches)
                if finish is not None:
                    charge(served)
                    self._note_pace(request, now)
                    self._end(request)
                    self._journal.finished(request, finish)
            if was_closed and not seq.num_in_flight:
                replica.drained(seq)
                if not request.ended:
                    self._requeue(request)  # it was preempted
        charge(served)

    # Watching.

    def take_warning(self) -> str | None:
        """Return what the user should know, once; None: nothing."""
        return None if self._depths is None else self._depths.take_warning()

    def attention_times(self) -> dict[int, float]:
        """Return how long each present attention node takes for the last step's largest load."""
        if self._last_load is None:
            return {}
        times = self._fit.fit(self._formation.table.local).attention_times(self._last_load)
        return {node: time for node, time in times.items() if self._replicas[node].is_present}

    def progressed(self, message: Progress, now: float) -> None:
        """Note that a node makes progress in a step."""
        self._in_flight.progressed(step=message.step, generation=message.generation, now=now)

    def oldest_step(self) -> StepUnderWay | None:
        """Return the step that the nodes work on, if there is one."""
        return self._in_flight.under_way()

    def stats(self, query_id: int, expert_tokens: tuple[tuple[int, ...], ...], now: float) -> Stats:
        """Return the counters and gauges."""
        is_busy = self._in_flight.head is not None
        num_blocks = sum(replica.pool.num_blocks for replica in self._replicas)
        num_available = sum(replica.pool.num_available for replica in self._replicas)
        num_needed = sum(replica.num_frames_needed for replica in self._replicas)
        return Stats(
            query_id=query_id,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            max_queued_requests=self._plan.scheduling.max_num_queued_reqs,
            num_refused=dict(self._entrance.num_refused),
            first_token_s=self._entrance.first_token_s(),
            kv_cache_usage=1.0 - num_available / num_blocks,
            num_blocks=num_blocks,
            kv_positions=self._positions_held(),
            kv_frames_usage=num_needed / sum(replica.max_blocks for replica in self._replicas),
            num_grammars_compiled=self.compilations.num_asked,
            num_grammars_found=self.compilations.num_found,
            num_micro_batches=self._builder.num_micro_batches,
            expert_tokens=expert_tokens,
            progress_age_s=now - self._in_flight.progress_s if is_busy else None,
            **self._counters.for_stats(),
        )

    def _positions_held(self) -> dict[int, int]:
        """Return Stats.kv_positions."""
        held: Counter[int] = Counter()
        for replica in self._replicas:
            held.update(replica.positions_held)
        return dict(held)

    def check_integrity(self) -> None:
        """Assert the invariants of every block pool and of the requests' states."""
        for replica in self._replicas:
            replica.check_integrity()
        assert not any(request.ended for request in self._requests.values())
        num_queued = self._entrance.tenants.count() + self._suspects.count()
        assert num_queued + self.num_running + sum(
            not seq.request.ended for r in self._replicas for seq in r.draining.values()
        ) == len(self._requests)
