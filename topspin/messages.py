"""Every message of the control plane, in one place.

Owns their form: frozen, tagged msgspec structs, encoded as MessagePack maps with a
`type` field. Knows no sockets (topspin.channel) and no policy. Numeric arrays travel
as little-endian int32 bytes (`pack_ints`), so that a decode step of 256 sequences is a
few buffers and not thousands of objects. A change of meaning raises PROTOCOL_VERSION.

Who sends what:
    node -> scheduler     Hello, Ready, StepResult, StepFailed, ExpertCounts, Goodbye,
                          TablePrepared
    scheduler -> node     Welcome, Refused, StepTicket (experts), StepPlan (attention), Stop,
                          PrepareTable
    gateway -> scheduler  Hello, AddRequest, AbortRequest, StatsQuery
    scheduler -> gateway  EngineState, Outputs, RequestFailed, Stats, Refused
    for a trace           TraceRequest (gateway), ClockPing, TraceQuery (to nodes),
                          ClockPong, TraceDump (nodes), Trace (to the gateway)
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from topspin.config import NodeConfig
from topspin.errors import ProtocolError
from topspin.expert_table import ExpertTable

PROTOCOL_VERSION = 1

Role = Literal["attention", "expert", "gateway"]
FinishReason = Literal["stop", "length", "abort"]
ProgressState = Literal["working", "waiting", "done"]


def pack_ints(values: Iterable[int]) -> bytes:
    """Return `values` as little-endian int32 bytes."""
    packed = array("i", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ints(data: bytes) -> Sequence[int]:
    """Return the int32 values in `data`; raises ProtocolError if its size is no multiple of 4."""
    if len(data) % 4:
        raise ProtocolError(f"packed integers: {len(data)} bytes is not a multiple of 4")
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag=True,
    forbid_unknown_fields=True,
):
    """Root of all control messages."""


# Membership.


class Hello(Message, frozen=True, kw_only=True):
    """A worker or gateway introduces itself.

    `fingerprint` names the checkpoint (empty for gateways), `data_address` where an expert
    node accepts attention nodes ("unix:@NAME", "tcp:HOST:PORT", either of them behind
    "nixl:", "local"; empty otherwise).
    `incarnation` is unique to this process life.
    """

    role: Role
    index: int
    incarnation: int
    revision: str
    fingerprint: str = ""
    data_address: str = ""
    pid: int = 0
    protocol: int = PROTOCOL_VERSION


class ExpertPeer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an expert node is reached, and which process life it is."""

    address: str
    incarnation: int


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who makes up the engine in one generation, by index; None: that node is absent.

    Pairs, steps and results belong to a generation. An absent expert node holds no experts
    in `table`.
    """

    table: ExpertTable
    experts: tuple[ExpertPeer | None, ...]
    attention_incarnations: tuple[int | None, ...]
    generation: int = 1


class Welcome(Message, frozen=True, kw_only=True):
    """Sent to every node once all nodes of the engine have said Hello.

    A node that comes later (`joins_late`) gets it at once: it loads what the table gives it,
    says Loaded, and connects when it is sent a Reform.
    """

    config: NodeConfig
    topology: Topology
    joins_late: bool = False

    @property
    def table(self) -> ExpertTable:
        """Return the topology's expert table."""
        return self.topology.table


class Refused(Message, frozen=True, kw_only=True):
    """The peer may not take part; it logs the reason and exits with a failure."""

    reason: str


class Ready(Message, frozen=True, kw_only=True):
    """A node has loaded, connected and warmed up. `num_blocks` is 0 for expert nodes."""

    role: Role
    index: int
    num_blocks: int = 0
    weight_bytes: int = 0
    load_s: float = 0.0
    generation: int = 1


class Stop(Message, frozen=True, kw_only=True):
    """The engine is shutting down in order: finish the current step, close, exit 0."""

    reason: str


class Goodbye(Message, frozen=True, kw_only=True):
    """A node leaves because of an error of its own, named here, before it exits."""

    role: Role
    index: int
    code: str
    message: str


# Failover.


class Loaded(Message, frozen=True, kw_only=True):
    """A node that joins late has loaded and warmed up; it has no connections yet."""

    role: Role
    index: int
    num_blocks: int = 0
    load_s: float = 0.0


class Halt(Message, frozen=True, kw_only=True):
    """Generation `generation` begins: give up all steps and sequences, close the net.

    Ends a step's waits. Steps that were sent before it are not answered.
    """

    generation: int


class Halted(Message, frozen=True, kw_only=True):
    """The node has closed its net and keeps nothing of earlier generations but its weights
    and (attention) its cache."""

    role: Role
    index: int
    generation: int


