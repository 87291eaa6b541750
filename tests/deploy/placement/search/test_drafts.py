"""Drafts that pay are planned, those that do not are refused, and plans with them can be read."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.placement.cost import AttentionLayer, BatchRows, ExpertLayer, StepEnds
from deploy.placement.formats import stored
from deploy.placement.routing import touched
from deploy.placement.search.drafts import MIN_SAMPLED_ROWS, Decision, decide
from deploy.placement.search.layouts import DeviceSlot, Host
from deploy.placement.search.search import FleetMember, Inputs, Result
from deploy.placement.search.steps import EngineSteps
from deploy.placement.workload import Drafts, Targets
from deploy.placement.write import plan_of
from server.scheduler.planning import attention_replica
from tests.deploy.placement import samples
from tests.pairwise import cover_pairs
from topspin.plan.file import print_plan, read_plan
from topspin.plan.precision import UNQUANTISED
from topspin.plan.spec import EnginePlan

TARGET = samples.model(24, hidden=2048)
DRAFTS = {"dense": samples.model(2, num_experts=0, hidden=512), "moe": samples.model(2, hidden=256)}
ONE_GPU = "1 gpu in one process"
DEVICES = ((1, 0), (1, 1), (2, 1))
CASES = cover_pairs((0.0, 0.3, 0.9, 1.0), ("dense", "moe"), DEVICES, (1, 6), (300.0, 3000.0))


def host(*, gpus: int = 2, cpus: int = 1, gb_per_s: float = 3000) -> Host:
    return samples.host((samples.gpu(gb_per_s=gb_per_s), gpus), *[(samples.cpu(), cpus)] * cpus)


def inputs_of(
    found: Host, *, draft: str = "dense", acceptance: float = 0.8, most: int = 6, **fields: Any
) -> Inputs:
    fields = {"users": 1, "objective": "min_latency", "targets": Targets()} | fields
    speculation = Drafts(draft_model="draft", acceptance=acceptance, max_tokens=most)
    asked = samples.workload(speculation=speculation, **fields)
    inputs = samples.inputs([found], TARGET, asked)
    return dataclasses.replace(inputs, draft=DRAFTS[draft])


def member_of(inputs: Inputs, name: str = ONE_GPU) -> FleetMember:
    """Return an engine that the search could have found."""
    (host,) = inputs.hosts
    layout = samples.layout_named(host, name)
    rater = inputs.rater()
    asked = inputs.workload.users or inputs.workload.arrival_rate
    assert asked
    return FleetMember(rater.at_load(rater.rate(layout, stored(TARGET)), asked), 1)


def decided(inputs: Inputs, *members: FleetMember) -> Decision:
    result = Result((), (), (), members, members[0].rating.layout.price_per_hour, 1.0, True)
    return decide(inputs, result)[0]


def planned(inputs: Inputs, member: FleetMember, found: Decision) -> EnginePlan:
    facts = samples.facts(TARGET)
    return plan_of(inputs.rater(), member.rating, path="model", facts=facts, drafts=found)


def pass_s(inputs: Inputs, slot: DeviceSlot, rows: float) -> float:
    """Return the time of the draft model's pass, layer by layer from the cost model."""
    model, profile, threads = inputs.draft, slot.device.profile, max(1, slot.threads)
    assert model is not None
    total_s = StepEnds(profile, model, UNQUANTISED, threads=threads).seconds(rows)
    context = inputs.rater().clock.context
    for layer in range(model.num_layers):
        attention = AttentionLayer(profile, model, layer, lambda *_: UNQUANTISED, threads=threads)
        total_s += attention.seconds(BatchRows(rows, context))
        if model.num_experts:
            total_s += ExpertLayer(profile, model, layer, UNQUANTISED, threads=threads).seconds(
                rows=rows,
                pairs=rows * model.top_k,
                touched=touched((model.top_k / model.num_experts,) * model.num_experts, rows),
            )
    return total_s


