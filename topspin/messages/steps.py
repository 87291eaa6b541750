"""Steps: tickets and plans to the nodes, and their results.

Between the scheduler and the nodes only. See topspin.messages.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topspin.messages.base import Message, ProgressState, Role
from topspin.messages.kv import KvCounts
from topspin.messages.requests import SamplingParams, TokenLogprobs

SAMPLE: Final = 1
"""In MicroBatch.wanted: the last certain row, and the draft's rows, are sampled."""
SCORE: Final = 2
"""In MicroBatch.wanted: each row before a prompt token gives that token's log-probability."""

NOT_NUMBERS: Final = "the model's logits are not numbers"
"""In StepResult.errors: by this reason a node whose rows are wrong is found."""


class StepTicket(Message, frozen=True, kw_only=True):
    """One engine step; the same for all its nodes.

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
    """A complete sequence that is new to the node.

    `seq_id` is unique to this admission (a preempted request comes back under another).
    `tokens`: packed prompt and, after a preemption, the output so far; the first
    `num_computed` of them are in the cache already, in `blocks` (packed block ids). The
    node samples no token beyond `max_length`, the total at which the sequence ends.
    `cache_salt` is the tenant's, if nodes learn from what they generate; `request_id` is the
    client's, for logs.
    """

    seq_id: int
    tokens: bytes
    num_prompt_tokens: int
    num_computed: int
    blocks: bytes
    max_length: int
    sampling: SamplingParams
    cache_salt: str = ""
    request_id: str = ""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sequence slices of one micro-batch on one attention node, as packed arrays.

    Slice i feeds `num_tokens[i]` positions of sequence `seq_ids[i]` from its committed length on.
    Its input is the sequence's own next tokens: the known ones (prompt), then the token that the
    node sampled last (LAST). Behind them the node may feed a draft of its own, of at most
    `max_draft[i]` tokens (empty: none); slots are reserved for them. `wanted[i]`, a byte, joins
    SAMPLE and SCORE; 0: the slice only fills the cache. `block_counts[i]` new blocks of
    `block_ids` are appended to its table: one of each group of layers (topspin.plan.kv_cache) side
    by side.
    """

    seq_ids: bytes
    num_tokens: bytes
    wanted: bytes
    block_counts: bytes
    block_ids: bytes
    max_draft: bytes = b""


class StepPlan(Message, frozen=True, kw_only=True):
    """One attention node's work in a step: the ticket, and its micro-batches.

    `finished` (packed seq ids) are removed first; `new` are added next; `micro_batches` has
    ticket.num_micro_batches entries, some perhaps empty.
    """

    ticket: StepTicket
    finished: bytes
    new: tuple[NewSequence, ...]
    micro_batches: tuple[MicroBatch, ...]


class StepTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that one attention node spent in a step, by phase.

    total = prepare (the plan's inputs) + attention + wait (for the experts) + sample. `expert_s` is
    the busiest expert node's computing time in the step, `link_s` the mean one-way time where it
    could be separated from waiting. `gap_s`: the time without a plan before this step. `draft_s`,
    a part of prepare: making drafts, or waiting for those of a draft node.
    """

    total_s: float
    attention_s: float
    wait_s: float
    sample_s: float
    prepare_s: float = 0.0
    expert_s: float = 0.0
    link_s: float | None = None
    gap_s: float = 0.0
    draft_s: float = 0.0


class StepResult(Message, frozen=True, kw_only=True):
    """The tokens that one attention node sampled, packed, of the sequences `seq_ids`.

    Sequence i has `counts[i]` of the `tokens`, one after the other (empty: each has one). A
    sampled slice of n tokens and a draft has so advanced by n - 1 + count; none: the sequence
    had reached its max_length in the step before. `drafted[i]` tokens of a draft were fed with it
    (empty: no sequence had one). `logprobs` has an entry per token for the
    sequences that asked, `prompt_logprobs` for the slices with SCORE one per prompt token that
    follows a row; `errors` the sequences that failed, with the reason (their requests fail, the
    step does not), `refused` those that failed by what their requests ask for. `kv` None: nothing
    to count. The content of `lost_blocks` (packed) could not be written to the spill's file, or
    read.
    """

    step: int
    generation: int
    index: int
    seq_ids: bytes
    tokens: bytes
    timings: StepTimings
    counts: bytes = b""
    drafted: bytes = b""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    refused: dict[int, str] = msgspec.field(default_factory=dict)
    kv: KvCounts | None = None
    lost_blocks: bytes = b""


class CompileGrammar(Message, frozen=True, kw_only=True):
    """To attention nodes: sequences with this grammar come soon; answer with GrammarReady.

    They keep it until ReleaseGrammar. `key` is topspin.grammars.grammar_key's. A Halt, which may
    overtake it, takes it back.
    """

    key: str
    grammar: str


class ReleaseGrammar(Message, frozen=True, kw_only=True):
    """To attention nodes: no request has this grammar any more, compiled or not."""

    key: str


class GrammarReady(Message, frozen=True, kw_only=True):
    """The attention node has compiled a grammar; `error`: it has not, with the reason.

    `may_retry`: the grammar is not to blame.
    """

    index: int
    key: str
    error: str = ""
    may_retry: bool = False


class GrammarLost(Message, frozen=True, kw_only=True):
    """The attention node no longer has a grammar that it had compiled.

    `error`: the grammar is to blame, as sequences that followed it have been told.
    """

    index: int
    key: str
    error: str = ""


class StepFailed(Message, frozen=True, kw_only=True):
    """A node could not finish a step; `code` and `message` as in topspin.errors."""

    step: int
    generation: int
    role: Role
    index: int
    code: str
    message: str


class Progress(Message, frozen=True, kw_only=True):
    """A node's state in a long step (topspin.processes.progress).

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

    `counts[layer]`: packed ints, one per slot of that MoE layer on this node. `batches` counts the
    batches (m2n_comm.net.ExpertBatch) in which the node had pairs, `activations` the slots that
    had some, summed over these. `compute_s`: its
    seconds of computing, 0 if not measured.
    """

    index: int
    table_version: int
    counts: tuple[bytes, ...]
    activations: int = 0
    batches: int = 0
    compute_s: float = 0.0