class Reform(Message, frozen=True, kw_only=True):
    """Sent once every node named in `topology` has halted: connect anew and say Ready."""

    topology: Topology


# Requests.


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen; ranges are checked by the gateway, and by the scheduler.

    `seed` is always set (the gateway draws and records one for an unseeded request);
    `choice` counts the n choices of one request. `top_k` 0 and `max_tokens` are counts;
    `eos_token_ids` is empty under ignore_eos. Stop strings stay in the gateway.
    `logprobs` None: none; k >= 0: the chosen token's and the k best.
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


class AddRequest(Message, frozen=True, kw_only=True):
    """One choice of one request. `prompt` is packed ints; `cache_salt` separates tenants."""

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    cache_salt: str = ""


class AbortRequest(Message, frozen=True, kw_only=True):
    """The client has gone, or a stop string was found: free the request, send nothing more."""

    request_id: str


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Natural log-probabilities of one sampled token and of the best ones, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New tokens of one request. `index` is the output position of the first of them.

    `finish_reason` is set on the last output of a request, and only there; `stop_token_id`
    is the stop or eos token that ended it (it is the last of `token_ids`).
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


class Outputs(Message, frozen=True, kw_only=True):
    """All new tokens of one finished step for one gateway."""

    outputs: tuple[RequestOutput, ...]


class RequestFailed(Message, frozen=True, kw_only=True):
    """The request ended with an error; `code` and `status` as in topspin.errors."""

    request_id: str
    code: str
    status: int
    message: str


# Upper bounds of the buckets of StepHistogram, in seconds; the last one is open.
STEP_BUCKETS_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025,
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


class StepHistogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps by duration: `counts` has one entry more than STEP_BUCKETS_S, not cumulative."""

    counts: tuple[int, ...]
    sum_s: float


class EngineState(Message, frozen=True, kw_only=True):
    """Sent to a gateway after its Hello and at every change.

    In "recovering" requests are accepted and wait: a lost node is being replaced.
    `max_request_tokens`: prompt and output together that fit the model and one node's
    cache; 0 while starting.
    """

    state: Literal["starting", "ready", "recovering", "failed", "stopping"]
    detail: str = ""
    max_request_tokens: int = 0


class StatsQuery(Message, frozen=True, kw_only=True):
    """Ask the scheduler for its counters."""

    query_id: int


class Stats(Message, frozen=True, kw_only=True):
    """The scheduler's counters and gauges, for /metrics.

    `num_replays` counts requests that a lost node or step sent back to the queue.
    `expert_tokens[layer][expert]` counts routed (token, expert) pairs since start.
    `expert_balance` is the expert nodes' max/mean of such pairs under the table in use, as
    served lately; `expert_balance_before` that under the table before, when it was left.
    `expert_migrations` counts the experts that nodes had to read for new tables.
    `progress_age_s`: how long ago a node last got on with the oldest step in flight; None if
    no step is in flight.
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
    num_replays: int = 0
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    step_phases: dict[str, StepHistogram] = {}
    num_micro_batches: int = 0
    expert_table_version: int = 1
    expert_migrations: int = 0
    expert_balance: float = 1.0
    expert_balance_before: float = 1.0
    progress_age_s: float | None = None


# Steps.


class StepTicket(Message, frozen=True, kw_only=True):
    """One engine step, as every node of it must see it.

    `previous` is the step before it in the chain (0 at the start of a generation);
    `participants` are the attention nodes that take part, ascending; `row_buckets[mb]` is
    an upper bound of the token rows that any participant has in micro-batch mb.
    """

    step: int
    previous: int
    generation: int
    table_version: int
    num_micro_batches: int
    participants: tuple[int, ...]
    row_buckets: tuple[int, ...]


class NewSequence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sequence that the node has not seen, whole.

    `seq_id` is unique to this admission (a preempted request comes back under another).
    `tokens`: packed prompt and, after a preemption, the output so far; the first
    `num_computed` of them are in the cache already, in `blocks` (packed block ids).
    """

    seq_id: int
    tokens: bytes
    num_prompt_tokens: int
    num_computed: int
    blocks: bytes
    sampling: SamplingParams


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sequence slices of one micro-batch on one attention node, as packed arrays.

    Slice i advances sequence `seq_ids[i]` by `num_tokens[i]` positions from its committed
    length. Its input is the sequence's own next tokens: the known ones (prompt), then
    whatever the node itself sampled last (LAST). `sample[i]` is 1 if the last position's
    logits are sampled. `block_counts[i]` new blocks of `block_ids` are appended to its table.
    """

    seq_ids: bytes
    num_tokens: bytes
    sample: bytes
    block_counts: bytes
    block_ids: bytes


