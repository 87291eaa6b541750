"""A planned engine as an engine plan, which `topspin serve --plan` runs.

Owns the translation of seats into nodes: GPU numbers, cores, threads, caches. Every plan it gives
has passed the checks that `topspin serve` makes. Called by deploy.placement.command.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from deploy.placement.drafts import Decision, Maker
from deploy.placement.rating import Rater, Rating
from deploy.placement.steady import Shape as EngineShape
from deploy.placement.steady import chunks_of, high_running
from deploy.placement.steps import EngineSteps, Step
from deploy.placement.units import Device, Seat, Seats, Unit, place_of, price_of
from topspin.plan.checks import check_model, check_plan
from topspin.plan.expected import Expected, ExpectedStep
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.local_experts import LocalExperts
from topspin.plan.model_facts import ModelFacts
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
Node = TypeVar("Node", AttentionNode, StageNode, ExpertNode, DraftNode)


def plan_of(
    rater: Rater, rating: Rating, *, path: str, facts: ModelFacts, drafts: Decision | None = None
) -> EnginePlan:
    """Return the plan of a rated engine; raises ConfigError if the engine could not run it."""
    engine = rating.engine
    maker = drafts.choice.maker if drafts is not None and drafts.choice is not None else None
    if maker is not None:
        rating = replace(rating, room=maker.room)
    assert engine is not None
    unit = engine.unit
    local = local_experts_of(rater, rating)
    dtype: Dtype = "float32" if facts.dtype == "float32" else "bfloat16"
    plan = EnginePlan(
        model=PlannedModel(path=path, dtype=dtype, max_model_len=rater.max_model_len),
        precision=engine.formats.rules(),
        kv_cache=KvCacheSpec(dtype="fp8" if engine.kv_itemsize == 1 else "auto"),
        nodes=(
            *_attention(rater, rating),
            *_stages(rater, rating),
            *(() if unit.is_colocated else _experts(rater, rating)),
            *(() if maker is None else _draft(unit, maker)),
        ),
        links=(
            LinkSpec(
                # No row travels where all are colocated, and shm is what that plan says.
                transport="shm" if unit.is_colocated else unit.transport,
                payload="fp32" if dtype == "float32" else "bf16",
                window_rows=_window_rows(unit, engine.batched_tokens),
            ),
        ),
        scheduling=SchedulingPolicy(
            micro_batches=engine.micro_batches if unit.experts else None,
            prefix_caching=facts.shares_prefixes,
        ),
        local_experts=None if local is None else local.experts,
        speculation=None if drafts is None else drafts.speculation,
        expected=expected_of(rater, rating, devices=None if maker is None else maker.unit),
    )
    check_plan(plan)
    check_model(plan, facts)
    return plan


class LocalChoice(NamedTuple):
    """The layers without a hop, and why always, or as the engine measures."""

    experts: LocalExperts
    reason: str


def local_experts_of(rater: Rater, rating: Rating) -> LocalChoice | None:
    """Return which layers have no hop: always, or, where it is close, as the engine measures."""
    engine, found = rating.engine, rating.point
    assert engine is not None
    assert found is not None
    if engine.unit.is_colocated:
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


def _window_rows(unit: Unit, batched_tokens: int) -> int:
    """Return the rows of a window: a node's largest batch, which an expert node serves at once."""
    least = GPU_WINDOW_ROWS if unit.transport == "cuda_ipc" else WINDOW_ROWS
    return min(MAX_WINDOW_ROWS, max(least, batched_tokens))


def _attention(rater: Rater, rating: Rating) -> Iterator[AttentionNode]:
    engine = rating.engine
    assert engine is not None
    own_layers = engine.ends[0] if engine.ends else rater.model.num_layers
    for index, (seat, place) in enumerate(_placed(engine.unit, "attention")):
        group = [each for each, _ in engine.unit.attention].index(seat)
        node = AttentionNode(
            index=index,
            device=place.device,
            kernels=place_of(seat.device).kernels,
            wait="spin" if place.cores else "block",
            num_threads=seat.threads or None,
            cores=place.cores,
            layers=(0, engine.ends[0]) if engine.ends else None,
            max_num_seqs=rating.seats,
            max_num_batched_tokens=engine.batched_tokens,
            kv_cache_bytes=(
                None
                if seat.device.is_gpu
                else _cache_bytes(rater, rating, group, num_layers=own_layers)
            ),
        )
        yield _slowed(node, seat)


def _stages(rater: Rater, rating: Rating) -> Iterator[StageNode]:
    engine = rating.engine
    assert engine is not None
    for index, (seat, place) in enumerate(_placed(engine.unit, "stage")):
        layers = (engine.ends[index], engine.ends[index + 1])
        node = StageNode(
            index=index,
            device=place.device,
            kernels=place_of(seat.device).kernels,
            wait="spin" if place.cores else "block",
            num_threads=seat.threads or None,
            cores=place.cores,
            layers=layers,
            of=0,
            kv_cache_bytes=_cache_bytes(rater, rating, 0, num_layers=layers[1] - layers[0]),
        )
        yield _slowed(node, seat)


def _cache_bytes(rater: Rater, rating: Rating, group: int, *, num_layers: int) -> int:
    """Return a CPU's cache of so many layers: its share of the keys at the p95, in whole blocks.

    All layers have as many blocks, on whatever node: the fewest are what the engine has.
    """
    engine, found = rating.engine, rating.point
    assert engine is not None
    assert found is not None
    high = max(high_running(rater.workload, found), rating.seats / max(engine.weights))
    tokens = KEYS_IN_RESERVE * high * engine.weights[group] * rater.clock.context
    block = KvCacheSpec().block_size
    needed = max(tokens, float(rater.max_model_len + block))
    blocks = math.ceil(min(needed, max(rating.room[group], rater.max_model_len + block)) / block)
    return blocks * block * num_layers * rater.model.kv_layer_bytes(engine.kv_itemsize)


