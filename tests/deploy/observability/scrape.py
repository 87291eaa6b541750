"""What a gateway's /metrics really has, and what PromQL's parser finds in an expression."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from server.scheduler.planning.counters import Counters
from tests.server.gateway.calls import PLAIN
from tests.server.gateway.fakes import FakeEngine, gateway, ids, output
from topspin.messages import NodeCount, StepTimings

# What Prometheus adds to the samples of a target.
OF_TARGETS = {"namespace", "job", "instance"}
TIMINGS = StepTimings(
    prepare_s=0.001,
    draft_s=0.001,
    attention_s=0.001,
    expert_s=0.001,
    wait_s=0.001,
    sample_s=0.001,
    link_s=0.001,
    gap_s=0.001,
    total_s=0.01,
)


class Sample(NamedTuple):
    """What is known of the samples of one name: their family, its type, their labels."""

    family: str
    type: str
    labels: frozenset[str]


@cache
def scraped() -> dict[str, Sample]:
    """Return the samples of a gateway that has served requests of a busy engine, by name."""
    found = {}
    for family in text_string_to_metric_families(asyncio.run(_text())):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = frozenset(sample.labels)
                found[sample.name] = Sample(family.name, family.type, labels)
    return found


async def _text() -> str:
    fake = FakeEngine(lambda request: [output(request, ids("a"), finish_reason="length")])
    counters = Counters()
    counters.observe(TIMINGS, after_idle=False)
    fake.stats = msgspec.structs.replace(
        fake.stats,
        nodes=(NodeCount(role="attention", optional=False, planned=2, present=1),),
        num_accepted_tokens=(4, 1),
        expert_tokens=((1, 2), (3, 4)),
        step_phases=counters.step_phases(),
    )
    async with gateway(fake) as client:
        await client.post(PLAIN, json={"model": "tiny", "prompt": "a"})
        return (await client.get("/metrics")).text


class Read(NamedTuple):
    """A selector of an expression, and the labels by which it matches."""

    name: str
    labels: frozenset[str]
    is_range: bool


def reads(expression: str) -> tuple[list[Read], set[str]]:
    """Return the selectors of an expression, and the labels that it groups by."""
    found: list[Read] = []
    grouped: set[str] = set()
    before: Any = None

    def visit(node: Any) -> None:
        nonlocal before
        if isinstance(node, promql_parser.VectorSelector):
            # The child of a range is visited next after it.
            is_range = isinstance(before, promql_parser.MatrixSelector)
            labels = frozenset(each.name for each in node.matchers.matchers)
            found.append(Read(node.name, labels, is_range))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        before = node

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found, grouped


def check(expression: str) -> Iterator[str]:
    """Yield the families that an expression reads; fails for what /metrics does not have."""
    samples = scraped()
    selectors, grouped = reads(expression)
    assert selectors, expression
    known = set(OF_TARGETS)
    for read in selectors:
        assert read.name in samples, f"{read.name} in {expression}"
        sample = samples[read.name]
        assert read.labels <= sample.labels | OF_TARGETS, expression
        assert read.is_range == (sample.type != "gauge"), expression
        known |= sample.labels
        yield sample.family
    assert grouped <= known, expression
