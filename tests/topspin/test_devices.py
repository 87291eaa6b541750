"""The device of each node, and the transports and options for such devices."""

from __future__ import annotations

from typing import Any

import pytest

from topspin.devices import (
    NodePlaces,
    Place,
    assign_devices,
    auto_micro_batches,
    auto_transport,
    check_transport,
    parse_device,
    share_a_device,
)
from topspin.errors import ConfigError


def nodes(
    attention: str, experts: str, *, num_attention: int = 1, num_experts: int = 1
) -> NodePlaces:
    """Return nodes on these devices; "interpreted" is the CPU with Triton's kernels."""
    return NodePlaces(num_attention, num_experts, place(attention), place(experts))


def place(device: str) -> Place:
    if device == "interpreted":
        return Place("cpu", "triton")
    return Place(device, "cpu" if device == "cpu" else "triton")


def join(asked: NodePlaces, transport: str) -> None:
    """Check whether `transport` joins the devices that the nodes get."""
    devices = assign_devices(asked, transport=transport)
    check_transport(
        [Place(device, asked.attention.kernels) for device in devices.attention],
        [Place(device, asked.experts.kernels) for device in devices.experts],
        transport,
    )


def test_devices_have_one_name_each() -> None:
    cases: list[tuple[str, str]] = [
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        ("cuda:0", "cuda:0"),
        ("cuda:012", "cuda:12"),
    ]
    for given, known in cases:
        assert parse_device("--expert-device", given) == known


def test_what_is_no_device_is_refused_by_its_flag() -> None:
    cases: list[str] = ["", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "gpu", "cuda:1:2", "cuda:\u0663"]
    for device in cases:
        with pytest.raises(ConfigError, match=f"^--expert-device {device}: must be cpu, cuda or"):
            parse_device("--expert-device", device)


