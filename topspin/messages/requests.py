"""The messages between gateways and scheduler: requests, their outputs, counters.

Between a gateway and the scheduler only; SamplingParams and TokenLogprobs also go to and come from
the attention nodes. See topspin.messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from topspin.messages.base import FinishReason, Message, Role
from topspin.messages.kv import KvCounts
from topspin.messages.lifecycle import NodeMemory


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen; ranges are checked by the gateway, and by the scheduler.

    `seed` is always set (the gateway draws and records one for an unseeded request);
    `choice` counts the n choices of one request. `top_k` 0 and `max_tokens` are counts;
    `eos_token_ids` is empty under ignore_eos. Stop strings stay in the gateway.
    `logprobs` None: none; k >= 0: the chosen token's and the k best. `prompt_logprobs` likewise,
    of the prompt's tokens from its second on; they are of the model's own distribution.
    `logprob_token_ids`: where `logprobs` is given, those of these tokens in place of the best.
    `max_tokens` 0: the prompt is computed and nothing sampled. `kv_retrieval_tokens` None: tokens
    attend to as many keys as the engine's retrieval says; 0: to all.
    `grammar` (llguidance's text; empty: none) is what the whole output follows, up to an eos token;
    `allowed_token_ids` are the only tokens that may be chosen (empty: all), `bad_words` the
    sequences of tokens that the output never has.
    """

    max_tokens: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    kv_retrieval_tokens: int | None = None
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_constrained(self) -> bool:
        """Return whether some tokens may not be chosen, by more than their scores."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words)

    @property
    def has_penalty(self) -> bool:
        """Return whether the scores of tokens depend on those before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def is_plain(self) -> bool:
        """Return whether only temperature and filters change scores, and only tokens are asked for.

        As most requests are.
        """
        edits = self.has_penalty or self.logit_bias or self.min_tokens or self.is_constrained
        return not edits and self.logprobs is None


def engine_id(request_id: str, number: int, choice: int) -> str:
    """Return the id of one choice of a client's request in the engine.

    `number` tells requests apart to which clients gave the same id.
    """
    return f"{request_id}#{number}-{choice}"


def client_id(request_id: str) -> str:
    """Return the id of the client's request, which logs show, from that of a choice."""
    named, _, rest = request_id.rpartition("#")
    return named or rest


def choice_of(request_id: str) -> str:
    """Return which of its client's choices the id of a choice names."""
    return request_id.rpartition("-")[2]


