"""The messages between attention and draft nodes, and a draft node's counters.

An attention node says by which tokens its sequences went on, once per step that may have drafts;
the draft node answers each Verdicts with one TreeOffers of the same epoch. Whatever has another
epoch is stale. Nothing here changes an output: both may be late, lost or wrong.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from topspin.messages.base import Message

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# Between two questions a target may have had nothing to do for days.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sequence whose first `start` tokens the draft node has goes on by `tokens`, packed.

    The last of them is the root of the wanted draft, which has at most `at_most` tokens. With
    `start` 0 the sequence begins, and its first `num_prompt` tokens are prompt.
    """

    seq_id: Count
    start: Count
    tokens: bytes
    at_most: Count
    num_prompt: Count = 0


class Verdicts(Message, frozen=True, kw_only=True):
    """Verdicts of one step; the sequences `ended`, packed, are over.

    `step_s`: the time from the last offer, or from giving it up, to these verdicts; 0: unknown.
    """

    epoch: int
    step_s: Seconds = 0.0
    verdicts: tuple[Verdict, ...] = ()
    ended: bytes = b""


class TreeOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft over the token `root`, as spec_decode.draft.Draft; `tokens`, `parents` packed."""

    seq_id: int
    root: int
    tokens: bytes
    parents: bytes
    logps: tuple[float, ...]


class TreeOffers(Message, frozen=True, kw_only=True):
    """The drafts there are for the Verdicts of `epoch`.

    Of the sequences `unknown`, packed, the draft node lacks tokens: they must begin again.
    """

    epoch: int
    offers: tuple[TreeOffer, ...] = ()
    unknown: bytes = b""


class DraftCounts(Message, frozen=True, kw_only=True):
    """A draft node's counters since its start.

    A root hit is a verdict whose last token the tree had; `num_overlapped` passes were made while
    no attention node waited for an offer. `pass_seconds` is the time of all passes.
    """

    index: int
    num_root_hits: int
    num_root_misses: int
    num_passes: int
    num_overlapped: int
    pass_seconds: float
