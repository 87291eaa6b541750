"""A plan as the services of a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.cli.deploy import rendered
from deploy.placement.shapes import ModelShape
from deploy.services import memory as memory_module
from deploy.services.engine import DeployOptions, Engine
from deploy.services.memory import GIB, PROCESS_BYTES
from models.description.config import load_model_config
from tests.deploy.kubernetes.renders import IMAGE, plan_named, render
from tests.structs import changed
from topspin.errors import ConfigError
from topspin.plan.file import print_plan, read_plan
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import NetworkSpec
from topspin.plan.retrieval import SpillSpec
from topspin.plan.rules.checks import check_plan
from topspin.plan.spec import EnginePlan

MODEL = Path(__file__).parents[1] / "placement" / "models" / "smollm2-moe"


def services(plan: EnginePlan, shape: ModelShape | None = None, **asked: Any) -> Engine:
    settings = DeployOptions(**({"image": IMAGE} | asked))
    return rendered(plan, settings, shape, form="kubernetes")[0]


def test_like_nodes_are_a_group_and_each_is_found_by_its_pods_name() -> None:
    engine = services(plan_named("kubernetes"))
    groups = [(each.name, each.first, len(each.nodes), each.is_optional) for each in engine.groups]
    assert groups == [
        ("attention", 0, 1, False),
        ("attention-1", 1, 1, True),
        ("expert", 0, 1, False),
        ("expert-1", 1, 1, True),
    ]
    name = engine.name
    hosts = {str(node): node.host for node in engine.plan.nodes}
    assert hosts["attention 1"] == f"{name}-attention-1-0.{name}"
    assert engine.plan.network is not None
    assert engine.plan.network.control == f"tcp://{name}-scheduler-0.{name}:7000"


def test_nodes_that_share_memory_are_on_one_host() -> None:
    engine = services(plan_named("unequal"))
    assert {node.host for node in engine.plan.nodes} == {f"{engine.name}-nodes-0.{engine.name}"}


def test_cores_of_a_host_become_threads_of_a_container() -> None:
    plan = plan_named("kubernetes")
    nodes = tuple(
        changed(each, {"cores": (2 * idx, 2 * idx + 1), "num_threads": None, "wait": "spin"})
        for idx, each in enumerate(plan.nodes)
    )
    found = services(changed(plan, {"nodes": nodes})).plan
    assert {(each.cores, each.num_threads) for each in found.nodes} == {((), 2)}


def test_a_lost_node_is_waited_for() -> None:
    plan = plan_named("unequal")
    fast = changed(plan, {"failover.restart": False, "failover.restart_deadline_s": 5.0})
    slow = changed(plan, {"failover.restart_deadline_s": 900.0})
    failovers = [services(each).plan.failover for each in (fast, slow)]
    assert [(each.restart, each.restart_deadline_s) for each in failovers] == [
        (True, 300.0),
        (True, 900.0),
    ]


def test_a_revision_is_another_for_another_image_or_plan() -> None:
    plan = plan_named("kubernetes")
    more = changed(plan, {"scheduling.max_num_queued_reqs": 7})
    names = {
        services(plan).name,
        services(plan, image=f"{IMAGE}-2").name,
        services(more).name,
    }
    assert len(names) == 3
    assert services(plan).name == services(plan, gateways=5).name


def test_a_whole_engine_needs_no_network() -> None:
    """`topspin serve`, which its container runs, refuses plans that have one."""
    plan = plan_named("planned/h20_l40s")
    hosts = tuple(changed(node, {"host": "10.0.0.1", "key": "own"}) for node in plan.nodes)
    given = changed(plan, {"nodes": hosts, "network": NetworkSpec(control="tcp://10.0.0.1:7000")})
    check_plan(given)
    found = services(given).plan
    assert found.network is None
    assert found == services(plan).plan


def test_keys_in_the_hosts_memory_are_asked_for() -> None:
    plan = plan_named("drafts, gpus")
    kept = changed(plan.kv_cache, {"spill": SpillSpec(directory="host", size_bytes=8 * GIB)})
    memory_of = memory_module.memory_of(changed(plan, {"kv_cache": kept}), None)
    plain = memory_module.memory_of(plan, None)
    for node in plan.nodes:
        before, after = plain(node), memory_of(node)
        if node.role == "attention":
            assert before is not None
            assert after == before + 8 * GIB
        else:
            assert after == before


def test_a_draft_node_has_an_address_that_lasts() -> None:
    engine, _ = render("drafts, gpus")
    (draft,) = engine.plan.drafts
    assert draft.address == f"tcp://{engine.name}-draft-0.{engine.name}:7100"


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        ({}, {"name": "Topspin"}, "--name 'Topspin': give a DNS label"),
        ({}, {"name": "a" * 25}, "of at most 24 characters"),
        ({}, {"image": ""}, "--image '' is no name of an image"),
        ({}, {"gateways": 0}, "--gateways 0: give a number between 1 and 1024"),
        ({"model.path": "/data/model"}, {}, "/data/model: a directory of this host"),
        ({"model.path": "./model"}, {}, "give --models DIR"),
        ({"failover.standby": "weights"}, {}, "failover.standby weights: a node's pod starts one"),
    ],
)
def test_what_no_cluster_runs_is_refused(
    change: dict[str, object], asked: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        services(changed(plan_named("kubernetes"), change), **asked)


def test_containers_have_a_number_of_cores() -> None:
    with pytest.raises(ConfigError, match="attention 0: num_threads null is every core of a host"):
        services(plan_named("laptop"))


def test_nodes_that_travel_by_rdma_need_trust() -> None:
    plan = plan_named("kubernetes")
    plan = changed(plan, {"links": (changed(plan.link, {"transport": "nixl"}),)})
    with pytest.raises(ConfigError, match=r"set network\.trusted"):
        services(plan)


def test_memory_is_that_of_weights_caches_and_processes() -> None:
    plan = plan_named("kubernetes")
    shape = ModelShape.from_config(load_model_config(MODEL))
    attention, expert = (services(plan, shape).memory_of(node) for node in plan.nodes[::2])
    assert attention is not None
    assert expert is not None
    assert services(plan).memory_of(plan.nodes[0]) is None
    numbers = shape.numbers("experts", shape.moe_layers[0]) * len(shape.moe_layers)
    own = PROCESS_BYTES["expert"]
    assert expert == pytest.approx(own + 1.05 * 2 * numbers * plan.experts[0].experts, rel=0.05)
    more = changed(plan.nodes[0], {"kv_cache_bytes": 201326592 + GIB})
    assert services(plan, shape).memory_of(more) == pytest.approx(attention + 1.05 * GIB, rel=1e-6)
    local = changed(plan, {"local_experts": LocalExperts(layers=shape.moe_layers, when="always")})
    with_experts = services(local, shape).memory_of(plan.nodes[0])
    assert with_experts == pytest.approx(attention + expert - own, rel=0.01)


def test_a_thousand_nodes_are_rendered_within_a_second(tmp_path: Path) -> None:
    plan = plan_named("kubernetes")
    nodes = [plan.attention[0], plan.experts[0]]
    many = [msgspec.structs.replace(node, index=index) for node in nodes for index in range(500)]
    file = tmp_path / "plan.yaml"
    file.write_text(print_plan(changed(plan, {"nodes": tuple(many)})))

    def render_it() -> tuple[float, Engine, Mapping[str, str]]:
        begun_s = time.process_time()  # other processes may have the cores
        found = rendered(read_plan(str(file)), DeployOptions(image=IMAGE), None, form="kubernetes")
        return time.process_time() - begun_s, *found

    for _ in range(3):
        taken_s, engine, files = render_it()
        if taken_s < 1.0:
            break
    assert taken_s < 1.0
    assert [len(each.nodes) for each in engine.groups] == [500, 500]
    assert len(files["base/plan.yaml"]) < 2**20, "a ConfigMap has at most 1 MiB"
