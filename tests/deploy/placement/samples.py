"""Devices, hosts, models and workloads of planner tests; no real device is described here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.placement.cluster import DeviceGroup, HostGroup, HostLink
from deploy.placement.devices import DeviceProfile, Rates
from deploy.placement.search.layouts import Device, EngineLayout, Host, layouts_of
from deploy.placement.search.search import Inputs
from deploy.placement.sensitivity import Entry, Sensitivity
from deploy.placement.shapes import LayerKind, ModelShape
from deploy.placement.workload import Lengths, Targets, Workload
from topspin.plan.rules.model_facts import ModelFacts

GIB = 2**30
LINKS = (
    HostLink(transport="cuda_ipc", alpha_us=8, gbps=2000),
    HostLink(transport="shm", alpha_us=25, gbps=100),
)


def gpu(
    name: str = "gpu",
    *,
    memory_gib: float = 80,
    gb_per_s: float = 3000,
    tflops: float = 500,
    price: float = 2.0,
) -> DeviceProfile:
    """Return a GPU known by its roofline."""
    flops: dict[Any, float] = dict.fromkeys(("none", "int8", "int4"), tflops * 1e12)
    return DeviceProfile(
        name=name,
        kind="cuda",
        source="literature",
        memory_bytes=memory_gib * GIB,
        price_per_hour=price,
        formats=("none", "int8", "int4", "fp8"),
        rates=(
            Rates(
                read_bytes_per_s=gb_per_s * 1e9,
                flops={**flops, "fp8": 2 * tflops * 1e12},
                launch_s=3e-6,
            ),
        ),
    )


def cpu(name: str = "cpu", *, cores: int = 8, memory_gib: float = 64) -> DeviceProfile:
    """Return a CPU whose bandwidth grows with its threads up to four."""
    return DeviceProfile(
        name=name,
        kind="cpu",
        source="literature",
        memory_bytes=memory_gib * GIB,
        price_per_hour=0.2,
        cores=cores,
        formats=("none", "int8", "int4"),
        rates=tuple(
            Rates(
                threads=threads,
                read_bytes_per_s=min(threads, 4) * 25e9,
                flops=dict.fromkeys(("none", "int8", "int4"), threads * 100e9),
                launch_s=5e-6,
            )
            for threads in (1, 2, 4, 8, 16)
        ),
    )


def host(
    *devices: tuple[DeviceProfile, int],
    name: str = "host",
    count: int = 1,
    price: float = 0.0,
    links: Sequence[HostLink] = LINKS,
) -> Host:
    """Return `count` like hosts with so many of each device."""
    spec = HostGroup(
        name=name,
        count=count,
        devices=tuple(DeviceGroup(device=each.name, count=number) for each, number in devices),
        links=tuple(links),
        price_per_hour=price,
    )
    found = tuple(
        Device(
            group=idx,
            profile=profile,
            count=number,
            memory_bytes=int(profile.memory_bytes),
            price_per_hour=profile.price_per_hour,
            cores=profile.cores if profile.kind == "cpu" else 0,
            slow=1.0,
        )
        for idx, (profile, number) in enumerate(devices)
    )
    return Host(spec, found)


def layout_named(host: Host, name: str, *, num_experts: int = 16) -> EngineLayout:
    """Return the layout of a host that prints as `name`."""
    found = layouts_of(host, num_experts=num_experts).layouts
    return next(layout for layout in found if str(layout) == name)


def model(num_layers: int = 4, *, num_experts: int = 16, hidden: int = 1024) -> ModelShape:
    """Return a small Qwen3-MoE-like shape; without experts, a dense one."""
    return ModelShape(
        vocab_size=32000,
        hidden_size=hidden,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2 * hidden,
        num_experts=num_experts,
        top_k=2 if num_experts else 0,
        expert_width=hidden if num_experts else 0,
        shared_width=0,
        shared_is_gated=False,
        num_router_biases=0,
        is_tied=False,
        qk_norm="head",
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        layers=(LayerKind(None, bool(num_experts)),) * num_layers,
    )


def facts(shape: ModelShape, *, max_positions: int = 8192) -> ModelFacts:
    """Return what `topspin serve` knows of such a model."""
    return ModelFacts(
        dtype="bfloat16",
        max_positions=max_positions,
        num_layers=shape.num_layers,
        moe_layers=shape.moe_layers,
        num_experts=shape.num_experts,
        windows=(None,) * shape.num_layers,
        head_dim=shape.head_dim,
        latent_rank=None if shape.latent is None else shape.latent.rank,
    )


def sensitivity(shape: ModelShape, *, kl: float = 1e-3) -> Sensitivity:
    """Return divergences that grow with the layer; int4 has ten times int8's."""
    entries = [
        Entry(layer=layer, part=part, format=name, indicator=0.0, kl=factor * kl * (1 + layer))
        for layer in range(shape.num_layers)
        for part in ("attention", "experts")
        if shape.matrices(part, layer)
        for name, factor in (("int8", 0.1), ("int4", 1.0))
    ]
    return Sensitivity(tuple(entries), shape)


def workload(**fields: Any) -> Workload:
    """Return a workload; fields replace its defaults."""
    defaults: dict[str, Any] = {
        "prompt": Lengths(mean=200, p95=500),
        "output": Lengths(mean=100, p95=250),
        "arrival_rate": None if "users" in fields else 2.0,
        "targets": Targets(ttft_s=2.0, tpot_s=0.05),
    }
    return Workload(**{**defaults, **fields})


def inputs(
    hosts: Sequence[Host],
    shape: ModelShape | None = None,
    asked: Workload | None = None,
    *,
    measured: Sensitivity | None = None,
) -> Inputs:
    """Return what a search is about."""
    return Inputs(tuple(hosts), shape or model(), 8192, asked or workload(), measured)


def ten_thousand_devices() -> list[Host]:
    """Return hosts of eight GPUs, of eight types."""
    return [
        host(
            (
                gpu(
                    f"gpu{idx}",
                    memory_gib=24 + 16 * idx,
                    gb_per_s=600 + 500 * idx,
                    tflops=60 + 100 * idx,
                    price=0.5 + 0.5 * idx,
                ),
                8,
            ),
            name=f"hosts-{idx}",
            count=157 if idx else 151,
        )
        for idx in range(8)
    ]