def check_choice(
    acceptance: float, draft: str, devices: tuple[int, int], users: int, gb_per_s: float
) -> str:
    """Compare a choice with all lengths and slots; returns who drafts, "" for no drafts."""
    gpus, cpus = devices
    found_host = host(gpus=gpus, cpus=cpus, gb_per_s=gb_per_s)
    inputs = inputs_of(found_host, draft=draft, acceptance=acceptance, users=users)
    member = member_of(inputs)
    rating = member.rating
    assert rating.engine is not None
    assert rating.point is not None
    steps, running = EngineSteps(rating.engine, inputs.rater().clock), max(1, rating.point.running)
    gpu, *others = rating.layout.host.devices
    tried: dict[tuple[int, str], float] = {(0, ""): steps.step_s(running, None)}
    for n in range(1, 7):
        tokens = n + 1 if acceptance == 1 else (1 - acceptance ** (n + 1)) / (1 - acceptance)
        verify_s = steps.step_s(running * (n + 1), None)
        on_gpu = n * pass_s(inputs, DeviceSlot(gpu, 0), running)
        tried[n, "serial"] = (verify_s + on_gpu) / tokens
        if gpus == 2:
            tried[n, "gpu"] = max(verify_s, on_gpu) / tokens
        for cpu in others:
            on_cpu = n * pass_s(inputs, DeviceSlot(cpu, cpu.cores), running)
            tried[n, "cpu"] = max(verify_s, on_cpu) / tokens
    least_s = min(tried.values())
    found = decided(inputs, member)
    if found.choice is None:
        assert least_s == pytest.approx(tried[0, ""])
        assert found.text.startswith("drafts refused: at ")
        return ""
    slot = found.choice.maker.slot
    where = "serial" if slot is None else slot.device.name
    assert tried[found.choice.num_tokens, where] == pytest.approx(found.choice.token_s)
    assert found.choice.token_s == pytest.approx(least_s)
    assert ": taken, " in found.text
    return where


def test_the_choice_is_that_of_all_lengths_and_slots() -> None:
    outcomes = {check_choice(*case) for case in CASES}
    assert outcomes == {"", "serial", "cpu", "gpu"}, "else this would compare less than it says"


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_plan_with_drafts_is_read_again(tmp_path: Path, gpus: int) -> None:
    """On one GPU drafts are serial; else the second has a draft node, whose price is the plan's."""
    inputs = inputs_of(samples.host((samples.gpu(), gpus)), acceptance=0.9)
    member = member_of(inputs)
    found = decided(inputs, member)
    plan = planned(inputs, member, found)
    path = tmp_path / "plan.yaml"
    path.write_text(print_plan(plan))
    assert read_plan(str(path)) == plan
    assert found.choice is not None
    assert plan.speculation is not None
    assert plan.speculation.model == "draft"
    assert plan.speculation.num_speculative_tokens == found.choice.num_tokens
    assert [node.device for node in plan.drafts] == ["cuda:1"][: gpus - 1]
    assert plan.expected is not None
    assert plan.expected.price == pytest.approx(2.0 * gpus)
    assert found.price == pytest.approx(2.0 * (gpus - 1))


def test_a_draft_node_on_a_cpu_has_the_cores_that_are_left(tmp_path: Path) -> None:
    found = samples.host((samples.cpu(cores=4), 3))
    inputs = inputs_of(found, acceptance=0.9)
    member = member_of(inputs, "attention on 1 cpu, experts on 1 cpu")
    decision = decided(inputs, member)
    plan = planned(inputs, member, decision)
    (draft,) = plan.drafts
    assert draft.cores == (8, 9, 10, 11)
    assert draft.num_threads == 4
    path = tmp_path / "plan.yaml"
    path.write_text(print_plan(plan))
    assert read_plan(str(path)) == plan


