"""The one interface of the data plane, and the rules that every transport keeps.

Owns the protocols AttentionNet and ExpertNet and their value types; rules.py keeps the order of
calls. Between processes m2n_comm.open chooses the transport; host.local and gpu.local serve
within one. Knows no model and no request.

Call order on an attention node, per step that it takes part in:
    begin(ticket)
    for each MoE layer, for each micro-batch mb in 0..m-1:
        dispatch(mb, layer, hidden, routing)      sends, never waits for an answer
        ... other work ...
        combine(mb, layer, out)                   waits for the answers of that dispatch
A micro-batch has at most one uncombined dispatch. On an expert node:
    begin(ticket)
    for each MoE layer, for each micro-batch: for batch in gather(mb, layer): reply(batch, partial)
    finish()
Both leave out the layers in `local`: by the ticket's table attention nodes compute these
themselves, and nobody sends for them.

Rules: every participant, or its stage that has the layer (topspin.plan.stages), sends every expert
node one frame per (micro-batch, layer), possibly of 0 rows, in one or more parts of at most
`window_rows` rows; a token goes at most once to an expert node, with the slots and weights of its
choices there; the expert node returns one weighted partial sum per row, or
(NetShape.per_expert_answers) one row per choice; the attention side adds the rows of a token in
fp32. Every wait for a peer ends `deadline_s` after it began: that limits a peer's computing between
two frames, about a layer, not a step. Only the first answer of a step that follows one of other
attention nodes may take longer, since the experts serve that step first; the scheduler watches it.
A frame that is late, stale, or of the wrong shape raises a TransportError, and a failed net stays
failed (its memory is not used again).

Threads: a net belongs to the one busy thread of its node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from m2n_comm.waits import WaitPolicy
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.plan.settings import MAX_MICRO_BATCHES
from topspin.plan.spec import NodeConfig
from topspin.plan.stages import Stage
from topspin.trace import Stamps

_COMPRESSED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, kw_only=True, slots=True)
class NetShape:
    """The sizes and dtypes that both ends of a pair agree on; checked in the handshake.

    `payload` is the dtype of hidden rows in both directions. With `compressed`, requests are
    instead float8_e4m3fn or int8 with a scale per row. `compute`: the dtype in which the expert
    node gets the rows (None: payload). `window_rows`: the rows of a window; `num_micro_batches` the
    most that a ticket may ask for. `per_expert_answers`: an answer has the unweighted row of each
    (row, chosen expert), not one weighted sum per row, and the attention side adds them by
    ascending expert id.
    """

    hidden_size: int
    top_k: int
    num_layers: int
    payload: torch.dtype
    window_rows: int
    num_micro_batches: int
    deadline_s: float
    per_expert_answers: bool = False
    compressed: torch.dtype | None = None
    compute: torch.dtype | None = None

    @property
    def request_dtype(self) -> torch.dtype:
        """Return the dtype of a request's rows in its window."""
        return self.compressed or self.payload

    @property
    def answer_rows(self) -> int:
        """Return the rows of an answer window."""
        return self.window_rows * (self.top_k if self.per_expert_answers else 1)

    @classmethod
    def from_config(
        cls, config: NodeConfig, *, hidden_size: int, top_k: int, num_layers: int
    ) -> NetShape:
        """Return the shape that both ends derive from the same model and settings."""
        return cls(
            hidden_size=hidden_size,
            top_k=top_k,
            num_layers=num_layers,
            payload=payload_dtype(config),
            window_rows=config.link.window_rows,
            num_micro_batches=MAX_MICRO_BATCHES,
            deadline_s=config.link.deadline_s,
            per_expert_answers=config.execution.deterministic,
            compressed=_COMPRESSED.get(config.link.payload),
            compute=getattr(torch, config.model.dtype),
        )


def stage_shape(config: NodeConfig, hidden_size: int, stage: Stage) -> NetShape:
    """Return the shape of the pair of an attention node and a stage: rows travel as they are.

    A micro-batch is one frame. A wait for the stage's rows ends when each of its layers has had the
    link's deadline.
    """
    limits = config.attention
    return NetShape(
        hidden_size=hidden_size,
        top_k=1,
        num_layers=1,
        payload=getattr(torch, config.model.dtype),
        window_rows=limits.max_num_batched_tokens,
        num_micro_batches=config.micro_batches or MAX_MICRO_BATCHES,
        deadline_s=config.link.deadline_s * (stage.end - stage.first),
    )


def payload_dtype(config: NodeConfig) -> torch.dtype:
    """Return the dtype of uncompressed rows that --m2n-payload asks for."""
    return torch.float32 if config.link.payload == "fp32" else torch.bfloat16