def _experts(rater: Rater, rating: Rating) -> Iterator[ExpertNode]:
    engine = rating.engine
    assert engine is not None
    held = [
        each
        for each, (_, count) in zip(engine.held, engine.unit.experts, strict=True)
        for _ in range(count)
    ]
    # Nodes of a group hold as many, rounded up: the last ones need not.
    surplus = sum(held) - rater.model.num_experts
    for idx in sorted(range(len(held)), key=lambda each: (-held[each], -each))[:surplus]:
        held[idx] -= 1
    for index, (seat, place) in enumerate(_placed(engine.unit, "expert")):
        node = ExpertNode(
            index=index,
            device=place.device,
            kernels=place_of(seat.device).kernels,
            wait="spin" if place.cores else "block",
            num_threads=seat.threads or None,
            cores=place.cores,
            experts=held[index],
        )
        yield _slowed(node, seat)


def _draft(unit: Unit, maker: Maker) -> Iterator[DraftNode]:
    """Yield the node on the first device of its kind that the engine leaves over."""
    if maker.seat is None:
        return
    device, threads = maker.seat
    number = unit.used[device.group]
    cores: tuple[int, ...] = ()
    if not device.is_gpu and sum(each.count for each in unit.host.devices if not each.is_gpu) > 1:
        low = _first_core(unit, device) + number * device.cores
        cores = tuple(range(low, low + device.cores))
    first = _first_gpu(unit, device) if device.is_gpu else 0
    place = place_of(device, first + number)
    node = DraftNode(
        index=0,
        device=place.device,
        kernels=place.kernels,
        wait="block",
        num_threads=threads or None,
        cores=cores,
        kv_cache_tokens=maker.cached_tokens,
    )
    yield _slowed(node, maker.seat)


def _slowed(node: Node, seat: Seat) -> Node:
    """Return the node with its device's `slow`, if that says anything."""
    slow = seat.device.slow
    return msgspec.structs.replace(node, slow=slow) if slow > 1 else node


class _Placed:
    """Where a node is: its device's name, and the cores that belong to it alone."""

    def __init__(self, device: str, cores: tuple[int, ...] = ()) -> None:
        self.device = device
        self.cores = cores


def _placed(unit: Unit, role: str) -> Iterator[tuple[Seat, _Placed]]:
    """Yield each node's seat and place: on like devices attention, then stages, then experts.

    GPUs and cores are counted in the order of the cluster file.
    """
    taken: dict[int, int] = {}
    cores: dict[int, int] = {}
    num_cpus = sum(device.count for device in unit.host.devices if not device.is_gpu)
    shared = unit.layout != "apart"
    roles: tuple[tuple[str, Seats], ...] = (
        ("attention", unit.attention),
        ("stage", tuple((seat, 1) for seat in unit.stages)),
        ("expert", unit.experts),
    )
    for name, seats in roles:
        for seat, count in seats:
            for _ in range(count):
                device = seat.device
                number = 0 if shared else taken.get(device.group, 0)
                first = cores.get(device.group, 0)
                is_part = seat.threads < device.cores
                if device.is_gpu:
                    place = _Placed(place_of(device, _first_gpu(unit, device) + number).device)
                elif shared or (num_cpus == 1 and not is_part):
                    place = _Placed("cpu")
                else:
                    low = _first_core(unit, device) + first
                    place = _Placed("cpu", tuple(range(low, low + seat.threads)))
                taken[device.group] = number + 1
                cores[device.group] = first + seat.threads
                if name == role:
                    yield seat, place


def _first_gpu(unit: Unit, device: Device) -> int:
    before = unit.host.devices[: device.group]
    return sum(each.count for each in before if each.is_gpu)


def _first_core(unit: Unit, device: Device) -> int:
    return sum(each.count * each.cores for each in unit.host.devices[: device.group])


def expected_of(rater: Rater, rating: Rating, *, devices: Unit | None = None) -> Expected:
    """Return the figures of an engine at its load, without drafts but for the price of `devices`.

    These are the unit's and the draft node's; None: the unit's.
    """
    engine, found = rating.engine, rating.point
    assert engine is not None
    assert found is not None
    steps = EngineSteps(engine, rater.clock)
    shape = EngineShape(engine.unit.num_attention, engine.batched_tokens)
    chunks = chunks_of(rater.workload, shape, found.running)
    assert chunks is not None
    num_hops = len(rater.model.moe_layers) - engine.num_local if engine.unit.experts else 0
    counts = rater.model.num_layers, 0 if engine.unit.is_colocated else num_hops
    prompt = rater.workload.prompt.average
    return Expected(
        decode=_step(steps.step(found.running, None), rater.clock.context, *counts),
        prefill=_step(steps.step(found.running, chunks[1]), prompt / 2, *counts),
        ttft_s=found.ttft_s,
        tpot_s=found.tpot_s,
        tokens_per_s=found.rate * rater.workload.output.average,
        price=price_of(engine.unit if devices is None else devices, 1),
        kl=engine.formats.kl,
        max_kl=rater.workload.max_kl,
    )


def _step(step: Step, context: float, num_layers: int, num_hops: int) -> ExpectedStep:
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
