"""A planned engine as an engine plan, which `topspin serve --plan` runs.

Owns the translation of slots into nodes: GPU numbers, cores, threads, caches. Every plan it gives
has passed the checks that `topspin serve` makes. Called by deploy.placement.command.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deploy.placement.search.drafts import Decision, Maker
from deploy.placement.search.layouts import (
    Device,
    DeviceSlot,
    DeviceSlots,
    EngineLayout,
    place_of,
    price_of,
)
from deploy.placement.search.rating import Rater, Rating
from deploy.placement.search.steady import EngineShape as EngineShape
from deploy.placement.search.steady import chunks_of, high_running
from deploy.placement.search.steps import EngineSetup, EngineSteps, StepEstimate
from topspin.plan.expected import Expected, ExpectedStep
from topspin.plan.kv_cache import BlockNeeds, KvCacheSpec, kv_groups
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import NetworkSpec
from topspin.plan.rules.checks import check_model, check_plan
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.settings import GPU_WINDOW_ROWS, WINDOW_ROWS, Dtype, SchedulingPolicy
from topspin.plan.spec import (
    AttentionNode,
    DraftNode,
    EnginePlan,
    ExpertNode,
    LinkSpec,
    PlannedModel,
    StageNode,
)

CLOSE = 0.1
"""Steps with and without hops that differ by less may really differ the other way: the cost model's
error. Then the engine finds out by measuring."""
KEYS_IN_RESERVE = 1.1
"""Room for keys on a CPU, of what the p95 load needs: sequences differ in length."""
MAX_WINDOW_ROWS = 2**16 - 1
CONTROL_PORT = 7000
"""Where the scheduler of an engine over hosts listens."""
PlannedNode = AttentionNode | StageNode | ExpertNode


def plan_of(
    rater: Rater, rating: Rating, *, path: str, facts: ModelFacts, drafts: Decision | None = None
) -> EnginePlan:
    """Return the plan of a rated engine; raises ConfigError if the engine could not run it."""
    engine, _ = rating.settled
    maker = drafts.choice.maker if drafts is not None and drafts.choice is not None else None
    if maker is not None:
        rating = replace(rating, room=maker.room)
    layout = engine.layout
    local = local_experts_of(rater, rating)
    dtype: Dtype = "float32" if facts.dtype == "float32" else "bfloat16"
    plan = EnginePlan(
        model=PlannedModel(path=path, dtype=dtype, max_model_len=rater.max_model_len),
        precision=engine.formats.rules(),
        kv_cache=KvCacheSpec(dtype="fp8" if engine.kv_itemsize == 1 else "auto"),
        nodes=(*_nodes(rater, rating), *(() if maker is None else _draft(layout, maker))),
        links=(
            LinkSpec(
                # No row travels where all are colocated, and shm is what that plan says.
                transport="shm" if layout.is_colocated else layout.transport,
                payload="fp32" if dtype == "float32" else "bf16",
                window_rows=_window_rows(layout, engine.batched_tokens),
            ),
        ),
        scheduling=SchedulingPolicy(
            micro_batches=engine.micro_batches if layout.experts else None,
            prefix_caching=facts.shares_prefixes,
        ),
        local_experts=None if local is None else local.experts,
        speculation=None if drafts is None else drafts.speculation,
        expected=expected_of(rater, rating, devices=None if maker is None else maker.layout),
        network=_network(layout),
    )
    check_plan(plan)
    check_model(plan, facts)
    return plan


def _network(layout: EngineLayout) -> NetworkSpec | None:
    """Return how the processes of an engine over hosts find each other.

    The scheduler is on the first attention node's host. Whoever joins hosts by nixl trusts the
    network between them.
    """
    if not layout.spans:
        return None
    control = f"tcp://{_address(layout, 'attention', 0)}:{CONTROL_PORT}"
    return NetworkSpec(control=control, trusted=layout.transport == "nixl")


def _address(layout: EngineLayout, role: str, index: int) -> str:
    """Return the host of a node of an engine over hosts; those of both roles may be of one kind."""
    near, far = layout.spans
    span = near if role == "attention" else far
    before = near.num_hosts if role == "expert" and near.host is far.host else 0
    return span.host.spec.address(before + index // span.num_nodes)


class LocalChoice(NamedTuple):
    """The layers without a hop, and why always, or as the engine measures."""

    experts: LocalExperts
    reason: str


def local_experts_of(rater: Rater, rating: Rating) -> LocalChoice | None:
    """Return which layers have no hop: always, or, where it is close, as the engine measures."""
    engine, found = rating.settled
    if engine.layout.is_colocated:
        every = LocalExperts(layers=rater.model.moe_layers, when="always")
        return LocalChoice(every, "one process has all experts: no row travels")
    if not engine.num_local:
        return None
    remote = replace(engine, num_local=0)
    here_s, there_s = (
        EngineSteps(each, rater.clock).step_s(found.running, None) for each in (engine, remote)
    )
    is_close = there_s < here_s * (1 + CLOSE)
    local = LocalExperts(layers=engine.local_layers, when="measured" if is_close else "always")
    bound = f"less than {CLOSE:.0%}: the engine measures" if is_close else f"at least {CLOSE:.0%}"
    return LocalChoice(
        local,
        f"a step takes {here_s * 1e3:.3g} ms with these layers local and {there_s * 1e3:.3g} ms "
        f"with all remote, {there_s / here_s - 1:+.1%}: {bound}",
    )


def _window_rows(layout: EngineLayout, batched_tokens: int) -> int:
    """Return the rows of a window: a node's largest batch, which an expert node serves at once."""
    least = GPU_WINDOW_ROWS if layout.transport == "cuda_ipc" else WINDOW_ROWS
    return min(MAX_WINDOW_ROWS, max(least, batched_tokens))


