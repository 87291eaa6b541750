"""Compose files: valid, and with the commands, names and folders that their services need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from app.cli.deploy import rendered
from deploy.services.engine import DeployOptions
from tests.deploy.kubernetes.renders import APART, IMAGE, LOADER, WHOLE, plan_named
from topspin.plan.file import read_plan

SCHEMA = json.loads((Path(__file__).parent / "kubernetes" / "schemas" / "compose.json").read_text())
NAMES = (*APART, "drafts, gpus", *WHOLE)


def compose(name: str) -> tuple[dict[str, Any], str]:
    """Return the Compose file of a plan, and the plan that it gives to the services."""
    _, files = rendered(plan_named(name), DeployOptions(image=IMAGE), None, form="compose")
    assert set(files) == {"compose.yaml", "plan.yaml"}
    return yaml.load(files["compose.yaml"], LOADER), files["plan.yaml"]


def gpus(service: dict[str, Any]) -> list[str]:
    """Return the numbers of a service's GPUs: those of the host's, not of nodes."""
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    return [number for each in reserved.get("devices", ()) for number in each["device_ids"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_compose_file_is_valid_and_names_its_services(name: str, tmp_path: Path) -> None:
    file, text = compose(name)
    jsonschema.Draft7Validator(SCHEMA).validate(file)
    services = file["services"]
    (tmp_path / "plan.yaml").write_text(text)
    placed = read_plan(str(tmp_path / "plan.yaml"))
    hosts = set() if name in WHOLE else {"scheduler", *(node.host for node in placed.nodes)}
    assert hosts <= set(services)
    pulls = {each for each in services if each.startswith("pull-")}
    for own_name, service in services.items():
        if "--advertise" in service["command"]:
            assert service["command"][service["command"].index("--advertise") + 1] == own_name
        waits = service.get("depends_on", {})
        assert (pulls <= set(waits)) == (own_name not in pulls | {"nodes"})
        for other, how in waits.items():
            done = "service_completed_successfully" if other in pulls else "service_started"
            assert how == {"condition": done}
    numbers = [number for each in services.values() for number in gpus(each)]
    assert numbers == [str(number) for number in range(len(numbers))]
    if placed.network is not None:
        assert placed.network.control == "tcp://scheduler:7000"


def test_nodes_that_share_memory_share_namespaces() -> None:
    """Of a service that does nothing else: one that ends takes its network from the others."""
    services = compose("unequal")[0]["services"]
    for name in ("attention-0", "attention-1", "expert-0", "expert-1"):
        assert services[name]["network_mode"] == "service:nodes"
        assert set(services[name]["depends_on"]) == {"nodes", "pull-0"}
    assert "nodes" not in compose("kubernetes")[0]["services"]
    assert "network_mode" not in compose("kubernetes")[0]["services"]["expert-0"]


def test_what_is_compiled_may_run() -> None:
    engine = compose("one process, 2 threads")[0]["services"]["engine"]
    assert "/topspin/cache:exec,mode=1777" in engine["tmpfs"]  # Docker's default is noexec
