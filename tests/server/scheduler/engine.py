"""A whole engine on a virtual clock: the policy, M fake nodes, and a client that checks.

Every step is executed faithfully; the test chooses the order of scheduling, answering, adding and
aborting. `finish()` runs to the end and compares every output with `generate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.nodes.formation import Formation
from server.scheduler.planning.outbox import Outbox
from server.scheduler.planning.plans import StepMessages
from server.scheduler.planning.policy import Policy
from tests.server.scheduler.fake_nodes import VOCAB_SIZE, FakeNode, generate, score
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import (
    AddRequest,
    Outputs,
    RequestFailed,
    RequestOutput,
    SamplingParams,
    StepResult,
    Tenant,
    TokenLogprobs,
    pack_ints,
    unpack_ints,
)
from topspin.plan.kv_cache import KvCacheSpec, kv_groups
from topspin.plan.settings import FailoverPolicy, SchedulingPolicy, Transport
from topspin.plan.spec import (
    AttentionNode,
    DraftNode,
    EnginePlan,
    ExpertNode,
    LinkSpec,
    PlannedModel,
)

GATEWAY = b"gateway"
TABLE = uniform_table(num_layers=1, num_experts=2, num_nodes=1)


def make_config(
    *,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    num_nodes: int = 1,
    num_expert_nodes: int = 1,
    transport: Transport = "shm",
    deadline_s: float = 30.0,
    failover: FailoverPolicy | None = None,
    draft_nodes: int = 0,
    micro_batches: int | None = 1,
    **scheduling: Any,
) -> EnginePlan:
    """Return the plan of equal nodes with small limits; expert nodes hold 2 experts each.

    No request is refused for its time unless `max_ttft_s` says so.
    """
    scheduling.setdefault("max_ttft_s", 0.0)
    common: dict[str, Any] = {"device": "cpu", "kernels": "cpu", "wait": "block"}
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    attention = [
        AttentionNode(index=index, kv_cache_bytes=2**20, **limits, **common)
        for index in range(num_nodes)
    ]
    experts = [ExpertNode(index=index, experts=2, **common) for index in range(num_expert_nodes)]
    drafts = [DraftNode(index=index, kv_cache_tokens=64, **common) for index in range(draft_nodes)]
    return EnginePlan(
        model=PlannedModel(path="unused", max_model_len=max_model_len, dtype="float32"),
        kv_cache=KvCacheSpec(block_size=block_size),
        nodes=(*attention, *experts, *drafts),
        links=(
            LinkSpec(transport=transport, payload="fp32", window_rows=16, deadline_s=deadline_s),
        ),
        failover=failover or FailoverPolicy(restart=False),
        scheduling=SchedulingPolicy(micro_batches=micro_batches, **scheduling),
    )


def make_policy(
    config: EnginePlan,
    *,
    num_blocks: int | Sequence[int] = 32,
    formation: Formation | None = None,
    num_frames: int | None = None,
    **settings: Any,
) -> Policy:
    """Return a policy over nodes of `num_blocks` blocks (each, or by node), on separate cores."""
    if isinstance(num_blocks, int):
        num_blocks = [num_blocks] * len(config.attention)
    return Policy(
        config,
        formation=formation or Formation(TABLE),
        num_blocks=num_blocks,
        num_frames=None if num_frames is None else [num_frames] * len(num_blocks),
        vocab_size=VOCAB_SIZE,
        shares_cores=False,
        **{"cost": CostModel(), **settings},
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    salt: str = "",
    priority: int = 0,
    tenant: Tenant | None = None,
    timeout_s: float | None = None,
    **sampling: Any,
) -> AddRequest:
    """Return a request with the given prompt."""
    return AddRequest(
        request_id=request_id,
        prompt=pack_ints(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, **sampling),
        cache_salt=salt,
        priority=priority,
        tenant=tenant or Tenant(),
        timeout_s=timeout_s,
    )


def num_tokens_of(step: StepMessages, node: int = 0) -> list[int]:
    """Return the slices' sizes of a plan with one micro-batch."""
    (micro_batch,) = step.plans[node].micro_batches
    return list(unpack_ints(micro_batch.num_tokens))


def first_stop(prompt: list[int], seed: int, position: int) -> int:
    """Return the token at an output position, if it does not occur earlier."""
    output = generate(prompt, make_request("", prompt, max_tokens=20, seed=seed).sampling, 64)
    assert output[position] not in output[:position]
    return output[position]


