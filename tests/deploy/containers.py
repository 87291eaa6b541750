"""The containers of a rendered plan, whichever form it has: what Kubernetes and Compose would run.

Knows both forms, and no plan's content.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import yaml

from app.cli.main import _parser
from deploy.services.processes import INIT
from tests.deploy.kubernetes.renders import LOADER, objects_of, templates

Object = dict[str, Any]
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


class Container(NamedTuple):
    """One container, and what its form gives it.

    `pods` has the names of the pods that have one. `mounts` says by path whether it may write
    there, `sources` whence it comes. `probes` are commands, or one "http" and a path.
    """

    pods: list[str]
    image: str
    arguments: list[str]
    variables: dict[str, str]
    mounts: dict[str, bool]
    sources: dict[str, Object]
    probes: list[list[str]]
    grace_s: float
    gpus: int
    is_restricted: bool

    @property
    def parsed(self) -> argparse.Namespace:
        """Return its arguments as `topspin` takes them."""
        return parse(self.arguments)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return what `topspin` takes arguments for, which nobody may change."""
    return _parsed(tuple(arguments))


@cache
def _parsed(arguments: tuple[str, ...]) -> argparse.Namespace:
    return _parser([*arguments]).parse_args([*arguments])


def containers(form: str, files: Mapping[str, str]) -> list[Container]:
    """Return the containers that run `topspin`."""
    return list(_composed(files) if form == "compose" else _podded(files))


def _podded(files: Mapping[str, str]) -> Iterator[Container]:
    for workload, template in templates(objects_of(files)):
        pod = template["spec"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        replicas = range(workload["spec"].get("replicas", 1))
        for own in pod["containers"]:
            assert own["command"] == ["tini", "--", "topspin"]
            probes = [each for key, each in own.items() if key.endswith("Probe")]
            yield Container(
                pods=[f"{workload['metadata']['name']}-{number}" for number in replicas],
                image=own["image"],
                arguments=own["args"],
                variables={each["name"]: each["value"] for each in own["env"] if "value" in each},
                mounts={each["mountPath"]: "readOnly" not in each for each in own["volumeMounts"]},
                sources={each["mountPath"]: volumes[each["name"]] for each in own["volumeMounts"]},
                probes=[
                    each["exec"]["command"] if "exec" in each else ["http", each["httpGet"]["path"]]
                    for each in probes
                ],
                grace_s=pod.get("terminationGracePeriodSeconds", 30),
                gpus=int(own["resources"].get("limits", {}).get("nvidia.com/gpu", 0)),
                is_restricted=_is_restricted(pod, own["securityContext"]),
            )


def _is_restricted(pod: Object, own: Object) -> bool:
    """Say whether a pod keeps to the restricted standard, and has no token and no writable root."""
    volumes = {kind for volume in pod["volumes"] for kind in volume}
    wanted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return (
        own.items() >= RESTRICTED.items()
        and pod["securityContext"].items() >= wanted.items()
        and pod["automountServiceAccountToken"] is False
        and not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        and volumes <= {"name", "configMap", "secret", "emptyDir", "persistentVolumeClaim"}
    )


def _composed(files: Mapping[str, str]) -> Iterator[Container]:
    for name, own in yaml.load(files["compose.yaml"], LOADER)["services"].items():
        *init, program = own["entrypoint"]
        assert init == [*INIT], "process 1 takes no signals that it does not handle"
        if program == "sleep":
            continue
        assert program == "topspin"
        scratch = {each.partition(":")[0]: True for each in own["tmpfs"]}
        check = own.get("healthcheck", {"test": ["CMD"]})["test"][1:]
        reserved = own.get("deploy", {"resources": {"reservations": {"devices": []}}})
        devices = reserved["resources"]["reservations"]["devices"]
        yield Container(
            pods=[name],
            image=own["image"],
            arguments=[each.replace("$$", "$") for each in own["command"]],
            variables=own["environment"],
            mounts={each["target"]: not each.get("read_only") for each in own["volumes"]} | scratch,
            sources={each["target"]: each for each in own["volumes"]},
            probes=[["http", "/health"] if check[0] == "python" else check] if check else [],
            grace_s=int(own.get("stop_grace_period", "10s").removesuffix("s")),
            gpus=sum(len(each["device_ids"]) for each in devices),
            is_restricted=own["read_only"]
            and own["cap_drop"] == ["ALL"]
            and own["security_opt"] == ["no-new-privileges:true"]
            and not own["user"].startswith("0:"),
        )
