"""The steps of a measurement: what they ask of nodes, within their limits and in time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.nodes.formation import Formation
from server.scheduler.planning.plans import Step
from server.scheduler.rehearsal.steps import BUDGET_S, NUM_WARM_UP, Rehearsal, obstacle
from tests.topspin.plans import plan
from topspin.expert_table import uniform_table
from topspin.messages import StepResult, StepTimings, unpack_ints
from topspin.plan.expected import Expected, ExpectedStep
from topspin.plan.spec import EnginePlan

FACTS = EngineFacts(2, 8, 100, 8, 2, num_layers=3)
PLAN = plan(attention_nodes=2, expert_nodes=2, max_num_seqs=8, max_num_batched_tokens=32)


def asked(rows: int, context: float, micro_batches: int = 1) -> ExpectedStep:
    return ExpectedStep(
        rows=rows,
        context=context,
        micro_batches=micro_batches,
        attention_s=1.0,
        experts_s=1.0,
        link_s=1.0,
        step_s=1.0,
    )


def run(
    decode: ExpectedStep,
    prefill: ExpectedStep,
    *,
    step_s: float = 0.01,
    num_blocks: tuple[int, int] = (400, 400),
    engine: EnginePlan = PLAN,
) -> tuple[Rehearsal, list[Step]]:
    """Answer every step after `step_s`; return its end and all steps."""
    expected = Expected(decode=decode, prefill=prefill, ttft_s=1, tpot_s=1, tokens_per_s=1)
    formation = Formation(uniform_table(num_layers=2, num_experts=8, num_nodes=2))
    rehearsal, now_s = Rehearsal(engine, expected, FACTS, formation, num_blocks), 100.0
    steps: list[Step] = []
    while (step := rehearsal.next_step(now_s)) is not None:
        assert rehearsal.next_step(now_s) is None  # one at a time
        steps.append(step)
        now_s += step_s
        for index in step.plans:
            timings = StepTimings(
                total_s=step_s,
                attention_s=0.001 * (index + 1),
                wait_s=0.0,
                sample_s=0.0,
                experts_s=(0.003, 0.004),
                link_s=None,
            )
            rehearsal.take(
                StepResult(
                    step=step.ticket.step,
                    generation=1,
                    index=index,
                    seq_ids=b"",
                    tokens=b"",
                    timings=timings,
                )
            )
    assert rehearsal.is_done
    return rehearsal, steps


def rows_of(step: Step) -> dict[int, list[int]]:
    """Return the rows of each node's micro-batches."""
    return {
        index: [sum(unpack_ints(each.num_tokens)) for each in made.micro_batches]
        for index, made in step.plans.items()
    }


def test_steps_are_those_expected_and_all_sequences_end() -> None:
    rehearsal, steps = run(asked(12, 50.0, 2), asked(40, 9.5))
    assert rehearsal.found.keys() == {"prefill", "decode"}
    assert [step.ticket.step for step in steps] == list(range(1, len(steps) + 1))
    assert [step.ticket.previous for step in steps] == list(range(len(steps)))
    assert rehearsal.last_step == len(steps)
    decodes = [step for step in steps if step.ticket.num_micro_batches == 2]
    assert len(decodes) > NUM_WARM_UP
    assert all(rows_of(step) == {0: [3, 3], 1: [3, 3]} for step in decodes)
    assert all(step.ticket.row_buckets == (4, 4) for step in decodes)
    prompts = steps[: steps.index(decodes[0])]
    assert all(rows_of(step) == {0: [20], 1: [20]} for step in prompts)
    for index in (0, 1):
        made = [step.plans[index] for step in steps]
        began = [new.seq_id for each in made for new in each.new]
        ended = [seq_id for each in made for seq_id in unpack_ints(each.finished)]
        assert sorted(began) == sorted(ended)
        assert len(set(began)) == len(began)
        assert {new.num_computed for new in decodes[0].plans[index].new} == {50}
    assert rehearsal.found["decode"].attention_s == {0: 0.001, 1: 0.002}
    assert rehearsal.found["decode"].experts_s == {0: 0.003, 1: 0.004}
    assert rehearsal.found["decode"].link_s is None


def test_no_two_sequences_write_the_same_block() -> None:
    _, steps = run(asked(16, 40.0), asked(64, 15.0))
    size = PLAN.kv_cache.block_size
    for index in (0, 1):
        written: set[int] = set()
        for step in steps:
            for new in step.plans[index].new:
                own = set(unpack_ints(new.blocks)[new.num_computed // size :])
                assert own
                assert written.isdisjoint(own)
                assert max(own) < 400
                written |= own


@pytest.mark.parametrize("step_s", [0.01, 0.4, 30.0])
def test_no_step_begins_after_the_budget(step_s: float) -> None:
    rehearsal, steps = run(asked(4, 20.0), asked(16, 5.0), step_s=step_s)
    # The last step only ends sequences.
    assert (len(steps) - 2) * step_s <= 1.5 * BUDGET_S
    assert "prefill" in rehearsal.found


@pytest.mark.parametrize(
    ("decode", "num_blocks"),
    [
        (asked(17, 10.0), (400, 400)),  # more than all seats
        (asked(16, 1000.0), (400, 100)),  # more keys than a cache has room for
    ],
)
def test_what_has_no_room_is_left_out(decode: ExpectedStep, num_blocks: tuple[int, int]) -> None:
    rehearsal, _ = run(decode, asked(8, 4.0), num_blocks=num_blocks)
    assert rehearsal.found.keys() == {"prefill"}


def test_nodes_serve_by_their_seats() -> None:
    first, *others = PLAN.nodes
    large = replace(first, max_num_seqs=24, max_num_batched_tokens=96)
    unequal = replace(PLAN, nodes=(large, *others))
    _, steps = run(asked(16, 10.0), asked(64, 9.0), engine=unequal)
    assert rows_of(steps[0]) == {0: [48], 1: [16]}
    assert {0: [12], 1: [4]} in [rows_of(step) for step in steps]


@pytest.mark.parametrize(
    ("asked_for", "reason"),
    [
        ({}, None),
        ({"kernels": "triton"}, "only nodes on the CPU"),
        ({"kv_retrieval_tokens": 512}, "retrieved"),
    ],
)
def test_what_cannot_be_measured_is_said(asked_for: dict[str, Any], reason: str | None) -> None:
    found = obstacle(plan(**asked_for))
    assert found is None if reason is None else reason in str(found)