@dataclass
class Received:
    """The messages that the client of one request has received."""

    message: AddRequest
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    failure: RequestFailed | None = None
    aborted: bool = False

    @property
    def ended(self) -> bool:
        """Say whether no more messages may come."""
        finished = bool(self.outputs) and self.outputs[-1].finish_reason is not None
        return self.aborted or self.failure is not None or finished


class Engine:
    """The policy with its nodes. Tenants are identified by seed: one seed, one request."""

    def __init__(
        self,
        config: EnginePlan,
        *,
        fails: Callable[[int], bool] = lambda seq_id: False,
        offers: Callable[[int], int] = lambda at_most: at_most,
        accepts: Callable[[int], int] = lambda at_most: 0,
        step_s: Callable[[int], float] = lambda num_rows: 0.01,
        table: ExpertTable = TABLE,
        **policy: Any,
    ) -> None:
        """`step_s`: how long a decode step of so many rows takes; `policy` is make_policy's."""
        self._table = table
        self.config = config
        self._new_policy = lambda formation: make_policy(config, formation=formation, **policy)
        self.clients: dict[str, Received] = {}
        self.now = 0.0
        self._tenants: dict[int, str] = {}
        groups = kv_groups(
            policy.get("windows", ()), config.kv_cache, max_len=config.model.max_model_len
        )
        self._node_acts: dict[str, Any] = {
            "fails": fails,
            "offers": offers,
            "accepts": accepts,
            "windows": groups.windows,
        }
        self._step_s = step_s
        self.steps: list[StepMessages] = []
        self._begin()

    def _begin(self) -> None:
        self.formation = Formation(self._table)
        self.policy = self._new_policy(self.formation)
        self.nodes = [self._new_node(index) for index in range(len(self.config.attention))]
        self.present = set(range(len(self.nodes)))
        # Results of abandoned generations, which may still come.
        self.late: list[StepResult] = []
        # Per node: results that it has computed and the scheduler has not received.
        self.results: list[deque[StepResult]] = [deque() for _ in self.nodes]
        # Per node: the blocks of the sequences in each step without a result.
        self._touched: list[deque[dict[int, set[int]]]] = [deque() for _ in self.nodes]

    def replace_scheduler(self) -> None:
        """Lose the scheduler and all caches; another one gets the rest of every request."""
        self._begin()
        for client in self.clients.values():
            if not client.ended:
                rest = msgspec.structs.replace(
                    client.message,
                    replayed=True,
                    output=pack_ints(client.tokens),
                    num_scored=len(client.scores),
                )
                assert self.policy.add(rest, peer=GATEWAY, now=self.now) is None

    def _new_node(self, index: int) -> FakeNode:
        return FakeNode(
            self.config.attention[index],
            num_blocks=self.policy._replicas[index].pool.num_blocks,
            block_size=self.config.kv_cache.block_size,
            tenant_of=lambda seed: self._tenants[seed],
            **self._node_acts,
        )

    def halt(self, lost: Sequence[int] = (), *, has_died: bool = False) -> None:
        """End the generation; the attention nodes `lost` can come back only empty.

        `has_died`: because a node died.
        """
        self.formation.begin_generation()
        self.receive(self.policy.halt())
        if has_died:
            self.receive(self.policy.node_died())
        self.abandon()
        for index in lost:
            self.present.discard(index)
            self.policy.lose(index)
            self.renew(index)
        self.policy.check_integrity()

    def abandon(self) -> None:
        """Let the nodes give up their steps, whose results come late or never."""
        for index, node in enumerate(self.nodes):
            self.late += self.results[index]
            self.results[index].clear()
            self._touched[index].clear()
            node.sequences.clear()

    def renew(self, index: int) -> None:
        """Have an attention node begin another life, with an empty cache."""
        self.nodes[index] = self._new_node(index)

    def resume(self, back: Sequence[int] = ()) -> None:
        """Continue with the remaining nodes and those that are back."""
        self.present |= set(back)
        version = self.formation.generation
        self.formation.use_part(msgspec.structs.replace(TABLE, version=version))
        self.policy.resume(self.present)

    def answer_late(self) -> None:
        """Deliver a result of an abandoned generation."""
        if self.late:
            assert not list(self.policy.update(self.late.pop(0), self.now))

    def add(self, message: AddRequest) -> RequestFailed | None:
        """Send a request; its client is in `clients` even if it was refused."""
        self._tenants[message.sampling.seed] = message.cache_salt
        refused = self.policy.add(message, peer=GATEWAY, now=self.now)
        if refused is None or message.request_id not in self.clients:
            self.clients[message.request_id] = Received(message, failure=refused)
        return refused

    def abort(self, request_id: str) -> None:
        """Abort a request, ended or not."""
        ended = self.clients[request_id].ended
        assert self.policy.abort(request_id, peer=GATEWAY) == (not ended)
        if not ended:
            self.clients[request_id].aborted = True

    def schedule(self) -> bool:
        """Plan a step and let the nodes execute it; False if there was none."""
        step = self.policy.schedule(self.now)
        if step is None:
            return False
        self.steps.append(step)
        assert tuple(step.plans) == step.ticket.participants
        for index, plan in step.plans.items():
            self._check_reuse(index, step)
            self.results[index].append(self.nodes[index].execute(plan))
            self._touched[index].append(self.nodes[index].touched)
        return True

    def _check_reuse(self, index: int, step: StepMessages) -> None:
        """Check that no block that a running step uses for a sequence is given to another one."""
        for micro_batch in step.plans[index].micro_batches:
            ids = list(unpack_ints(micro_batch.block_ids))
            counts = unpack_ints(micro_batch.block_counts)
            for seq_id, count in zip(unpack_ints(micro_batch.seq_ids), counts, strict=True):
                blocks, ids = set(ids[:count]), ids[count:]
                for tables in self._touched[index]:
                    for other, table in tables.items():
                        assert other == seq_id or not table & blocks, "reused too early"

    def answer(self, index: int) -> bool:
        """Deliver the oldest result of one node; False if it has none."""
        if not self.results[index]:
            return False
        result = self.results[index].popleft()
        num_rows = len(unpack_ints(result.seq_ids)) + sum(unpack_ints(result.drafted))
        self.now += self._step_s(num_rows)
        self._touched[index].popleft()
        self.receive(self.policy.update(result, self.now))
        return True

    def receive(self, outbox: Outbox) -> None:
        """Check and keep messages to gateways."""
        for peer, message in outbox:
            assert peer == GATEWAY
            if isinstance(message, Outputs):
                for output in message.outputs:
                    client = self.clients[output.request_id]
                    assert not client.ended, "an output after the end"
                    assert output.index == len(client.tokens)
                    client.tokens += output.token_ids
                    client.scores += output.prompt_logprobs
                    client.outputs.append(output)
            else:
                assert isinstance(message, RequestFailed)
                client = self.clients[message.request_id]
                assert not client.ended
                client.failure = message

    def turn(self) -> bool:
        """Plan as many steps as possible, then let every node answer once; False when idle."""
        planned = False
        while self.schedule():
            planned = True
        answered = [self.answer(index) for index in range(len(self.nodes))]
        return planned or any(answered)

    def finish(self, max_turns: int = 2000) -> None:
        """Run until idle; every request must have ended once, with the right output."""
        for _ in range(max_turns):
            self.policy.check_integrity()
            if not self.turn():
                break
        else:
            raise AssertionError("the engine does not come to an end")
        self.check_outputs()
        assert self.policy.num_running == self.policy.num_waiting == 0
        assert self.policy.stats(0, (), self.now).kv_cache_usage == 0.0

    def check_outputs(self) -> None:
        """Compare all received outputs with direct generation."""
        for client in self.clients.values():
            message = client.message
            prompt = unpack_ints(message.prompt)
            expected = generate(prompt, message.sampling, self.config.model.max_model_len)
            scores = [score(prompt, position) for position in range(1, len(prompt))]
            if message.sampling.prompt_logprobs is None:
                scores = []
            assert client.ended
            if client.aborted or client.failure:
                assert client.tokens == expected[: len(client.tokens)]
                assert client.scores == scores[: len(client.scores)]
            else:
                assert client.tokens == expected
                assert client.scores == scores
                self._check_end(client)

    def _check_end(self, client: Received) -> None:
        sampling = client.message.sampling
        last = client.outputs[-1]
        stops = {*sampling.stop_token_ids, *sampling.eos_token_ids}
        stopped = len(client.tokens) > sampling.min_tokens and client.tokens[-1] in stops
        assert last.finish_reason == ("stop" if stopped else "length")
        assert last.stop_token_id == (client.tokens[-1] if stopped else None)
        assert all(output.finish_reason is None for output in client.outputs[:-1])
