"""The engine as a gateway shows it while somebody watches. See topspin.messages."""

from __future__ import annotations

from typing import Literal

import msgspec

from topspin.messages.base import Message, Role
from topspin.messages.requests import Stats
from topspin.messages.steps import StepTimings
from topspin.messages.traces import Trace
from topspin.plan.spec import LinkSpec


class FeedRequest(Message, frozen=True, kw_only=True):
    """Somebody watches: send what is newer than `after`, which is the cursor of an earlier Feed.

    For the next seconds the scheduler notes what a later request may ask for. `experts`: with how
    often each is chosen.
    """

    query_id: int
    after: int = 0
    experts: bool = False


class FeedNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place of the plan, and the node in it. A slow one needs `times` as long as its peers.

    `experts`: how many of the routed ones it holds, of all layers together. Another `connection`
    than in the last Feed is another node's: the one before was lost in between.
    """

    role: Role
    index: int
    state: Literal["serving", "loading", "lost"]
    connection: bytes
    host: str
    device: str
    num_threads: int | None
    times: float = 1.0
    resident_bytes: int = 0
    experts: int = 0


class FeedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that has ended: the time from its beginning, and each attention node's by phase."""

    step: int
    num_micro_batches: int
    num_tokens: int
    took_s: float
    nodes: dict[int, StepTimings]


class FeedNews(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the scheduler's log that an operator should see; `at_s` since 1970."""

    at_s: float
    is_warning: bool
    text: str


class Feed(Message, frozen=True, kw_only=True):
    """The engine now, and what has come since the request's cursor, oldest first.

    `sample` has the stamps of the newest step that was asked for, None: none since the cursor.
    `stats` are without experts. `heat[layer]` has a byte per expert: how often it was chosen
    lately, where 255 is the layer's largest; empty if it was not asked for.
    """

    query_id: int
    cursor: int
    state: str
    detail: str
    table_version: int
    nodes: tuple[FeedNode, ...]
    link: LinkSpec
    steps: tuple[FeedStep, ...]
    news: tuple[FeedNews, ...]
    sample: Trace | None
    stats: Stats
    heat: tuple[bytes, ...] = ()