def _nodes(rater: Rater, rating: Rating) -> Iterator[PlannedNode]:
    """Yield the nodes of an engine, drafts apart."""
    engine, _ = rating.settled
    layout = engine.layout
    ends = engine.ends or (rater.model.num_layers,)
    held = _held(engine, rater.model.num_experts)
    groups = [slot for slot, _ in layout.attention]
    for role, index, slot, cores, device in _placed(layout):
        fields = _fields(index, slot, device=device, cores=cores) | {
            "wait": "spin" if cores else "block"
        }
        if layout.spans:
            fields["host"] = _address(layout, role, index)
            fields["product"] = slot.device.name if slot.device.is_gpu else None
        if role == "attention":
            group = groups.index(slot)
            cache = _cache_bytes(rater, rating, group, layers=range(ends[0]))
            yield AttentionNode(
                **fields,
                layers=(0, ends[0]) if engine.ends else None,
                max_num_seqs=rating.max_num_seqs,
                max_num_batched_tokens=engine.batched_tokens,
                kv_cache_bytes=None if slot.device.is_gpu else cache,
            )
        elif role == "stage":
            layers = (ends[index], ends[index + 1])
            cache = _cache_bytes(rater, rating, 0, layers=range(*layers))
            yield StageNode(**fields, layers=layers, of=0, kv_cache_bytes=cache)
        elif not layout.is_colocated:
            yield ExpertNode(**fields, experts=held[index])