class StepPlan(Message, frozen=True, kw_only=True):
    """What one attention node does in a step: the ticket, and its micro-batches.

    `finished` (packed seq ids) are forgotten before anything else; `new` come next;
    `micro_batches` has ticket.num_micro_batches entries, some perhaps empty.
    """

    ticket: StepTicket
    finished: bytes
    new: tuple[NewSequence, ...]
    micro_batches: tuple[MicroBatch, ...]


class StepTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that one attention node spent in a step, by phase.

    total = prepare (the plan's inputs) + attention + wait (for the experts) + sample.
    `expert_s` is the busiest expert node's computing time in the step, `link_s` the mean
    one-way time where it could be told from waiting. `gap_s`: how long the node had no plan
    before this step.
    """

    total_s: float
    attention_s: float
    wait_s: float
    sample_s: float
    prepare_s: float = 0.0
    expert_s: float = 0.0
    link_s: float | None = None
    gap_s: float = 0.0


class StepResult(Message, frozen=True, kw_only=True):
    """What one attention node sampled: packed `seq_ids` and `tokens`, in plan order.

    `logprobs` holds entries for the sequences that asked; `errors` the sequences that
    could not be sampled, with the reason (their requests fail, the step does not).
    """

    step: int
    generation: int
    index: int
    seq_ids: bytes
    tokens: bytes
    timings: StepTimings
    logprobs: dict[int, TokenLogprobs] = {}
    errors: dict[int, str] = {}


class StepFailed(Message, frozen=True, kw_only=True):
    """A node could not finish a step; `code` and `message` as in topspin.errors."""

    step: int
    generation: int
    role: Role
    index: int
    code: str
    message: str


class Progress(Message, frozen=True, kw_only=True):
    """How a node gets on with a long step (topspin.progress).

    It works, waits for a peer's rows, or (expert nodes, whose results name no step) has done
    its part and nothing has come since.
    """

    step: int
    generation: int
    role: Role
    index: int
    state: ProgressState = "working"


class ExpertCounts(Message, frozen=True, kw_only=True):
    """(token, expert) pairs that an expert node has served since its last report.

    `counts[layer]`: packed ints, one per slot of that MoE layer on this node.
    """

    index: int
    table_version: int
    counts: tuple[bytes, ...]


# Expert tables.


class PrepareTable(Message, frozen=True, kw_only=True):
    """To every node: be able to run steps whose ticket names this table, and say so.

    Steps of the table in use go on meanwhile. A newer PrepareTable replaces one that was
    not answered.
    """

    table: ExpertTable


class TablePrepared(Message, frozen=True, kw_only=True):
    """The node can run steps of table `version`: routes are known, or weights are read."""

    role: Role
    index: int
    version: int


# Traces. Clocks are CLOCK_MONOTONIC of each process's host, in nanoseconds.


class TraceRequest(Message, frozen=True, kw_only=True):
    """A gateway wants the stamps of the last `seconds` of every node."""

    query_id: int
    seconds: float


class ClockPing(Message, frozen=True, kw_only=True):
    """To a node: what time is it? Answered between steps."""

    query_id: int
    sent_ns: int


class ClockPong(Message, frozen=True, kw_only=True):
    """The answer to a ClockPing, with the node's clock when it was read and answered."""

    query_id: int
    sent_ns: int
    node_ns: int


class TraceQuery(Message, frozen=True, kw_only=True):
    """To a node: send the stamps of your last `seconds`. Answered between steps."""

    query_id: int
    seconds: float


class TraceDump(Message, frozen=True, kw_only=True):
    """A node's stamps, as topspin.trace packs them; empty if it does not record."""

    query_id: int
    records: bytes


class NodeTrace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node's stamps. Its clock minus the scheduler's is `offset_ns`, to +-`error_ns`."""

    role: str
    index: int
    offset_ns: int
    error_ns: int
    records: bytes


class Trace(Message, frozen=True, kw_only=True):
    """The answer to a TraceRequest; `missing` names the nodes that did not answer in time."""

    query_id: int
    nodes: tuple[NodeTrace, ...]
    missing: tuple[str, ...] = ()


AnyMessage = (
    TraceRequest
    | ClockPing
    | ClockPong
    | TraceQuery
    | TraceDump
    | Trace
    | Hello
    | Welcome
    | Refused
    | Ready
    | Loaded
    | Halt
    | Halted
    | Reform
    | Stop
    | Goodbye
    | AddRequest
    | AbortRequest
    | Outputs
    | RequestFailed
    | EngineState
    | StatsQuery
    | Stats
    | StepTicket
    | StepPlan
    | StepResult
    | StepFailed
    | Progress
    | ExpertCounts
    | PrepareTable
    | TablePrepared
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return `message` as MessagePack."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Return the message in `data`; raises ProtocolError if it is none of the above."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a control message: {error}") from error
