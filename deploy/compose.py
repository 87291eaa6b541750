"""A Compose file of an engine: the same services as in Kubernetes, on one host.

Owns the form. Secrets and models are folders beside the file. Nodes that share memory share a
network, through which they hand it over; a service that does nothing else keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from deploy.services.contained import MODELS
from deploy.services.engine import HTTP_PORT, JOINED, SPILL, Engine, Location, Node
from deploy.services.processes import (
    API_KEYS,
    CACHE,
    ENVIRONMENT,
    GRACE_S,
    INIT,
    KEYS,
    OFFLINE,
    PLAN_FILE,
    RUN,
    USER,
    Place,
    Process,
    gateway_process,
    node_process,
    probe_arguments,
    pull_arguments,
    scheduler_process,
    whole_process,
)
from deploy.yaml_text import yaml_text

Object = dict[str, Any]

HEALTH: Final = (
    "import urllib.request as r; "
    f"r.urlopen('http://127.0.0.1:{HTTP_PORT}/health', timeout=4).read()"
)


def service_host(engine: str, location: Location) -> str:
    """Return how a service is reached: by its name."""
    return location.service


def compose_files(engine: Engine, plan_text: str) -> dict[str, str]:
    """Return the Compose file and the plan."""
    services = {
        **{f"pull-{place}": _pull(engine, name) for place, name in enumerate(engine.pulled)},
        **(_whole(engine) if engine.is_whole else _apart(engine)),
    }
    volumes: Object = {"models": {}} if engine.asked.models is None else {}
    file = {"name": engine.asked.name, "services": services, "volumes": volumes}
    return {"compose.yaml": yaml_text(file), "plan.yaml": plan_text}


def _whole(engine: Engine) -> Object:
    return {"engine": _service(engine, whole_process(engine)) | _gpus(range(engine.num_gpus))}


def _apart(engine: Engine) -> Object:
    services = {
        each.name: _service(engine, each) for each in (scheduler_process(), gateway_process())
    }
    if engine.shares_memory:
        # The network that nodes join; it outlives each of them.
        services[JOINED.service] = _container(engine, ("sleep", "infinity"), {}, [])
    num_gpus = 0
    for node in (node for group in engine.groups for node in group.nodes):
        name = f"{node.role}-{node.index}"
        services[name] = _node(engine, node, name)
        if node.place.is_gpu:
            services[name] |= _gpus([num_gpus])
            num_gpus += 1
    return services


def _node(engine: Engine, node: Node, name: str) -> Object:
    own = _service(
        engine, node_process(engine, node, name=name, index=str(node.index), address=name)
    )
    memory = engine.memory_of(node)
    if memory is not None:
        own["mem_reservation"] = memory
    if engine.shares_memory and node.role != "draft":
        own["network_mode"] = f"service:{JOINED.service}"
        started = {JOINED.service: {"condition": "service_started"}}
        own["depends_on"] = own.get("depends_on", {}) | started
    return own


def _service(engine: Engine, process: Process) -> Object:
    """Return the service of a process, as restricted as its pod would be."""
    sources: dict[Place, Object] = {
        "plan": _bind("./plan.yaml", PLAN_FILE),
        "models": _models(read_only=True)
        if engine.asked.models is None
        else _bind(str(engine.asked.models.resolve()), MODELS),
        "keys": _bind(f"./keys/{process.keys}", KEYS),
        "api-keys": _bind("./api-keys", API_KEYS),
        "spill": {"type": "volume", "target": SPILL},
    }
    volumes = [sources[place] for place in process.places(engine) if place in sources]
    service = _container(engine, ("topspin", *process.arguments), ENVIRONMENT | OFFLINE, volumes)
    if engine.pulled:
        done = {"condition": "service_completed_successfully"}
        service["depends_on"] = {f"pull-{place}": done for place in range(len(engine.pulled))}
    if process.progress is None:
        service["ports"] = [f"127.0.0.1:${{TOPSPIN_PORT:-{HTTP_PORT}}}:{HTTP_PORT}"]
        probe: tuple[str, ...] = ("python", "-c", HEALTH)
    else:
        probe = ("topspin", *probe_arguments(engine.plan, process.progress, ready=True))
    service["healthcheck"] = {
        "test": ["CMD", *probe],
        "interval": "10s",
        "timeout": "5s",
        "start_period": "10m",
    }
    service["stop_grace_period"] = f"{round(process.ends_in_s) + GRACE_S}s"
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
        "entrypoint": [*INIT, command[0]],
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