def wait_policy(config: NodeConfig) -> WaitPolicy:
    """Return how a node waits within a step."""
    return config.node.wait


Senders = Sequence[tuple[int, ...]]
"""By MoE layer, the index of the peer that sends the rows of each participant; (): itself."""


class ExpertBatch(NamedTuple):
    """Rows that an expert node computes together: one part of each participant, joined.

    hidden [R, H] in the compute dtype; slots [R, K] int32, the expert slots on this node, -1
    where the choice went elsewhere; weights [R, K] fp32. `row_counts[i]` rows came from participant
    i of the ticket, in that order. The slots are those of expert table `table_version`,
    which is the ticket's. The tensors are valid until reply().
    """

    micro_batch: int
    layer: int
    part: int
    hidden: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    row_counts: tuple[int, ...]
    table_version: int = 1


Serve = Callable[[ExpertBatch], torch.Tensor]
"""An expert node's computing: from a batch to its partial, as for ExpertNet.reply()."""


class NetTimes(NamedTuple):
    """The times of an attention node's net since begin().

    `wait_s` was spent in combine(); `expert_s` is the busiest expert node's time from having rows
    to replying; `link_s` is the mean one-way time of the round trips in which no frame waited on
    either side, None if there was none.
    """

    wait_s: float
    expert_s: float
    link_s: float | None


NO_TIMES = NetTimes(0.0, 0.0, None)
"""Of a node without a net."""


class AttentionNet(Protocol):
    """The attention side of all pairs (this node, every expert node).

    `is_graph_safe`: dispatch() and combine() only enqueue work on a device, the same work for the
    same shapes, so that Runtime.capture() may record them. Recordings stay valid as long as `epoch`
    is the same. `local` are the MoE layers that are neither dispatched nor combined. Read all after
    begin(), which may change them.
    """

    trace: Stamps | None

    @property
    def local(self) -> frozenset[int]: ...

    @property
    def is_graph_safe(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    def set_table(self, table: ExpertTable) -> None:
        """Keep `table` beside the ones known: a step is routed by the version of its ticket.

        Older versions are forgotten when a newer one is first used. Raises ProtocolError if
        it does not fit.
        """

    def begin(self, ticket: StepTicket) -> None:
        """Open a step that this node takes part in."""

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        num_rows: torch.Tensor | None = None,
    ) -> None:
        """Send hidden [T, H] with its routing: experts [T, K] int64 logical, weights [T, K] fp32.

        `layer` counts MoE layers. T may be 0. The tensors may be reused after return unless T
        exceeds window_rows; then they must stay unchanged until combine(). `num_rows` (int64[1] on
        the device; only for graph-safe nets): rows from num_rows[0] on are padding and go to no
        expert. None: no padding.
        """

    def combine(self, micro_batch: int, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, H] of all partials of that dispatch, which the caller may change.

        It is out [T, H] fp32, filled, or the net's tensor where no sum was needed.
        """

    def wait_s(self) -> float:
        """Return the seconds spent waiting in combine() since begin()."""

    def times(self) -> NetTimes:
        """Return the measured times since begin()."""

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""


class ExpertNet(Protocol):
    """The expert side of all pairs (every attention node, this node).

    `is_graph_safe`: gather() and reply() only enqueue work on a device, and for tickets with as
    many participants and the same row buckets the same work: a batch per micro-batch and layer,
    with rows for every participant's bucket, of which those that did not come have slots -1. Then
    Runtime.capture() may record a whole ticket. Recordings stay valid as long as `epoch` is the
    same. `local` are the MoE layers that are not gathered. Read all after begin(), for its ticket.
    """

    trace: Stamps | None

    @property
    def local(self) -> frozenset[int]: ...

    @property
    def is_graph_safe(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Return for how long the thread has had a core to compute; 0 if the host does nothing.

        Other processes on its cores do not count, nor does a sleep that emulates a slower device.
        """

    def begin(self, ticket: StepTicket) -> None:
        """Open a step."""

    def set_table(self, table: ExpertTable) -> None:
        """Serve tickets of `table` too, as well as of the newest earlier one.

        Raises ProtocolError if it does not fit.
        """

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield the parts of that micro-batch, each joined over the ticket's participants.

        Reply to each before taking the next. A batch may have 0 rows.
        """

    def reply(self, batch: ExpertBatch, partial: torch.Tensor) -> None:
        """Send partial [R, H] (any float dtype) back, each row to its sender.

        With per_expert_answers partial is [P, H]: a row for each slot that is not -1, by
        ascending (row, choice).
        """

    def finish(self) -> None:
        """After a ticket's last reply(): return once all its work has completed.

        On a device this waits; raises the TransportError of a fault there.
        """

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