def _fields(index: int, slot: DeviceSlot, *, device: str, cores: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that all kinds of nodes have."""
    slow = {"slow": slot.device.slow} if slot.device.slow > 1 else {}
    return {
        "index": index,
        "device": device,
        "kernels": slot.device.kernels,
        "num_threads": slot.threads or None,
        "cores": cores,
        **slow,
    }


def _cache_bytes(rater: Rater, rating: Rating, group: int, *, layers: range) -> int:
    """Return a CPU's cache of its layers: its share of the keys at the p95, in whole blocks.

    There are as many blocks on whatever node: the fewest are what the engine has. A block has room
    for the layers of a group, of which those with a window have few.
    """
    engine, found = rating.settled
    high = max(high_running(rater.workload, found), rating.max_num_seqs / max(engine.weights))
    tokens = KEYS_IN_RESERVE * high * engine.weights[group] * rater.clock.context
    block = KvCacheSpec().block_size
    needed = max(tokens, float(rater.max_model_len + block))
    columns = math.ceil(min(needed, max(rating.room[group], rater.max_model_len + block)) / block)
    groups = kv_groups(
        [each.sliding_window for each in rater.model.layers],
        KvCacheSpec(),
        max_len=rater.max_model_len,
    )
    usual, longest = (
        BlockNeeds(groups.windows, block_size=block, max_step_tokens=tokens)
        for tokens in (1, engine.batched_tokens)
    )
    own = math.ceil(rater.clock.context / block)
    blocks = max(
        math.ceil(columns * usual.of(own) / own),
        longest.of(math.ceil((rater.max_model_len + block) / block)),
    )
    num_layers = max(Counter(groups.of_layer[each] for each in layers).values())
    return blocks * block * num_layers * rater.model.kv_layer_bytes(engine.kv_itemsize)


def _held(engine: EngineSetup, num_experts: int) -> list[int]:
    """Return the experts of each node."""
    held = [
        each
        for each, (_, count) in zip(engine.held, engine.layout.experts, strict=True)
        for _ in range(count)
    ]
    # Nodes of a group hold as many, rounded up: the last ones need not.
    surplus = sum(held) - num_experts
    for idx in sorted(range(len(held)), key=lambda each: (-held[each], -each))[:surplus]:
        held[idx] -= 1
    return held


def _draft(layout: EngineLayout, maker: Maker) -> Iterator[DraftNode]:
    """Yield the node on the first device of its kind that the engine leaves over."""
    if maker.slot is None:
        return
    device, devices = maker.slot.device, layout.host.devices
    number = layout.used[device.group]
    cores: tuple[int, ...] = ()
    if not device.is_gpu and _num_cpus(devices) > 1:
        low = _first(devices, device, lambda each: each.cores) + number * device.cores
        cores = tuple(range(low, low + device.cores))
    fields = _fields(0, maker.slot, device=_device_name(devices, device, number), cores=cores)
    yield DraftNode(**fields, wait="block", kv_cache_tokens=maker.cached_tokens)


def _placed(
    layout: EngineLayout,
) -> Iterator[tuple[str, int, DeviceSlot, tuple[int, ...], str]]:
    """Yield each node's role, index, slot, own cores and device's name.

    On like devices of a host attention comes first, then stages, then experts. GPUs and cores of a
    host are counted in the order of the cluster file.
    """
    taken = Counter[int]()
    used_cores = Counter[int]()
    shared = layout.kind != "apart"
    roles: tuple[tuple[str, DeviceSlots], ...] = (
        ("attention", layout.attention),
        ("stage", tuple((slot, 1) for slot in layout.stages)),
        ("expert", layout.experts),
    )
    for role, slots in roles:
        span = layout.spans[role == "expert"] if layout.spans else None
        devices = layout.host.devices if span is None else span.host.devices
        for index, slot in enumerate(slot for slot, count in slots for _ in range(count)):
            device = slot.device
            cores: tuple[int, ...] = ()
            is_part = slot.threads < device.cores
            if span is not None and index % span.num_nodes == 0:
                taken.clear()
                used_cores.clear()
            if not device.is_gpu and not shared and (is_part or _num_cpus(devices) > 1):
                low = _first(devices, device, lambda each: each.cores) + used_cores[device.group]
                cores = tuple(range(low, low + slot.threads))
            number = 0 if shared else taken[device.group]
            yield role, index, slot, cores, _device_name(devices, device, number)
            taken[device.group] += 1
            used_cores[device.group] += slot.threads


def _num_cpus(devices: Sequence[Device]) -> int:
    return sum(device.count for device in devices if not device.is_gpu)


def _device_name(devices: Sequence[Device], device: Device, number: int) -> str:
    """Return the name of the `number`-th of like devices of a host."""
    return place_of(device, _first(devices, device, lambda each: int(each.is_gpu)) + number).device


def _first(devices: Sequence[Device], device: Device, each_has: Callable[[Device], int]) -> int:
    """Return the number of GPUs, or of cores, of the devices before this one in the file."""
    return sum(each.count * each_has(each) for each in devices[: device.group])


def expected_of(rater: Rater, rating: Rating, *, devices: EngineLayout | None = None) -> Expected:
    """Return the figures of an engine at its load, without drafts but for the price of `devices`.

    These are the layout's and the draft node's; None: the layout's.
    """
    engine, found = rating.settled
    steps = EngineSteps(engine, rater.clock)
    shape = EngineShape(engine.layout.num_attention, engine.batched_tokens)
    chunks = chunks_of(rater.workload, shape, found.running)
    assert chunks is not None
    num_hops = len(rater.model.moe_layers) - engine.num_local if engine.layout.experts else 0
    counts = rater.model.num_layers, 0 if engine.layout.is_colocated else num_hops
    prompt = rater.workload.prompt.average
    return Expected(
        decode=_step(steps.step(found.running, None), rater.clock.context, *counts),
        prefill=_step(steps.step(found.running, chunks[1]), prompt / 2, *counts),
        ttft_s=found.ttft_s,
        tpot_s=found.tpot_s,
        tokens_per_s=found.rate * rater.workload.output.average,
        price=price_of(engine.layout if devices is None else devices, 1),
        kl=engine.formats.kl,
        max_kl=rater.workload.max_kl,
    )


def _step(step: StepEstimate, context: float, num_layers: int, num_hops: int) -> ExpectedStep:
    """Return a step's times with the mean of its layers, and of those whose rows travel."""
    m = step.micro_batches
    return ExpectedStep(
        rows=max(1, round(step.rows)),
        context=context,
        micro_batches=m,
        attention_s=step.attention_s / (m * num_layers),
        experts_s=step.experts_s / (m * num_hops) if num_hops else 0.0,
        link_s=step.link_s / num_hops if num_hops else 0.0,
        step_s=step.step_s,
    )
