"""A gateway's real /metrics, and expressions as PromQL's parser reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import msgspec
import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from server.gateway.operations.metrics import EngineCollector
from server.scheduler.planning.telemetry import Counters
from tests.server.gateway.calls import PLAIN
from tests.server.gateway.fakes import FakeEngine, gateway, ids, output
from topspin.messages import NodeCount, NodeMemory, SlowNode, Stats, StepTimings

# What Prometheus adds to the samples of a target.
OF_TARGETS = {"namespace", "job", "instance"}
ENGINE = {"namespace", "job", "model_name"}
"""The labels that tell engines apart."""
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
    """What is known of the samples of one name.

    `text` describes their family; `of_engine`: every gateway shows its engine's.
    """

    family: str
    type: str
    labels: frozenset[str]
    text: str
    of_engine: bool


@cache
def scraped() -> dict[str, Sample]:
    """Return the samples of a gateway that has served requests of a busy engine, by name."""
    collector = EngineCollector("tiny")
    collector.stats = _stats()
    of_engine = {family.name for family in collector.collect()}
    return {
        sample.name: Sample(
            family.name,
            family.type,
            frozenset(sample.labels),
            family.documentation,
            family.name in of_engine,
        )
        for family in text_string_to_metric_families(asyncio.run(_text()))
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def _stats() -> Stats:
    """Return counters of a busy engine, with a sample of every metric."""
    counters = Counters()
    counters.observe(TIMINGS, after_idle=False)
    return msgspec.structs.replace(
        FakeEngine().stats,
        nodes=(NodeCount(role="attention", optional=False, planned=2, present=1),),
        slow_nodes=(SlowNode(role="expert", index=1, times=3.5),),
        num_accepted_tokens=(4, 1),
        num_refused={"ttft": 3},
        memory=(NodeMemory(role="attention", index=0, resident_bytes=2**30),),
        expert_tokens=((1, 2), (3, 4)),
        step_phases=counters.step_phases(),
    )


async def _text() -> str:
    fake = FakeEngine(lambda request: [output(request, ids("a"), finish_reason="length")])
    fake.stats = _stats()
    async with gateway(fake) as client:
        await client.post(PLAIN, json={"model": "tiny", "prompt": "a"})
        return (await client.get("/metrics")).text


class Read(NamedTuple):
    """A selector of an expression: the labels by which it matches, and how it is aggregated.

    `way`: the innermost operator, None for none.
    """

    name: str
    labels: frozenset[str]
    is_range: bool
    way: str | None


def reads(expression: str) -> tuple[list[Read], list[set[str]]]:
    """Return the selectors of an expression, and the labels by which each aggregation groups."""
    found: list[Read] = []
    grouped: list[set[str]] = []
    before: object = None
    way: str | None = None

    def visit(node: object) -> None:
        nonlocal before, way
        if isinstance(node, promql_parser.VectorSelector):
            # The child of a range is visited next after it.
            is_range = isinstance(before, promql_parser.MatrixSelector)
            labels = frozenset(each.name for each in node.matchers.matchers)
            found.append(Read(node.name, labels, is_range, way))
        elif isinstance(node, promql_parser.AggregateExpr):
            grouped.append(set(node.modifier.labels if node.modifier else ()))
            way = str(node.op)
        before = node

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found, grouped


def check(expression: str) -> Iterator[Sample]:
    """Yield the samples that an expression reads.

    Fails for what /metrics does not have, and for a reading that its type does not ask for. Engines
    are told apart; the gateways' own samples are added up, and of the engine's, which each of its
    gateways shows, the greatest is taken.
    """
    samples = scraped()
    selectors, grouped = reads(expression)
    assert selectors, expression
    known = set(OF_TARGETS)
    for read in selectors:
        assert read.name in samples, f"{read.name} in {expression}"
        sample = samples[read.name]
        assert read.labels <= sample.labels | OF_TARGETS, expression
        assert read.is_range == (sample.type != "gauge"), expression
        if read.name != "topspin_engine_up":  # every gateway's view of it
            assert read.way == ("max" if sample.of_engine else "sum"), expression
        known |= sample.labels
        yield sample
    assert all(labels <= known and labels >= ENGINE for labels in grouped), expression
