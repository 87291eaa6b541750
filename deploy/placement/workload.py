"""The workload file: who asks for what, how fast the answers must be, and at what price.

Owns the file's fields, their checks, and the numbers that follow from a distribution of lengths.
Called by deploy.placement.command and read by deploy.placement.search.steady.

A target holds at a percentile. For `p50` it is the mean prompt in the mean queue, and the mean
step. For `p95` it is a prompt of p95 length behind the p95 queue, and the step with as many
running sequences as there are at the p95 of their number.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from deploy.placement.documents import DocumentFields, read_document
from topspin.errors import ConfigError
from topspin.plan.speculation import MAX_TOKENS

Tokens = Annotated[float, Meta(ge=1, le=2**24)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Objective = Literal["min_price", "max_throughput", "min_latency"]


class Lengths(DocumentFields, frozen=True, kw_only=True, dict=True):
    """A distribution of lengths in tokens: `mean` and `p95`, or a `histogram` of both.

    A histogram lists [tokens, weight]. p95 left out is the mean: all are of one length. What
    follows from them is computed once.
    """

    mean: Tokens | None = None
    p95: Tokens | None = None
    histogram: tuple[tuple[Tokens, Positive], ...] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) == (self.histogram is None):
            raise ConfigError("give a mean, with a p95 if lengths differ, or a histogram")
        if self.histogram is not None and (self.p95 is not None or not self.histogram):
            raise ConfigError("a histogram lists [tokens, weight], and there is no p95 beside it")
        if self.mean is not None and self.p95 is not None and self.p95 < self.mean:
            raise ConfigError(f"p95 {self.p95:g} is less than the mean {self.mean:g}")

    @cached_property
    def average(self) -> float:
        """Return the mean length."""
        if self.histogram is None:
            assert self.mean is not None
            return self.mean
        total = sum(weight for _, weight in self.histogram)
        return sum(tokens * weight for tokens, weight in self.histogram) / total

    @cached_property
    def high(self) -> float:
        """Return the 95th percentile."""
        if self.histogram is None:
            return self.average if self.p95 is None else self.p95
        total = sum(weight for _, weight in self.histogram)
        seen = 0.0
        for tokens, weight in sorted(self.histogram):
            seen += weight
            if seen >= 0.95 * total * (1 - 1e-12):
                return tokens
        return max(tokens for tokens, _ in self.histogram)

    @cached_property
    def squared(self) -> float:
        """Return the variation E[x^2] / E[x]^2; mean and p95 are taken for a log-normal's."""
        mean = self.average
        if self.histogram is not None:
            total = sum(weight for _, weight in self.histogram)
            return sum(t * t * weight for t, weight in self.histogram) / total / mean**2
        # ln p95 = mu + 1.645 s, ln mean = mu + s^2 / 2: the smaller root; a p95 beyond the largest
        # that a log-normal can have, e^(1.645^2 / 2) = 3.87 means, is taken for that.
        spread = 2 * math.log(self.high / mean)
        s = Z95 - math.sqrt(max(0.0, Z95**2 - spread))
        return math.exp(s * s)


Z95 = 1.645
"""The 95th percentile of the normal distribution."""


class Targets(DocumentFields, frozen=True, kw_only=True):
    """The longest time to the first token, and between tokens, at a percentile; None: any."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    percentile: Literal["p50", "p95"] = "p95"


class Drafts(DocumentFields, frozen=True, kw_only=True):
    """Drafts that may be made: by which model, and how many at most.

    `acceptance`: the probability that a drafted token is accepted, if those before it are.
    """

    draft_model: Annotated[str, Meta(min_length=1)]
    acceptance: Annotated[float, Meta(ge=0, le=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class Workload(DocumentFields, frozen=True, kw_only=True):
    """`arrival_rate` requests per second (Poisson), or `users` who each wait for their answer.

    `max_kl`: the largest mean divergence (nats per token) from the stored weights that
    quantisation may cause; None: the weights stay as they are. `objective` min_price: the cheapest
    that meets the targets under this load; max_throughput: the most requests per second within the
    targets (the load is at least that of the file); min_latency: the shortest time of a whole
    answer, the TTFT and all further tokens of a mean output. It also decides at equal prices.
    `expert_skew`: the exponent of Zipf's law for how often experts are chosen (0: alike).
    `fp8_kv_cache`: keys may be kept in 8 bits, which no sensitivity file has the cost of.
    `max_model_len` None: a power of two that holds twice a prompt and an output of p95 length, at
    most the model's limit. `speculation` None: no drafts.
    """

    prompt: Lengths
    output: Lengths
    arrival_rate: Positive | None = None
    users: Annotated[int, Meta(ge=1, le=10**7)] | None = None
    targets: Targets = Targets()
    max_price_per_hour: Positive | None = None
    max_kl: Annotated[float, Meta(ge=0, le=100)] | None = None
    objective: Objective = "min_price"
    max_model_len: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    expert_skew: Annotated[float, Meta(ge=0, le=4)] = 0.0
    fp8_kv_cache: bool = False
    speculation: Drafts | None = None

    def __post_init__(self) -> None:
        if (self.arrival_rate is None) == (self.users is None):
            raise ConfigError("give arrival_rate or users")
        if self.output.average < 2:
            raise ConfigError(
                f"output: a mean of {self.output.average:g} tokens: answers of one token are not "
                "decoded, so there is no decoding to plan; give 2 or more"
            )
        limit = self.max_model_len
        if limit is not None and self.prompt.high + self.output.high > limit:
            raise ConfigError(
                f"max_model_len {limit}: prompts and outputs of p95 length have "
                f"{self.prompt.high + self.output.high:g} tokens"
            )


def read_workload(path: Path) -> Workload:
    """Return the workload file at `path`; raises ConfigError naming the field."""
    return read_document("--workload", path, Workload)


def answer_s(workload: Workload, ttft_s: float, tpot_s: float) -> float:
    """Return the time of a whole answer of mean length."""
    return ttft_s + (workload.output.average - 1) * tpot_s


def asked_load(workload: Workload) -> float:
    """Return the workload's load: requests per second, or users."""
    if workload.arrival_rate is not None:
        return workload.arrival_rate
    assert workload.users is not None
    return float(workload.users)
