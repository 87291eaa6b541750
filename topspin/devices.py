"""The devices of nodes, and the nets that can connect nodes on such devices.

Pure: knows names and numbers of nodes, opens nothing and looks at no machine (each node checks for
its GPU, by kernels.runtime). Called by topspin.plan.from_flags and by
topspin.plan.rules.checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Final, Literal, NamedTuple

from topspin.errors import ConfigError

CPU: Final = "cpu"
CUDA: Final = "cuda"
TRITON: Final = "triton"

NodeRole = Literal["attention", "stage", "expert", "draft"]
KernelName = Literal["cpu", "triton", "reference", "deterministic"]


class Place(NamedTuple):
    """Where the nodes of one role compute, and with which kernels (kernels.dispatch's name)."""

    device: str
    kernels: KernelName

    @property
    def is_gpu(self) -> bool:
        """Say whether it is a GPU."""
        return self.device != CPU

    @property
    def is_device(self) -> bool:
        """Say whether tensors are on a device to which work is enqueued: a GPU.

        With Triton's kernels the CPU is a device too (they are interpreted there): so all code of
        GPU nodes except the driver calls can be tested without a GPU.
        """
        return self.is_gpu or self.kernels == TRITON


class Devices(NamedTuple):
    """The device of each node, by its index."""

    attention: tuple[str, ...]
    experts: tuple[str, ...]


class NodePlaces(NamedTuple):
    """How many nodes of each role there are, and where they compute."""

    num_attention: int
    num_experts: int
    attention: Place
    experts: Place

    @property
    def share_a_device(self) -> bool:
        """Say whether both roles compute on the same device, as --transport local can.

        "cuda" is then the first GPU for both.
        """
        places = self.attention, self.experts
        return share_a_device([each._replace(device=_first(each.device)) for each in places])


def parse_device(option: str, device: str) -> str:
    """Return the canonical name of `device` ("cuda:7" for "cuda:07").

    Raises ConfigError for an unknown name; the node checks that the machine has the device.
    """
    kind, _, number = device.partition(":")
    if device in (CPU, CUDA):
        return device
    if kind == CUDA and number.isascii() and number.isdecimal():
        return f"{CUDA}:{int(number)}"
    raise ConfigError(f"{option} {device}: must be cpu, cuda or cuda:N")


def assign_devices(nodes: NodePlaces, *, transport: str) -> Devices:
    """Return each node's device: "cpu" or "cuda:N".

    "cuda:N" is that GPU for all nodes of the role. "cuda" gives every process a separate GPU: the
    lowest numbers that no other node has and the other role's option does not name, attention nodes
    first. With `transport` "local" all nodes are one process, and "cuda" is its first GPU.
    """
    attention, experts = nodes.attention.device, nodes.experts.device
    if transport == "local":
        return Devices(
            (_first(attention),) * nodes.num_attention, (_first(experts),) * nodes.num_experts
        )
    free = _numbers_but(attention, experts if nodes.num_experts else CPU)
    return Devices(
        _of_role(attention, nodes.num_attention, free), _of_role(experts, nodes.num_experts, free)
    )


def _first(device: str) -> str:
    """Return `device` with its number; "cuda" is the first GPU."""
    return f"{CUDA}:0" if device == CUDA else device


def _numbers_but(*devices: str) -> Iterator[str]:
    names = (f"{CUDA}:{number}" for number in count())
    return (name for name in names if name not in devices)


def _of_role(device: str, num_nodes: int, free: Iterator[str]) -> tuple[str, ...]:
    return tuple(islice(free, num_nodes)) if device == CUDA else (device,) * num_nodes


def auto_transport(nodes: NodePlaces) -> Literal["local", "cuda_ipc", "shm"]:
    """Return the transport of `--transport auto`.

    "local" (one process) if everything is on one device; "cuda_ipc" (no CPU work per layer) if
    every node has a separate GPU; "shm" otherwise, also for several processes on one GPU, whose
    kernels take turns and should not wait there.
    """
    if not nodes.num_experts:
        return "shm"
    if nodes.share_a_device and nodes.num_attention == 1:
        return "local"
    if nodes.attention.is_gpu and nodes.experts.is_gpu:
        devices = assign_devices(nodes, transport="cuda_ipc")
        used = devices.attention + devices.experts
        if len(set(used)) == len(used):
            return "cuda_ipc"
    return "shm"


def auto_micro_batches(nodes: NodePlaces, transport: str) -> int | None:
    """Return the value of `--micro-batches auto`; None: the scheduler decides by measurement.

    It measures both roles' times by the host's clock, which sees neither if kernels hand rows over.
    In that case two micro-batches give overlap between GPUs, and none within one.
    """
    if not nodes.num_experts:
        return None
    if transport == "cuda_ipc":
        return 2
    return 1 if transport == "local" and nodes.share_a_device else None


def share_a_device(places: Sequence[Place]) -> bool:
    """Say whether all of `places` are one device to which work is enqueued."""
    return all(place.is_device for place in places) and len({p.device for p in places}) == 1


def check_transport(attention: Sequence[Place], experts: Sequence[Place], transport: str) -> None:
    """Raise ConfigError, naming the options and a fix, if `transport` cannot connect such nodes."""
    said = f"--transport {transport} with attention on {_names(attention)}"
    if experts:
        said += f" and experts on {_names(experts)}"
    places = [*attention, *experts]
    has_device = any(place.is_device for place in places)
    if transport == "local" and len(attention) > 1 and has_device:
        raise ConfigError(
            f"{said}: one process drives a GPU for one attention node; use --transport cuda_ipc "
            "or shm, or one attention node"
        )
    if transport == "local" and len(set(experts)) > 1:
        raise ConfigError(f"{said}: the expert nodes of one process compute on the same device")
    if not experts:
        return
    are_devices = all(place.is_device for place in places)
    if transport == "cuda_ipc" and not (are_devices and len({p.is_gpu for p in places}) == 1):
        raise ConfigError(
            f"{said}: it joins GPUs of one host; use --transport shm where one side is a CPU"
        )
    if transport == "local" and are_devices and not share_a_device(places):
        raise ConfigError(f"{said}: one process drives one GPU; use --transport cuda_ipc or shm")


def _names(places: Sequence[Place]) -> str:
    """Return the devices of nodes, each once: "cuda:0, cuda:1"."""
    return ", ".join(dict.fromkeys(place.device for place in places))