def test_cuda_gives_each_process_a_gpu_of_its_own_and_a_number_that_one() -> None:
    cases: list[tuple[str, str, tuple[int, int], str, Any]] = [
        ("cpu", "cpu", (2, 1), "shm", (("cpu", "cpu"), ("cpu",))),
        ("cuda", "cpu", (2, 2), "shm", (("cuda:0", "cuda:1"), ("cpu", "cpu"))),
        (
            "cuda",
            "cuda",
            (2, 3),
            "cuda_ipc",
            (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3", "cuda:4")),
        ),
        ("cuda:1", "cuda", (1, 2), "cuda_ipc", (("cuda:1",), ("cuda:0", "cuda:2"))),
        ("cuda", "cuda:0", (2, 2), "cuda_ipc", (("cuda:1", "cuda:2"), ("cuda:0", "cuda:0"))),
        ("cuda", "cuda:0", (1, 0), "shm", (("cuda:0",), ())),
        ("cuda", "cuda", (1, 2), "local", (("cuda:0",), ("cuda:0", "cuda:0"))),
        ("cuda:4", "cuda:4", (1, 1), "local", (("cuda:4",), ("cuda:4",))),
    ]
    for attention, experts, counts, transport, want in cases:
        asked = nodes(attention, experts, num_attention=counts[0], num_experts=counts[1])
        assert assign_devices(asked, transport=transport) == want


def test_auto_takes_what_joins_the_devices() -> None:
    cases: list[tuple[str, str, tuple[int, int], str]] = [
        ("cpu", "cpu", (1, 1), "shm"),
        ("cuda", "cpu", (1, 1), "shm"),
        ("cpu", "cuda", (1, 1), "shm"),
        ("cuda", "cuda", (1, 1), "local"),
        ("cuda", "cuda:0", (1, 3), "local"),
        ("cuda:2", "cuda:2", (1, 1), "local"),
        ("cuda:2", "cuda:1", (1, 1), "cuda_ipc"),
        ("cuda", "cuda", (2, 2), "cuda_ipc"),
        ("cuda:0", "cuda:0", (2, 2), "shm"),
        ("cuda", "cuda:5", (2, 2), "shm"),
        ("cuda", "cpu", (2, 0), "shm"),
        ("interpreted", "interpreted", (1, 2), "local"),
        ("interpreted", "interpreted", (2, 1), "shm"),
        ("interpreted", "cpu", (1, 1), "shm"),
    ]
    for attention, experts, counts, want in cases:
        asked = nodes(attention, experts, num_attention=counts[0], num_experts=counts[1])
        assert auto_transport(asked) == want
        join(asked, want)


def test_devices_that_a_transport_joins() -> None:
    cases: list[tuple[str, str, str]] = [
        ("cuda", "cpu", "local"),
        ("interpreted", "cpu", "local"),
        ("cpu", "cuda:1", "local"),
        ("cuda:1", "cpu", "tcp"),
        ("cpu", "cuda", "nixl"),
        ("cuda:0", "cuda:0", "cuda_ipc"),
        ("cuda:0", "cuda:1", "shm"),
        ("interpreted", "interpreted", "cuda_ipc"),
    ]
    for attention, experts, transport in cases:
        join(nodes(attention, experts), transport)


def test_devices_that_a_transport_cannot_join_are_refused_with_a_way_out() -> None:
    cases: list[tuple[str, str, str, int, str]] = [
        ("cuda", "cuda", "local", 2, "a GPU for one attention node"),
        ("cuda", "cpu", "local", 2, "a GPU for one attention node"),
        ("interpreted", "cpu", "local", 2, "a GPU for one attention node"),
        ("cuda:0", "cuda:1", "local", 1, "one process drives one GPU"),
        ("cuda", "interpreted", "local", 1, "one process drives one GPU"),
        ("cpu", "cuda", "local", 2, "a GPU for one attention node"),
        ("cpu", "interpreted", "local", 2, "a GPU for one attention node"),
        ("cuda", "cpu", "cuda_ipc", 1, "on cuda:0 and experts on cpu: it joins GPUs of one host"),
        ("cpu", "cuda", "cuda_ipc", 1, "attention on cpu and experts on cuda:0: it joins GPUs"),
        ("cpu", "cpu", "cuda_ipc", 1, "it joins GPUs of one host"),
        ("cuda", "interpreted", "cuda_ipc", 1, "it joins GPUs of one host"),
    ]
    for attention, experts, transport, num_attention, reason in cases:
        asked = nodes(attention, experts, num_attention=num_attention)
        with pytest.raises(ConfigError, match=reason) as raised:
            join(asked, transport)
        assert str(raised.value).startswith(f"--transport {transport} with attention on ")
        assert "use --transport" in str(raised.value)


def test_nodes_of_a_role_may_be_unequal() -> None:
    gpus = [place(f"cuda:{number}") for number in range(3)]
    check_transport([place("cpu"), gpus[0]], [gpus[1], place("cpu")], "shm")
    check_transport(gpus[:2], gpus[2:], "cuda_ipc")
    with pytest.raises(ConfigError, match="attention on cuda:0, cpu and experts on cuda:1"):
        check_transport([gpus[0], place("cpu")], [gpus[1]], "cuda_ipc")
    with pytest.raises(ConfigError, match="expert nodes of one process compute on the same dev"):
        check_transport(gpus[:1], [gpus[0], place("cpu")], "local")


def test_one_device_is_shared_by_those_that_enqueue_work_to_it() -> None:
    assert share_a_device([place("cuda:1")] * 3)
    assert share_a_device([place("interpreted")] * 2)
    assert not share_a_device([place("cpu")] * 2)
    assert not share_a_device([place("cuda:1"), place("cuda:2")])


def test_a_dense_model_on_a_gpu_has_one_attention_node_per_process() -> None:
    join(nodes("cuda", "cpu", num_experts=0), "local")
    with pytest.raises(ConfigError, match=r"attention on cuda:0: .*for one attention node"):
        join(nodes("cuda", "cpu", num_attention=2, num_experts=0), "local")


def test_micro_batches_are_for_overlap_where_nobody_measures() -> None:
    cases: list[tuple[str, str, str, int | None]] = [
        ("cpu", "cpu", "shm", None),
        ("cpu", "cpu", "local", None),
        ("cuda", "cpu", "shm", None),
        ("cuda", "cpu", "local", None),
        ("cuda", "cuda", "local", 1),
        ("cuda", "cuda", "cuda_ipc", 2),
    ]
    for attention, experts, transport, want in cases:
        assert auto_micro_batches(nodes(attention, experts), transport) == want
        assert auto_micro_batches(nodes(attention, experts, num_experts=0), transport) is None