def test_serial_drafts_on_a_cpu_take_from_the_room_for_keys() -> None:
    """The draft model's weights and keys fit beside the target's keys where memory is scarce."""
    inputs = inputs_of(samples.host((samples.cpu(cores=4, memory_gib=11), 1)), acceptance=0.9)
    member = member_of(inputs, "1 cpu in one process")
    found = decided(inputs, member)
    assert found.choice is not None
    assert found.choice.maker.slot is None
    draft = inputs.draft
    assert draft is not None
    (room,) = member.rating.room
    own, theirs = TARGET.kv_bytes_per_token(), draft.kv_bytes_per_token()
    weights = sum(draft.weight_bytes("attention", each, UNQUANTISED) for each in range(2))
    (plain,) = planned(inputs, member, Decision("")).attention
    (node,) = planned(inputs, member, found).attention
    assert plain.kv_cache_bytes is not None
    assert node.kv_cache_bytes is not None
    assert node.kv_cache_bytes < plain.kv_cache_bytes
    assert node.kv_cache_bytes / own * (own + theirs) + weights < room * own


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"acceptance": 0.0}, r"at 1 sequences a step of 2x rows, .* takes 1\.\d+x for 1.00x"),
        ({"users": 10**5, "acceptance": 0.9}, "beside .* sequences a step has no room for them"),
    ],
)
def test_refused_drafts_are_in_no_plan(fields: dict[str, Any], said: str) -> None:
    inputs = inputs_of(host(), **fields)
    member = member_of(inputs)
    found = decided(inputs, member)
    assert found.text.startswith("drafts refused: ")
    assert re.search(said, found.text), found.text
    plan = planned(inputs, member, found)
    assert plan.speculation is None
    assert not plan.drafts


def test_no_drafts_where_layers_are_cut() -> None:
    """A plan with them is refused."""
    found = samples.host((samples.cpu("a", cores=4), 1), (samples.cpu("b", cores=4), 2))
    inputs = inputs_of(found, acceptance=0.9)
    member = member_of(inputs, "attention on a, b by layer ranges, experts on 1 b")
    decision = decided(inputs, member)
    assert decision.text == "drafts refused: the engine has none where layers are cut"
    assert planned(inputs, member, decision).speculation is None


def test_a_draft_model_that_fits_nowhere_is_refused() -> None:
    inputs = inputs_of(samples.host((samples.gpu(), 1)))
    huge = samples.model(400, num_experts=0, hidden=8192)
    inputs = dataclasses.replace(inputs, draft=huge)
    found = decided(inputs, member_of(inputs))
    assert found.text == "drafts refused: no device has room for the draft model"


def test_the_ttft_target_holds_with_drafts() -> None:
    free = inputs_of(samples.host((samples.gpu(), 1)), acceptance=0.9)
    member = member_of(free)
    assert decided(free, member).choice is not None
    assert member.rating.point is not None
    tight = Targets(ttft_s=member.rating.point.ttft_s * 1.0001)
    inputs = inputs_of(samples.host((samples.gpu(), 1)), acceptance=0.9, targets=tight)
    found = decided(inputs, member)
    assert found.choice is None
    assert found.text.endswith("and the TTFT could miss its target")


@pytest.mark.parametrize(
    "fields", [{"objective": "min_price"}, {"max_price_per_hour": 3.0}, {"members": 2}]
)
def test_no_device_is_taken_that_costs_too_much_or_may_be_in_use(fields: dict[str, Any]) -> None:
    count = fields.pop("members", 1)
    inputs = inputs_of(samples.host((samples.gpu(), 2)), acceptance=0.9, **fields)
    member = member_of(inputs)
    found = decided(inputs, *(member,) * count)
    assert found.choice is not None
    assert found.choice.maker.slot is None
    assert found.price == 0


def test_the_scheduler_samples_as_many_rows_as_is_said_here() -> None:
    assert attention_replica.MIN_SAMPLED_ROWS == MIN_SAMPLED_ROWS
