"""The figures that a planner expects of a plan, kept in the plan's file.

Owns their structure only. The planner (deploy.placement) writes them for people who read the plan;
`topspin quantize` compares `max_kl` with a written checkpoint's quality. An engine runs without.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]


class ExpectedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of step, over all attention nodes, and its times in seconds.

    `rows` token rows in `micro_batches`, whose queries attend to `context` keys on average.
    `attention_s`, `experts_s` and `link_s` (one way) are those of one micro-batch in the mean of
    the layers that have them, of the slowest node; `step_s` is the whole step with the head and
    sampling.
    """

    rows: Annotated[int, Meta(ge=1)]
    context: Amount
    micro_batches: Annotated[int, Meta(ge=1)]
    attention_s: Seconds
    experts_s: Seconds
    link_s: Seconds
    step_s: Seconds


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was predicted of a plan at its workload.

    `decode` is a step in which all running sequences advance by a token, `prefill` one that is
    full of prompts. `kl`: mean divergence (nats per token) from the unquantised model, of which
    `max_kl` was allowed; None: no bound was given. `price` per hour, in the cluster file's unit.
    """

    decode: ExpectedStep
    prefill: ExpectedStep
    ttft_s: Seconds
    tpot_s: Seconds
    tokens_per_s: Amount
    price: Amount = 0.0
    kl: Amount = 0.0
    max_kl: Amount | None = None