class Tenant(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The owner of a request, and what the operator grants it; a limit of 0 is none.

    While several tenants want more than there is, their shares are in proportion to `weight`.
    `max_concurrency` counts choices that wait or run. An `operator` (1) may watch the engine, and
    so see what other tenants' requests take. Without keys all requests are of the tenant without a
    name.
    """

    name: str = ""
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=1000)] = 1.0
    max_concurrency: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    requests_per_minute: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    tokens_per_minute: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    operator: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0


class AddRequest(Message, frozen=True, kw_only=True):
    """One choice of one request. `prompt` is packed ints; `cache_salt` separates tenants.

    Requests of lower `priority` are served first; of equal ones, the first to come. One that is
    `replayed` had been taken by a scheduler that is gone: it goes on behind the `output` (packed
    ints) and the log-probabilities of its prompt's tokens, `num_scored`, that were delivered.
    `timeout_s`: its client waits so long for the whole answer; None: it has not said.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    replayed: bool = False
    output: bytes = b""
    num_scored: int = 0
    tenant: Tenant = Tenant()
    timeout_s: float | None = None


class AbortRequest(Message, frozen=True, kw_only=True):
    """The client is gone, or a stop string was found: free the request, send no more outputs."""

    request_id: str


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Natural log-probabilities of one token and of the best ones, best first.

    `rank`: 1 for the most likely token; 0: not counted. Not watched by the garbage collector: long
    prompts have many, each collection would look at all, and they can be in no cycle.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


class RequestOutput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """New tokens of one request. `index` is the output position of the first of them.

    `finish_reason` is set on the last output of a request, and only there; `stop_token_id`
    is the stop or eos token that ended it (it is the last of `token_ids`). `prompt_logprobs` are
    of the prompt's next tokens: over a request's outputs, in order and once each, from its second
    token on. `queue_s` and `prefill_s` are set on the first output with a token, or on the last one
    if there is none: from the request's arrival to its first admission, and from there on.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0


class Outputs(Message, frozen=True, kw_only=True):
    """All new tokens of one finished step for one gateway."""

    outputs: tuple[RequestOutput, ...]


class RequestQueued(Message, frozen=True, kw_only=True):
    """These requests are on a node, or have waited for long; their grammars are compiled.

    Sent once for each that an AddRequest brought, before its first output. It may still fail.
    """

    request_ids: tuple[str, ...]


class RequestFailed(Message, frozen=True, kw_only=True):
    """The request ended with an error; `code`, `status` and `param` as in topspin.errors.

    `param` "grammar" is the field of the client's request that asks for one. If the engine is
    overloaded (status 429), `retry_after_s` says when it may take the request, and `wait_s` how
    long any request of the same tenant would wait now.
    """

    request_id: str
    code: str
    status: int
    message: str
    param: str = ""
    retry_after_s: float = 0.0
    wait_s: float = 0.0


# Upper bounds of the buckets of StepHistogram, in seconds; the last one is open.
STEP_BUCKETS_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025,
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
# Upper bounds of the buckets of Stats.iteration_tokens; the last one is open.
ITERATION_BUCKETS = (1, *(2**power for power in range(3, 15)))


class StepHistogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps by duration: `counts` has one entry more than STEP_BUCKETS_S, not cumulative."""

    counts: tuple[int, ...]
    sum_s: float


class NodeCount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The places of one role that the engine can start without, or cannot; those taken now."""

    role: Role
    optional: bool
    planned: int
    present: int


class SlowNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node that needs `times` as long as its peers for the same work."""

    role: Role
    index: int
    times: float


class EngineState(Message, frozen=True, kw_only=True):
    """Sent to a gateway after its Hello and at every change.

    In state "recovering" requests are accepted and wait: a lost node is being replaced.
    `max_request_tokens`: prompt and output together that fit the model and one node's cache; 0
    while starting.
    """

    state: Literal["starting", "ready", "recovering", "failed", "stopping"]
    detail: str = ""
    max_request_tokens: int = 0


class StatsQuery(Message, frozen=True, kw_only=True):
    """Ask the scheduler for its counters."""

    query_id: int


class Stats(Message, frozen=True, kw_only=True):
    """The scheduler's counters and gauges, for /metrics.

    `num_replays` counts requests that were queued again after the loss of a node, a step or a
    scheduler, `num_grammars_compiled` those whose grammar the nodes were asked to compile, and
    `num_grammars_found` those that found it compiled or under way.
    `expert_tokens[layer][expert]` counts routed (token, expert) pairs since start;
    `expert_activations` and `expert_batches` are the sums of ExpertCounts'. `expert_balance` is the
    expert nodes' max/mean of such pairs over their speeds, lately under the table in use;
    `expert_balance_before` is that of the previous table when it was replaced. `expert_migrations`
    counts the experts that nodes had to read for new tables. `num_local_layers` are the MoE layers
    that attention nodes compute under the table in use. `progress_age_s`: seconds since a node
    last made progress on the oldest step in flight; None if no step is in flight.
    `num_accepted_tokens[i]` counts the drafts of which more than i tokens were accepted. The next
    five are the draft nodes' (DraftCounts). `kv` has the sums of StepResult's. `iteration_tokens`
    counts steps by the tokens that they computed, of prompts and of outputs, in ITERATION_BUCKETS.
    `kv_positions`: for how many positions of running sequences there are keys and values, in the
    layers of each window; 0: without one. `kv_frames_usage` is the share of the blocks in memory
    that running sequences need there; 0 without a spill. `max_queued_requests`: as many may wait; 0
    while starting. `num_refused` counts refusals for want of room by their cause, and
    `first_token_s` is the predicted wait of one more short request. `nodes` has an entry for each
    role, and each of optional and not, of which the plan has nodes; `memory` has the last report of
    each node that is there, and `slow_nodes` are those that have been slow for a while.
    """

    query_id: int
    num_waiting: int
    num_running: int
    kv_cache_usage: float
    num_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    step_seconds: float
    max_queued_requests: int = 0
    num_refused: dict[str, int] = msgspec.field(default_factory=dict)
    first_token_s: float = 0.0
    nodes: tuple[NodeCount, ...] = ()
    memory: tuple[NodeMemory, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    num_replays: int = 0
    num_grammars_compiled: int = 0
    num_grammars_found: int = 0
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    expert_activations: int = 0
    expert_batches: int = 0
    step_phases: dict[str, StepHistogram] = msgspec.field(default_factory=dict)
    iteration_tokens: tuple[int, ...] = (0,) * (len(ITERATION_BUCKETS) + 1)
    iteration_tokens_sum: int = 0
    num_micro_batches: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: tuple[int, ...] = ()
    num_root_hits: int = 0
    num_root_misses: int = 0
    num_draft_passes: int = 0
    num_overlapped_passes: int = 0
    draft_pass_seconds: float = 0.0
    kv: KvCounts = KvCounts()
    kv_positions: dict[int, int] = msgspec.field(default_factory=dict)
    kv_frames_usage: float = 0.0
    expert_table_version: int = 1
    expert_migrations: int = 0
    expert_balance: float = 1.0
    expert_balance_before: float = 1.0
    num_local_layers: int = 0
    progress_age_s: float | None = None
