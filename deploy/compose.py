"""A Compose file of an engine: the same services as in Kubernetes, on one host.

Owns the form. Secrets and models are folders beside the file; nodes that share memory share the
first one's namespaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from deploy.services.arguments import (
    API_KEY_FILE,
    CACHE,
    ENVIRONMENT,
    GRACE_S,
    KEYS,
    OFFLINE,
    PLAN_FILE,
    RUN,
    SHUTDOWN_TIMEOUT_S,
    USER,
    gateway_arguments,
    node_arguments,
    probe_arguments,
    progress_file,
    pull_arguments,
    scheduler_arguments,
    whole_arguments,
)
from deploy.services.engine import HTTP_PORT, MODELS, Engine, Group, Hosts, Node
from deploy.yaml_text import yaml_text
from topspin.plan import NodeSpec

Object = dict[str, Any]

FIRST: Final = "attention-0"
"""The node whose network and memory the others join, where they share it."""
HEALTH: Final = (
    "import urllib.request as r; "
    f"r.urlopen('http://127.0.0.1:{HTTP_PORT}/health', timeout=4).read()"
)


def hosts(*, share_memory: bool) -> Hosts:
    """Return how services are reached: by their names.

    Nodes that `share_memory` are all on the host of the first one.
    """

    def node_host(engine: str, group: Group, node: NodeSpec) -> str:
        return FIRST if share_memory and node.role != "draft" else f"{node.role}-{node.index}"

    return Hosts(scheduler=lambda engine: "scheduler", node=node_host)


def compose_files(engine: Engine, plan_text: str) -> dict[str, str]:
    """Return the Compose file and the plan."""
    services = {
        **{f"pull-{place}": _pull(engine, name) for place, name in enumerate(engine.pulled)},
        **(_whole(engine) if engine.is_whole else _apart(engine)),
    }
    file = {"name": engine.asked.name, "services": services, "volumes": {"models": {}}}
    return {"compose.yaml": yaml_text(file), "plan.yaml": plan_text}


def _whole(engine: Engine) -> Object:
    own = _service(engine, whole_arguments(), keys=None) | _http()
    return {"engine": own | _gpus(range(engine.num_gpus))}


def _apart(engine: Engine) -> Object:
    nodes = [node for group in engine.groups for node in group.nodes]
    services = {
        "scheduler": _service(engine, scheduler_arguments(), keys="scheduler")
        | _probed(progress_file("scheduler")),
        "gateway": _service(engine, gateway_arguments(), keys="gateway") | _http(),
    }
    num_gpus = 0
    for node in nodes:
        joins = engine.shares_memory and node.role != "draft" and _name(node) != FIRST
        services[_name(node)] = _node(engine, node, joins=FIRST if joins else None)
        if node.place.is_gpu:
            services[_name(node)] |= _gpus([num_gpus])
            num_gpus += 1
    return services


def _node(engine: Engine, node: Node, *, joins: str | None) -> Object:
    name = _name(node)
    advertised = name if engine.listens(node) else None
    own = _service(
        engine, node_arguments(node.role, str(node.index), advertised), keys=node.key_group
    )
    own |= _probed(progress_file(node.role, str(node.index)))
    own["stop_grace_period"] = f"{round(engine.plan.failover.halt_deadline_s) + GRACE_S}s"
    memory = engine.memory_of(node)
    if memory is not None:
        own["mem_reservation"] = memory
    if joins is not None:
        own |= {"network_mode": f"service:{joins}", "ipc": f"service:{joins}"}
        own["depends_on"] = {joins: {"condition": "service_started"}}
    elif engine.shares_memory:
        own["ipc"] = "shareable"
    spill = engine.spill_directory(node.role)
    if spill is not None:
        own["volumes"].append({"type": "volume", "target": spill})
    return own


def _name(node: Node) -> str:
    return f"{node.role}-{node.index}"


def _service(engine: Engine, arguments: Sequence[str], *, keys: str | None) -> Object:
    """Return a service that runs `topspin` with `arguments`, as restricted as its pod would be."""
    volumes = [_bind("./plan.yaml", PLAN_FILE), _models(read_only=True)]
    if keys is not None:
        volumes.append(_bind(f"./keys/{keys}", KEYS))
    if keys in (None, "gateway"):
        volumes.append(_bind("./api-keys", API_KEY_FILE))
    service = _container(engine, arguments, ENVIRONMENT | OFFLINE, volumes)
    service["restart"] = "unless-stopped"
    if engine.pulled:
        done = {"condition": "service_completed_successfully"}
        service["depends_on"] = {f"pull-{place}": done for place in range(len(engine.pulled))}
    return service


def _pull(engine: Engine, name: str) -> Object:
    own = _container(engine, pull_arguments(name), dict(ENVIRONMENT), [_models(read_only=False)])
    own["environment"] |= {"HF_TOKEN": "${HF_TOKEN:-}"}
    return own


def _container(
    engine: Engine, arguments: Sequence[str], variables: dict[str, str], volumes: list[Object]
) -> Object:
    return {
        "image": engine.asked.image,
        # Compose replaces variables in texts; ours has none.
        "entrypoint": ["topspin"],
        "command": [each.replace("$", "$$") for each in arguments],
        "environment": dict(variables),
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": [f"{each}:mode=1777" for each in (CACHE, RUN, "/tmp")],
        "volumes": volumes,
    }


def _probed(file: str) -> Object:
    return {"healthcheck": _check("topspin", *probe_arguments(file, ready=True))}


def _http() -> Object:
    return {
        "ports": [f"127.0.0.1:{HTTP_PORT}:{HTTP_PORT}"],
        "healthcheck": _check("python", "-c", HEALTH),
        "stop_grace_period": f"{SHUTDOWN_TIMEOUT_S + GRACE_S}s",
    }


def _check(*command: str) -> Object:
    return {
        "test": ["CMD", *command],
        "interval": "10s",
        "timeout": "5s",
        "start_period": "10m",
    }


def _gpus(numbers: Sequence[int]) -> Object:
    if not numbers:
        return {}
    ids = [str(each) for each in numbers]
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _bind(source: str, target: str) -> Object:
    return {"type": "bind", "source": source, "target": target, "read_only": True}


def _models(*, read_only: bool) -> Object:
    return {"type": "volume", "source": "models", "target": MODELS, "read_only": read_only}
