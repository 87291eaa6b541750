"""The search's steps are the cost model's."""

from __future__ import annotations

import pytest

from deploy.placement.cost import BatchRows, StepEnds, chain_s, link_s, step_s
from deploy.placement.formats import Formats, LayerFormats
from deploy.placement.search.steady import Chunks
from deploy.placement.search.steps import NO_LINK, Clock, EngineSetup, EngineSteps
from deploy.placement.workload import Lengths
from tests.deploy.placement import samples
from tests.deploy.placement.search.plain_steps import PlainHost, PlainReplica, PlainStep

FAST, SLOW = samples.gpu("fast"), samples.gpu("slow", gb_per_s=900, tflops=150)
HOST = samples.host((FAST, 2), (SLOW, 2), (samples.cpu(cores=4), 1))
SHAPE = samples.model()
MIXED = Formats(
    SHAPE,
    (
        LayerFormats("int8", "none", "int4"),
        LayerFormats(),
        LayerFormats("int8", "none", "int4"),
        LayerFormats("none", "none", "int8"),
    ),
    "int8",
)


@pytest.mark.parametrize("skew", [0.0, 0.8])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("attention on 1 slow, experts on 2 fast", (8,)),
        ("attention on 1 fast, experts on 1 fast + 2 slow", (10, 3)),
        ("attention and experts in turns on 1 cpu", (16,)),
        ("1 fast in one process", (16,)),
    ],
)
def test_a_step_is_that_of_the_cost_model(
    name: str, held: tuple[int, ...], m: int, skew: float
) -> None:
    layout = samples.layout_named(HOST, name)
    # Prompts and answers of one length: replicas' keys do not differ but by progress.
    asked = samples.workload(expert_skew=skew, output=Lengths(mean=60), prompt=Lengths(mean=300))
    clock = Clock(SHAPE, asked)
    engine = EngineSetup(layout, MIXED, held, (1 / layout.num_attention,), m, 512)
    (slot, count) = layout.attention[0]
    assert count == 1
    hosts = [
        PlainHost(slot.device.profile, each, max(1, slot.threads))
        for (slot, number), each in zip(layout.experts, held, strict=True)
        for _ in range(number)
    ]
    link = NO_LINK if layout.link is None else layout.link.link
    for running, chunks in ((6.0, None), (30.0, Chunks(1, 128.0, 4.0, 16.0))):
        rows = BatchRows(
            running / m,
            clock.context,
            0.0 if chunks is None else chunks.tokens / m,
            0.0 if chunks is None else chunks.start,
        )
        replica = PlainReplica(slot.device.profile, rows, max(1, slot.threads))
        hops = PlainStep(SHAPE, MIXED.of, replica, hosts, link, skew).hops()
        sampled = running + (0.0 if chunks is None else chunks.slices)
        ends = StepEnds(slot.device.profile, SHAPE, MIXED.head, threads=max(1, slot.threads))
        fixed_s = ends.seconds(sampled)
        expected = step_s(hops, fixed_s=fixed_s, micro_batches=m, shares_cores=layout.takes_turns)
        found = EngineSteps(engine, clock).step_s(running, chunks)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("m", [1, 2])
def test_layer_ranges_have_the_cost_models_times(m: int) -> None:
    """Each layer is that of its own device; the head and sampling are the first one's."""
    fast, slow = samples.cpu("fast", cores=8), samples.cpu("slow", cores=1)
    host = samples.host((fast, 1), (slow, 1), (FAST, 1))
    layout = samples.layout_named(
        host, "attention on fast, slow by layer ranges, experts on 1 fast"
    )
    assert layout.link is not None
    clock = Clock(SHAPE, samples.workload(output=Lengths(mean=60), prompt=Lengths(mean=300)))
    engine = EngineSetup(layout, MIXED, (16,), (1.0,), m, 512, None, 0, (3, 4))
    rows = BatchRows(12.0 / m, clock.context)
    hosts, link = [PlainHost(FAST, 16)], layout.link.link
    by_device = [
        PlainStep(SHAPE, MIXED.of, PlainReplica(each, rows, cores), hosts, link).hops()
        for each, cores in ((fast, 8), (slow, 1))
    ]
    hops = [*by_device[0][:3], by_device[1][3]]
    assert by_device[1][0].t_a > 1.5 * by_device[0][0].t_a
    pass_s = link_s(link, 12.0 / m * SHAPE.hidden_size * SHAPE.itemsize)
    expected = StepEnds(fast, SHAPE, MIXED.head, threads=8).seconds(12.0)
    expected += chain_s(hops, (3, 4), num_micro_batches=m, pass_s=pass_s)
    found = EngineSteps(engine, clock).step_s(12.0, None)
    assert found == pytest.approx(expected, rel=1e-6)


def test_more_replicas_wait_for_the_one_with_the_longest_contexts() -> None:
    """Contexts that differ cost the barrier: two equal replicas take longer than one of them."""
    clock = Clock(SHAPE, samples.workload(prompt=Lengths(mean=2000, p95=5000)))
    one, two = (
        samples.layout_named(HOST, "attention on 1 slow, experts on 1 fast"),
        samples.layout_named(HOST, "attention on 2 slow, experts on 1 fast"),
    )
    alone = EngineSteps(EngineSetup(one, MIXED, (16,), (1.0,), 1, 512), clock).step(8.0, None)
    both = EngineSteps(EngineSetup(two, MIXED, (16,), (0.5,), 1, 512), clock).step(16.0, None)
    assert both.hop.t_a > alone.hop.t_a * 1.01


@pytest.mark.parametrize("m", [1, 2])
def test_local_layers_have_the_cost_models_times(m: int) -> None:
    layout = samples.layout_named(HOST, "attention on 1 slow, experts on 2 fast")
    clock = Clock(SHAPE, samples.workload(output=Lengths(mean=60), prompt=Lengths(mean=300)))
    engine = EngineSetup(layout, MIXED, (8,), (1.0,), m, 512, None, 3)
    assert engine.local_layers == (0, 1, 2)
    assert layout.link is not None
    slot, other = layout.attention[0][0], layout.experts[0][0]
    replica = PlainReplica(slot.device.profile, BatchRows(12.0 / m, clock.context))
    hosts = [PlainHost(other.device.profile, 8)] * 2
    local = frozenset((0, 1, 2))
    plain = PlainStep(SHAPE, MIXED.of, replica, hosts, layout.link.link, local_layers=local)
    hops = plain.hops()
    fixed_s = StepEnds(slot.device.profile, SHAPE, MIXED.head, threads=1).seconds(12.0)
    expected = step_s(hops, fixed_s=fixed_s, micro_batches=m, shares_cores=False)
    # Every row reaches a node that has all experts; routing.rows_reached says 99.9 % of them.
    assert EngineSteps(engine, clock).step_s(12.0, None) == pytest.approx(expected, rel=1e-3)
