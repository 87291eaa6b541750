"""A Compose file of an engine: the same services as in Kubernetes, on one host.

Owns the form. Secrets and models are folders beside the file. Nodes that share memory share a
network, through which they hand it over; a service that does nothing else keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from deploy.services.arguments import (
    API_KEYS,
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
from deploy.services.engine import HTTP_PORT, MODELS, SPILL, Engine, Group, Hosts, Node
from deploy.yaml_text import yaml_text
from topspin.plan.spec import NodeSpec

Object = dict[str, Any]

JOINED: Final = "nodes"
"""The service whose network nodes join where they share memory. It outlives each of them."""
HEALTH: Final = (
    "import urllib.request as r; "
    f"r.urlopen('http://127.0.0.1:{HTTP_PORT}/health', timeout=4).read()"
)


def hosts(*, share_memory: bool) -> Hosts:
    """Return how services are reached: by their names.

    Nodes that `share_memory` are all on one.
    """

    def node_host(engine: str, group: Group, node: NodeSpec) -> str:
        return JOINED if share_memory and node.role != "draft" else f"{node.role}-{node.index}"

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
    own["volumes"] += _spill(engine, engine.plan.nodes)
    return {"engine": own | _gpus(range(engine.num_gpus))}


def _apart(engine: Engine) -> Object:
    nodes = [node for group in engine.groups for node in group.nodes]
    services = {
        "scheduler": _service(engine, scheduler_arguments(), keys="scheduler")
        | _probed(engine, progress_file("scheduler")),
        "gateway": _service(engine, gateway_arguments(), keys="gateway") | _http(),
    }
    if engine.shares_memory:
        services[JOINED] = _container(engine, ("sleep", "infinity"), {}, [])
    num_gpus = 0
    for node in nodes:
        services[_name(node)] = _node(engine, node)
        if node.place.is_gpu:
            services[_name(node)] |= _gpus([num_gpus])
            num_gpus += 1
    return services


def _node(engine: Engine, node: Node) -> Object:
    name = _name(node)
    advertised = name if engine.listens(node) else None
    own = _service(
        engine, node_arguments(node.role, str(node.index), advertised), keys=node.key_group
    )
    own |= _probed(engine, progress_file(node.role, str(node.index)))
    own["stop_grace_period"] = f"{round(engine.plan.failover.halt_deadline_s) + GRACE_S}s"
    memory = engine.memory_of(node)
    if memory is not None:
        own["mem_reservation"] = memory
    if engine.shares_memory and node.role != "draft":
        own["network_mode"] = f"service:{JOINED}"
        own.setdefault("depends_on", {})[JOINED] = {"condition": "service_started"}
    own["volumes"] += _spill(engine, [node])
    return own


def _spill(engine: Engine, nodes: Sequence[Node]) -> list[Object]:
    return [{"type": "volume", "target": SPILL}] if engine.spill_bytes(nodes) else []


def _name(node: Node) -> str:
    return f"{node.role}-{node.index}"


def _service(engine: Engine, arguments: Sequence[str], *, keys: str | None) -> Object:
    """Return a service that runs `topspin` with `arguments`, as restricted as its pod would be."""
    volumes = [_bind("./plan.yaml", PLAN_FILE), _models(read_only=True)]
    if keys is not None:
        volumes.append(_bind(f"./keys/{keys}", KEYS))
    if keys in (None, "gateway"):
        volumes.append(_bind("./api-keys", API_KEYS))
    service = _container(engine, ("topspin", *arguments), ENVIRONMENT | OFFLINE, volumes)
    if engine.pulled:
        done = {"condition": "service_completed_successfully"}
        service["depends_on"] = {f"pull-{place}": done for place in range(len(engine.pulled))}
    return service


def _pull(engine: Engine, name: str) -> Object:
    command = ("topspin", *pull_arguments(name))
    own = _container(engine, command, dict(ENVIRONMENT), [_models(read_only=False)])
    own["restart"] = "no"
    own["environment"] |= {"HF_TOKEN": "${HF_TOKEN:-}"}
    return own


def _container(
    engine: Engine, command: Sequence[str], variables: dict[str, str], volumes: list[Object]
) -> Object:
    return {
        "image": engine.asked.image,
        "init": True,  # what INIT is for, by the engine's own
        "entrypoint": [command[0]],
        # Compose replaces variables in texts; ours has none.
        "command": [each.replace("$", "$$") for each in command[1:]],
        "restart": "unless-stopped",
        "environment": dict(variables),
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        # Triton loads what it compiles from there.
        "tmpfs": [f"{CACHE}:exec,mode=1777", f"{RUN}:mode=1777", "/tmp:mode=1777"],
        "volumes": volumes,
    }


def _probed(engine: Engine, file: str) -> Object:
    arguments = probe_arguments(engine.plan, file, ready=True)
    return {"healthcheck": _check("topspin", *arguments)}


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
