"""Plans that are written can be read again, and pass all checks of `topspin serve`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.placement.cluster import HostLink
from deploy.placement.formats import stored
from deploy.placement.reasons.explain import explain
from deploy.placement.search.layouts import layouts_of
from deploy.placement.search.rating import Rating
from deploy.placement.search.search import Inputs, search
from deploy.placement.search.spans import spans_of
from deploy.placement.search.steps import EngineSteps
from deploy.placement.write import local_experts_of, plan_of
from models.description.parts import LatentConfig
from tests.deploy.placement import samples
from topspin.plan.file import print_plan, read_plan
from topspin.plan.local_experts import LocalExperts
from topspin.plan.rules.checks import check_model
from topspin.plan.spec import AttentionNode, EnginePlan, StageNode


def plan_from(inputs: Inputs, rating: Rating) -> EnginePlan:
    """Return the plan of a rated engine."""
    return plan_of(inputs.rater(), rating, path="model", facts=samples.facts(inputs.model))


def rated(inputs: Inputs, name: str) -> Rating:
    """Return the engine with the layout that prints as `name`, of the one host."""
    (host,) = inputs.hosts
    return inputs.rater().rate(samples.layout_named(host, name), stored(inputs.model))


@st.composite
def clusters(draw: st.DrawFn) -> Inputs:
    """Return a host of GPUs, CPUs or both, and a model with or without experts."""
    kinds = draw(st.sampled_from(("cpu", "gpu", "both", "two gpus", "two cpus", "unequal cpus")))
    cores = draw(st.sampled_from((1, 2, 3, 8)))
    memory_gib = draw(st.sampled_from((0.6, 2.0, 40.0)))
    devices = {
        "cpu": [(samples.cpu(cores=cores), 1)],
        "gpu": [(samples.gpu(memory_gib=memory_gib), draw(st.integers(1, 3)))],
        "both": [
            (samples.gpu(memory_gib=memory_gib), 1),
            (samples.cpu(cores=cores), draw(st.integers(1, 2))),
        ],
        "two gpus": [
            (samples.gpu("a", memory_gib=memory_gib), 2),
            (samples.gpu("b", gb_per_s=900, price=0.5), 1),
        ],
        "two cpus": [(samples.cpu(cores=cores), 2)],
        "unequal cpus": [
            (samples.cpu("a", cores=cores, memory_gib=0.19), 1),
            (samples.cpu("b", cores=cores, memory_gib=0.25), 1),
            (samples.cpu("c", cores=cores), 1),
        ],
    }[kinds]
    shape = samples.model(draw(st.integers(1, 3)), num_experts=draw(st.sampled_from((0, 7, 16))))
    asked = samples.workload(
        targets=draw(st.sampled_from((samples.Targets(), samples.Targets(tpot_s=0.01)))),
        objective=draw(st.sampled_from(("min_price", "max_throughput", "min_latency"))),
        max_kl=5e-3,
        fp8_kv_cache=draw(st.booleans()),
    )
    measured = samples.sensitivity(shape) if draw(st.booleans()) else None
    return samples.inputs([samples.host(*devices)], shape, asked, measured=measured)


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(clusters())
def test_every_plan_that_is_written_is_read_again(tmp_path: Path, inputs: Inputs) -> None:
    for member in search(inputs).members:
        plan = plan_from(inputs, member.rating)
        path = tmp_path / "plan.yaml"
        path.write_text(print_plan(plan))
        again = read_plan(str(path))
        assert again == plan
        assert print_plan(again) == path.read_text()
        check_model(again, samples.facts(inputs.model))
        held = sum(node.experts for node in again.experts)
        local = again.local_experts
        is_colocated = local is not None and local.layers == inputs.model.moe_layers
        assert held == (0 if is_colocated and not again.experts else inputs.model.num_experts)
        assert again.expected is not None
        assert again.expected.kl <= 5e-3


@pytest.mark.parametrize(("rank", "fits"), [(512, True), (576, False)])
def test_attention_to_latents_that_gpus_do_not_take_is_planned_on_cpus(
    rank: int, fits: bool
) -> None:
    latent = LatentConfig(
        rank=rank, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, norm_eps=1e-6
    )
    shape = replace(samples.model(2), num_kv_heads=1, head_dim=latent.cached_dim, latent=latent)
    host = samples.host((samples.gpu(), 1), (samples.cpu(cores=1), 1))
    inputs = samples.inputs([host], shape, samples.workload(objective="max_throughput"))
    found = search(inputs)
    assert found.members
    for rating in found.ratings:
        on_gpu = any(slot.device.is_gpu for slot, _ in rating.layout.attention)
        assert (rating.binding.limit == "kernels") == (on_gpu and not fits)
        if rating.point is not None:
            plan = plan_from(inputs, rating)  # which passes the checks of `topspin serve`
            assert all(fits or node.kernels != "triton" for node in plan.attention)
    told = [each.reason for each in explain(inputs, found).losers if "latents" in each.reason]
    assert bool(told) == (not fits)


def test_nodes_that_divide_a_cpu_have_cores_of_their_own() -> None:
    """Where a slow core and a fast one are apart, each node names its cores and spins."""
    host = samples.host((samples.cpu(cores=4), 1))
    asked = samples.workload(users=64, arrival_rate=None, targets=samples.Targets())
    inputs = samples.inputs([host], samples.model(2), asked)
    rating = next(
        each
        for each in search(inputs).ratings
        if each.layout.num_attention == 1 and each.layout.num_experts == 3
    )
    plan = plan_from(inputs, rating)
    assert [node.cores for node in plan.nodes] == [(0,), (1,), (2,), (3,)]
    assert {node.wait for node in plan.nodes} == {"spin"}
    assert [node.experts for node in plan.experts] == [6, 5, 5]


def test_a_colocated_cpu_has_no_expert_node() -> None:
    host = samples.host((samples.cpu(cores=4), 1))
    inputs = samples.inputs([host], samples.model(2))
    rater = inputs.rater()
    layout = next(each for each in layouts_of(host, num_experts=16).layouts if each.is_colocated)
    rating = rater.rate(layout, stored(inputs.model))
    plan = plan_from(inputs, rating)
    assert [node.num_threads for node in plan.nodes] == [4]
    assert plan.local_experts == LocalExperts(layers=inputs.model.moe_layers, when="always")
    assert plan.expected is not None
    assert plan.expected.decode.experts_s == plan.expected.decode.link_s == 0.0
    assert rating.engine is not None
    step = EngineSteps(rating.engine, rater.clock).step(plan.expected.decode.rows, None)
    layers_s = inputs.model.num_layers * plan.expected.decode.attention_s
    assert plan.expected.decode.step_s == pytest.approx(step.fixed_s + layers_s, rel=0.01)


@pytest.mark.parametrize(("alpha_us", "when"), [(1.0, "measured"), (2000.0, "always")])
def test_layers_are_local_always_where_that_wins_clearly(alpha_us: float, when: str) -> None:
    link = HostLink(transport="shm", alpha_us=alpha_us, gbps=100)
    host = samples.host((samples.cpu(cores=4), 2), links=(link,))
    asked = samples.workload(users=8, arrival_rate=None, targets=samples.Targets())
    inputs = samples.inputs([host], samples.model(4), asked)
    rater = inputs.rater()
    layout = next(
        each
        for each in layouts_of(host, num_experts=16).layouts
        if each.num_attention == each.num_experts == 1 and each.kind == "apart"
    )
    rating = rater.rate(layout, stored(inputs.model))
    assert rating.engine is not None
    rating = rater.at_load(replace(rating, engine=replace(rating.engine, num_local=3)), 1.0)
    plan = plan_from(inputs, rating)
    assert plan.local_experts == LocalExperts(layers=inputs.model.moe_layers[:3], when=when)
    choice = local_experts_of(rater, rating)
    assert choice is not None
    assert choice.experts == plan.local_experts
    here_ms, there_ms = (float(each) for each in re.findall(r"([\d.e+]+) ms with", choice.reason))
    assert (there_ms < 1.1 * here_ms) == (when == "measured")
    assert choice.reason.endswith(
        "less than 10%: the engine measures" if when == "measured" else "at least 10%"
    )


def test_gpus_are_counted_in_the_order_of_the_cluster_file() -> None:
    host = samples.host(
        (samples.gpu("a", memory_gib=1), 2), (samples.cpu(), 1), (samples.gpu("b"), 2)
    )
    inputs = samples.inputs([host], samples.model(2))
    rating = rated(inputs, "attention on 1 a, experts on 2 b")
    plan = plan_from(inputs, rating)
    assert [node.device for node in plan.nodes] == ["cuda:0", "cuda:2", "cuda:3"]
    assert plan.link.transport == "cuda_ipc"


def test_layer_ranges_are_in_the_plan(tmp_path: Path) -> None:
    """Two CPUs, each with its own cores and the keys of its own layers, in equal numbers."""
    host = samples.host(
        (samples.cpu("a", cores=4, memory_gib=0.19), 1),
        (samples.cpu("b", cores=2, memory_gib=0.4), 1),
        (samples.gpu(), 1),
    )
    inputs = samples.inputs([host], samples.model(6))
    rating = rated(inputs, "attention on b, a by layer ranges, experts on 1 gpu")
    assert rating.engine is not None
    cut, end = rating.engine.ends
    plan = plan_from(inputs, rating)
    attention, stage, _ = plan.nodes
    assert isinstance(attention, AttentionNode)
    assert isinstance(stage, StageNode)
    assert (attention.layers, stage.layers, stage.of, end) == ((0, cut), (cut, 6), 0, 6)
    assert (attention.cores, stage.cores) == ((4, 5), (0, 1, 2, 3))
    assert attention.kv_cache_bytes is not None
    assert attention.kv_cache_bytes * (6 - cut) == stage.kv_cache_bytes * cut
    assert plan.link.transport == "shm"
    path = tmp_path / "plan.yaml"
    path.write_text(print_plan(plan))
    assert read_plan(str(path)) == plan


def test_a_device_that_is_slowed_down_says_so_in_the_plan_and_holds_less() -> None:
    host = samples.host((samples.cpu("plain"), 1), (samples.cpu("slowed"), 2))
    slowed = dataclasses.replace(host.devices[1], slow=2.0)
    host = dataclasses.replace(host, devices=(host.devices[0], slowed))
    inputs = samples.inputs([host], samples.model(2))
    rating = rated(inputs, "attention on 1 slowed, experts on 1 plain + 1 slowed")
    plan = plan_from(inputs, rating)
    assert [node.slow for node in plan.nodes] == [2.0, 1.0, 2.0]
    fast, slow = (node.experts for node in plan.experts)
    assert fast + slow == 16
    assert 1.7 * slow < fast < 2.5 * slow
    assert [node.cores for node in plan.nodes] == [
        tuple(range(8, 16)),
        tuple(range(8)),
        tuple(range(16, 24)),
    ]


def over_hosts(inputs: Inputs, *counts: int, nodes: tuple[int, int]) -> EnginePlan:
    """Return the plan of the engine over so many hosts for each role, with so many nodes."""
    assert inputs.between_hosts is not None
    layout = next(
        each
        for each in spans_of(inputs.hosts, inputs.between_hosts, num_experts=16)
        if (*(span.num_hosts for span in each.spans), *each.used) == (*counts, *nodes)
        and each.spans[0].host is inputs.hosts[0]
        and each.spans[1].host is inputs.hosts[-1]
    )
    return plan_from(inputs, inputs.rater().rate(layout, stored(inputs.model)))


def test_an_engine_over_hosts_names_each_node_s_host_and_device(tmp_path: Path) -> None:
    """Devices count from each host's first; a host of the cluster file may have an address."""
    near = samples.host((samples.gpu("NVIDIA A"), 2), name="a", count=2)
    far = samples.host((samples.gpu("b"), 1), (samples.gpu("NVIDIA B"), 2), name="b", count=2)
    spec = msgspec.structs.replace(far.spec, addresses=("10.0.0.1", "10.0.0.2"))
    hosts = [near, replace(far, spec=spec)]
    link = HostLink(transport="nixl", alpha_us=12, gbps=400)
    inputs = replace(samples.inputs(hosts, samples.model(2)), between_hosts=link)
    plan = over_hosts(inputs, 2, 2, nodes=(4, 4))
    assert [(node.host, node.device, node.product) for node in plan.nodes] == [
        ("a-0", "cuda:0", "NVIDIA A"),
        ("a-0", "cuda:1", "NVIDIA A"),
        ("a-1", "cuda:0", "NVIDIA A"),
        ("a-1", "cuda:1", "NVIDIA A"),
        ("10.0.0.1", "cuda:1", "NVIDIA B"),
        ("10.0.0.1", "cuda:2", "NVIDIA B"),
        ("10.0.0.2", "cuda:1", "NVIDIA B"),
        ("10.0.0.2", "cuda:2", "NVIDIA B"),
    ]
    assert plan.network is not None
    assert (plan.network.control, plan.network.trusted) == ("tcp://a-0:7000", True)
    assert plan.link.transport == "nixl"
    path = tmp_path / "plan.yaml"
    path.write_text(print_plan(plan))
    assert read_plan(str(path)) == plan


def test_both_roles_on_hosts_of_one_kind_have_hosts_of_their_own() -> None:
    """Two CPUs of a host each have their cores, which have the same numbers on every host."""
    link = HostLink(transport="tcp", alpha_us=40, gbps=100)
    hosts = [samples.host((samples.cpu(cores=4), 2), name="box", count=3)]
    inputs = replace(samples.inputs(hosts, samples.model(2)), between_hosts=link)
    plan = over_hosts(inputs, 1, 2, nodes=(2, 4))
    low, high = tuple(range(4)), tuple(range(4, 8))
    assert [(node.host, node.cores) for node in plan.nodes] == [
        ("box-0", low),
        ("box-0", high),
        ("box-1", low),
        ("box-1", high),
        ("box-2", low),
        ("box-2", high),
    ]
    assert plan.network is not None
    assert not plan.network.trusted
