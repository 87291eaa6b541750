"""Containers of both forms: commands, paths, probes, keys and devices are those of the code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache

import pytest

from app.cli.deploy import Format, rendered
from app.launch.role import index_of
from deploy.services.engine import HTTP_PORT, DeployOptions, Engine
from deploy.services.processes import GRACE_S
from tests.deploy.containers import Container, containers, parse
from tests.deploy.kubernetes.renders import APART, IMAGE, WHOLE, plan_named, spilling
from tests.pairwise import few
from tests.server.gateway.fakes import FakeEngine, gateway
from topspin.plan.spec import EnginePlan

NAMES = (*APART, "drafts, gpus", *WHOLE)
FORMS: tuple[Format, ...] = ("kubernetes", "compose")

every_plan = pytest.mark.parametrize("name", few(NAMES, "stages, tcp", "drafts, gpus", *WHOLE))
both_forms = pytest.mark.parametrize("form", FORMS)


@cache
def engine_of(plan: EnginePlan, form: Format) -> tuple[Engine, list[Container]]:
    engine, files = rendered(plan, DeployOptions(image=IMAGE), None, form=form)
    return engine, containers(form, files)


def nodes_of(plan: EnginePlan, found: list[Container]) -> Mapping[tuple[str, int], Container]:
    """Return the containers of nodes by role and index; each must be there once."""
    nodes = [
        ((each.parsed.role, index_of(each.parsed.index, pod)), each)
        for each in found
        if each.parsed.command == "node"
        for pod in each.pods
    ]
    assert len(nodes) == len(dict(nodes))
    return dict(nodes)


@both_forms
@every_plan
def test_the_containers_are_the_processes_of_the_plan(name: str, form: Format) -> None:
    plan = plan_named(name)
    _, found = engine_of(plan, form)
    commands = {each.parsed.command for each in found}
    assert all(each.is_restricted and each.image == IMAGE for each in found)
    if name in WHOLE:
        assert commands - {"pull"} == {"serve"}
    else:
        assert commands - {"pull"} == {"scheduler", "gateway", "node"}
        assert set(nodes_of(plan, found)) == {(each.role, each.index) for each in plan.nodes}


@both_forms
@every_plan
def test_paths_are_mounted_and_written_by_who_may(name: str, form: Format) -> None:
    for each in engine_of(plan_named(name), form)[1]:
        for argument in (*each.arguments, *each.variables.values()):
            if argument.startswith("/"):
                assert any(f"{argument}/".startswith(f"{path}/") for path in each.mounts), argument
        assert each.mounts["/topspin/cache"]
        is_pull = each.parsed.command == "pull"
        assert each.mounts["/topspin/models"] == is_pull
        assert ("HF_HUB_OFFLINE" in each.variables) != is_pull
        given = ("/topspin/plan", "/topspin/keys", "/topspin/api-keys")
        assert not any(each.mounts.get(path) for path in given)


@both_forms
@every_plan
def test_each_process_has_the_keys_of_its_own_group(name: str, form: Format) -> None:
    engine, found = engine_of(plan_named(name), form)
    groups = {(each.role, each.index): each.key_group for each in engine.plan.nodes}
    nodes = nodes_of(engine.plan, found)
    for each in found:
        own = {groups[key] for key, container in nodes.items() if container is each}
        if each.parsed.command in ("scheduler", "gateway"):
            own = {each.parsed.command}
        source = each.sources.get("/topspin/keys", {})
        if form == "compose":
            assert {source.get("source")} == ({f"./keys/{group}" for group in own} or {None})
        else:
            secret = source.get("secret", {}).get("secretName")
            assert {secret} == ({f"topspin-keys-{group}" for group in own} or {None})


@both_forms
@every_plan
def test_probes_and_deadlines_are_those_of_the_command(name: str, form: Format) -> None:
    engine, found = engine_of(plan_named(name), form)
    failover = engine.plan.failover
    written = []
    for each in found:
        parsed = each.parsed
        if parsed.command == "pull":
            continue
        assert each.grace_s >= GRACE_S
        assert each.probes
        if parsed.command in ("gateway", "serve"):
            assert ["http", "/health"] in each.probes
            assert parsed.host == "::"
            assert parsed.port == HTTP_PORT
            assert each.grace_s > parsed.shutdown_timeout_s
            continue
        written += [(pod, parsed.progress) for pod in each.pods]
        asked = [parse(probe[1:]) for probe in each.probes]
        for probe in asked:
            assert probe.file == parsed.progress
            assert probe.within >= failover.progress_deadline_s
        assert any(probe.ready for probe in asked)
        if parsed.command == "node":
            assert each.grace_s > failover.halt_deadline_s
    assert len(set(written)) == len(written), "containers of a pod share the folder"


@both_forms
def test_gateways_are_probed_where_they_answer(form: Format) -> None:
    found = engine_of(plan_named("kubernetes"), form)[1]
    (probes,) = (each.probes for each in found if each.parsed.command == "gateway")

    async def ask() -> list[int]:
        async with gateway(FakeEngine()) as client:
            return [(await client.get(path)).status_code for _, path in probes]

    assert set(asyncio.run(ask())) == {200}


@both_forms
@every_plan
def test_gpus_are_one_per_node_and_all_of_a_whole_engine(name: str, form: Format) -> None:
    engine, found = engine_of(plan_named(name), form)
    if name in WHOLE:
        # Those between the plan's are there too.
        indices = [int(each.device.partition(":")[2]) for each in plan_named(name).nodes]
        assert {each.gpus for each in found if each.parsed.command == "serve"} == {max(indices) + 1}
        return
    containers_of = nodes_of(engine.plan, found)
    for node in engine.plan.nodes:
        own = containers_of[node.role, node.index]
        assert own.gpus == (1 if node.place.is_gpu else 0)
        assert node.device in ("cpu", "cuda:0")
    assert sum(each.gpus for each in found if each.parsed.command != "node") == 0


@both_forms
@pytest.mark.parametrize("name", ["kubernetes", "unequal", "one process, 2 threads"])
def test_files_of_keys_are_in_a_folder_of_the_images_user(name: str, form: Format) -> None:
    """Whichever the plan names: others may be taken."""
    engine, found = engine_of(spilling(plan_named(name), "/tmp"), form)
    assert engine.plan.kv_cache.spill is not None
    assert engine.plan.kv_cache.spill.directory == "/topspin/spill"
    for each in found:
        parsed = each.parsed
        has_files = parsed.command == "serve" or getattr(parsed, "role", "") == "attention"
        assert each.mounts.get("/topspin/spill", False) == has_files
