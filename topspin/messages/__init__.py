"""Every message of the control plane, in one place.

Import them from here; the modules of this package define them by sender and receiver. Owns their
format: frozen, tagged msgspec structs, encoded as MessagePack maps with a `type` field. Knows no
sockets (topspin.processes.channel) and no policy. Numeric arrays travel as little-endian int32
bytes (`pack_ints`), so that a decode step of 256 sequences is a few buffers and not thousands of
objects. A change of meaning increments PROTOCOL_VERSION.

Senders and receivers:
    node -> scheduler     Hello, Loaded, Ready, Halted, TablePrepared, Progress, NodeMemory,
                          StepResult, GrammarReady and GrammarLost (attention),
                          ExpertCounts (experts), DraftCounts (draft nodes), StepFailed, Leaving,
                          Goodbye
    scheduler -> node     Welcome, Refused, Halt, Reform, PrepareTable, StepTicket (experts),
                          StepPlan, CompileGrammar and ReleaseGrammar (attention), Stop
    gateway -> scheduler  Hello, AddRequest, AbortRequest, StatsQuery, TraceRequest, FeedRequest
    scheduler -> gateway  EngineState, RequestQueued, Outputs, RequestFailed, Stats, Trace, Feed,
                          Refused
    attention -> draft    Verdicts
    draft -> attention    TreeOffers
    for a trace           ClockPing, TraceQuery (to nodes), ClockPong, TraceDump (from nodes)
"""

from __future__ import annotations

import msgspec

from topspin.errors import ProtocolError
from topspin.messages.base import (
    PROTOCOL_VERSION,
    FinishReason,
    Message,
    ProgressState,
    Role,
    pack_ints,
    unpack_ints,
)
from topspin.messages.drafts import DraftCounts, TreeOffer, TreeOffers, Verdict, Verdicts
from topspin.messages.feeds import Feed, FeedNews, FeedNode, FeedRequest, FeedStep
from topspin.messages.kv import KvCounts
from topspin.messages.lifecycle import (
    ExpertPeer,
    Goodbye,
    Halt,
    Halted,
    Hello,
    Leaving,
    Loaded,
    NodeMemory,
    PrepareTable,
    Ready,
    Reform,
    Refused,
    Stop,
    TablePrepared,
    Topology,
    Welcome,
)
from topspin.messages.requests import (
    ITERATION_BUCKETS,
    STEP_BUCKETS_S,
    AbortRequest,
    AddRequest,
    EngineState,
    NodeCount,
    Outputs,
    RequestFailed,
    RequestOutput,
    RequestQueued,
    SamplingParams,
    SlowNode,
    Stats,
    StatsQuery,
    StepHistogram,
    Tenant,
    TokenLogprobs,
    choice_of,
    client_id,
    engine_id,
)
from topspin.messages.steps import (
    NOT_NUMBERS,
    SAMPLE,
    SCORE,
    CompileGrammar,
    ExpertCounts,
    GrammarLost,
    GrammarReady,
    MicroBatch,
    NewSequence,
    Progress,
    ReleaseGrammar,
    StepFailed,
    StepPlan,
    StepResult,
    StepTicket,
    StepTimings,
)
from topspin.messages.traces import (
    ClockPing,
    ClockPong,
    NodeTrace,
    Trace,
    TraceDump,
    TraceQuery,
    TraceRequest,
)

__all__ = [
    "ITERATION_BUCKETS",
    "NOT_NUMBERS",
    "PROTOCOL_VERSION",
    "SAMPLE",
    "SCORE",
    "STEP_BUCKETS_S",
    "AbortRequest",
    "AddRequest",
    "AnyMessage",
    "ClockPing",
    "ClockPong",
    "CompileGrammar",
    "DraftCounts",
    "EngineState",
    "ExpertCounts",
    "ExpertPeer",
    "Feed",
    "FeedNews",
    "FeedNode",
    "FeedRequest",
    "FeedStep",
    "FinishReason",
    "Goodbye",
    "GrammarLost",
    "GrammarReady",
    "Halt",
    "Halted",
    "Hello",
    "KvCounts",
    "Leaving",
    "Loaded",
    "Message",
    "MicroBatch",
    "NewSequence",
    "NodeCount",
    "NodeMemory",
    "NodeTrace",
    "Outputs",
    "PrepareTable",
    "Progress",
    "ProgressState",
    "Ready",
    "Reform",
    "Refused",
    "ReleaseGrammar",
    "RequestFailed",
    "RequestOutput",
    "RequestQueued",
    "Role",
    "SamplingParams",
    "SlowNode",
    "Stats",
    "StatsQuery",
    "StepFailed",
    "StepHistogram",
    "StepPlan",
    "StepResult",
    "StepTicket",
    "StepTimings",
    "Stop",
    "TablePrepared",
    "Tenant",
    "TokenLogprobs",
    "Topology",
    "Trace",
    "TraceDump",
    "TraceQuery",
    "TraceRequest",
    "TreeOffer",
    "TreeOffers",
    "Verdict",
    "Verdicts",
    "Welcome",
    "choice_of",
    "client_id",
    "decode",
    "encode",
    "engine_id",
    "pack_ints",
    "unpack_ints",
]

AnyMessage = (
    TraceRequest
    | ClockPing
    | ClockPong
    | TraceQuery
    | TraceDump
    | Trace
    | FeedRequest
    | Feed
    | Hello
    | Welcome
    | Refused
    | Ready
    | NodeMemory
    | Leaving
    | Loaded
    | Halt
    | Halted
    | Reform
    | Stop
    | Goodbye
    | AddRequest
    | AbortRequest
    | Outputs
    | RequestQueued
    | RequestFailed
    | EngineState
    | StatsQuery
    | Stats
    | StepTicket
    | StepPlan
    | StepResult
    | StepFailed
    | CompileGrammar
    | ReleaseGrammar
    | GrammarReady
    | GrammarLost
    | Progress
    | ExpertCounts
    | PrepareTable
    | TablePrepared
    | Verdicts
    | TreeOffers
    | DraftCounts
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return `message` as MessagePack."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Return the message in `data`; raises ProtocolError if it is malformed or unknown."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a control message: {error}") from error
