"""Compose files: valid, and with the commands, names and folders that their services need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from app.cli.deploy import rendered
from app.cli.main import _parser
from deploy.services.engine import Asked
from tests.deploy.kubernetes.renders import APART, IMAGE, WHOLE, plan_named, spilling
from tests.structs import changed
from topspin.plan.file import read_plan

SCHEMA = json.loads((Path(__file__).parent / "kubernetes" / "schemas" / "compose.json").read_text())
NAMES = (*APART, "drafts, gpus", *WHOLE)


def compose(name: str) -> tuple[dict[str, Any], str]:
    """Return the Compose file of a plan, and the plan that it gives to the services."""
    _, files = rendered(plan_named(name), Asked(image=IMAGE), None, form="compose")
    assert set(files) == {"compose.yaml", "plan.yaml"}
    return yaml.safe_load(files["compose.yaml"]), files["plan.yaml"]


@pytest.mark.parametrize("name", NAMES)
def test_a_compose_file_is_valid_and_its_commands_are_ours(name: str, tmp_path: Path) -> None:
    file, text = compose(name)
    jsonschema.Draft7Validator(SCHEMA).validate(file)
    found = []
    for own_name, service in file["services"].items():
        assert service["init"], "process 1 takes no signals that it does not handle"
        if own_name == "nodes":
            assert service["entrypoint"] + service["command"] == ["sleep", "infinity"]
            continue
        assert service["entrypoint"] == ["topspin"]
        parsed = _parser(service["command"]).parse_args(service["command"])
        if parsed.command == "node":
            found.append((parsed.role, int(parsed.index)))
            if parsed.advertise is not None:
                assert parsed.advertise == own_name
        targets = [each["target"] for each in service["volumes"]]
        targets += [each.partition(":")[0] for each in service["tmpfs"]]
        for argument in service["command"]:
            if argument.startswith("/"):
                assert any(f"{argument}/".startswith(f"{path}/") for path in targets), argument
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    plan = plan_named(name)
    assert sorted(found) == sorted(
        [] if name in WHOLE else [(each.role, each.index) for each in plan.nodes]
    )
    (tmp_path / "plan.yaml").write_text(text)
    placed = read_plan(str(tmp_path / "plan.yaml"))
    if name not in WHOLE:
        assert placed.network is not None
        assert placed.network.control == "tcp://scheduler:7000"
        assert {node.host for node in placed.nodes} <= set(file["services"])


def test_nodes_that_share_memory_share_namespaces() -> None:
    """Of a service that does nothing else: one that ends takes its network from the others."""
    services = compose("unequal")[0]["services"]
    for name in ("attention-0", "attention-1", "expert-0", "expert-1"):
        assert services[name]["network_mode"] == "service:nodes"
        assert set(services[name]["depends_on"]) == {"nodes", "pull-0"}
    assert "nodes" not in compose("kubernetes")[0]["services"]
    assert "network_mode" not in compose("kubernetes")[0]["services"]["expert-0"]


def test_what_is_compiled_may_run_and_keys_have_a_file_of_the_user() -> None:
    plan = spilling(plan_named("one process, 2 threads"), "/tmp")
    _, files = rendered(plan, Asked(image=IMAGE), None, form="compose")
    engine = yaml.safe_load(files["compose.yaml"])["services"]["engine"]
    assert "/topspin/cache:exec,mode=1777" in engine["tmpfs"]  # Docker's default is noexec
    assert {"type": "volume", "target": "/topspin/spill"} in engine["volumes"]
    assert "directory: /topspin/spill" in files["plan.yaml"]


def test_who_serves_waits_for_the_model() -> None:
    services = compose("kubernetes")[0]["services"]
    assert services["pull-0"]["command"] == ["pull", "smollm2-moe"]
    for name in ("scheduler", "gateway", "attention-0"):
        condition = services[name]["depends_on"]["pull-0"]["condition"]
        assert condition == "service_completed_successfully"
        assert services[name]["environment"]["HF_HUB_OFFLINE"] == "1"


def test_gpus_are_reserved_by_number() -> None:
    def gpus(service: dict[str, Any]) -> list[str]:
        devices = service["deploy"]["resources"]["reservations"]["devices"]
        return [number for each in devices for number in each["device_ids"]]

    services = compose("drafts, gpus")[0]["services"]
    nodes = [name for name in services if "-" in name and "pull" not in name]
    numbers = [gpus(services[name]) for name in nodes if "deploy" in services[name]]
    assert numbers == [["0"], ["1"], ["2"], ["3"]]
    mixed = plan_named("drafts, gpus")
    on_cpu = plan_named("kubernetes").attention[0]
    mixed = changed(mixed, {"nodes": (on_cpu, *mixed.nodes[1:])})
    _, files = rendered(mixed, Asked(image=IMAGE), None, form="compose")
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert "deploy" not in services["attention-0"]
    assert gpus(services["attention-1"]) == ["0"], "numbers are those of GPUs, not of nodes"
    engine = compose("planned/h20_l40s")[0]["services"]["engine"]
    assert gpus(engine) == [str(number) for number in range(8)]
