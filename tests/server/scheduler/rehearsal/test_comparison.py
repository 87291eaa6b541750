"""How far a plan is off: by how much, by which part of the step, and which node's."""

from __future__ import annotations

import pytest

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.rehearsal.comparison import compare
from server.scheduler.rehearsal.steps import Measured
from topspin.plan.expected import Expected, ExpectedStep

FACTS = EngineFacts(8, 4, 100, 8, 2, num_layers=10)
# 10 halves of 1 ms, 8 hops of 2 ms and 16 ways of 0.1 ms leave 7.4 ms for the rest.
STEP = ExpectedStep(
    rows=16,
    context=100.0,
    micro_batches=1,
    attention_s=0.001,
    experts_s=0.002,
    link_s=0.0001,
    step_s=0.030,
)
EXPECTED = Expected(decode=STEP, prefill=STEP, ttft_s=0.1, tpot_s=0.03, tokens_per_s=1.0)
AS_EXPECTED = Measured(0.030, {0: 0.01, 1: 0.01}, {0: 0.016, 1: 0.016}, 0.0001)


def test_a_plan_that_holds() -> None:
    text, ratios = compare(EXPECTED, {"decode": AS_EXPECTED}, FACTS)
    assert text == "plan as expected in decode (+0%: 30 ms for 16 rows)"
    assert ratios["decode"] == pytest.approx(
        dict.fromkeys(("step", "attention", "experts", "link", "head, sampling and planning"), 1.0)
    )


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (
            AS_EXPECTED._replace(step_s=0.054, experts_s={0: 0.016, 1: 0.040, 2: 0.016}),
            "plan off by +80% in decode (54 ms for 16 rows): experts 5 ms, expected 2 (expert 1: "
            "2.5x the other nodes)",
        ),
        (
            # Both alike: no single node is to blame.
            AS_EXPECTED._replace(step_s=0.040, attention_s={0: 0.02, 1: 0.0199}),
            "plan off by +33% in decode (40 ms for 16 rows): attention 2 ms, expected 1",
        ),
        (
            AS_EXPECTED._replace(step_s=0.0444, link_s=0.001),
            "plan off by +48% in decode (44.4 ms for 16 rows): link 1 ms, expected 0.1",
        ),
        (
            AS_EXPECTED._replace(step_s=0.060),
            "plan off by +100% in decode (60 ms for 16 rows): head, sampling and planning 32.4 ms, "
            "expected 2.4",
        ),
        (
            AS_EXPECTED._replace(step_s=0.022, experts_s={0: 0.008}),
            "plan off by -27% in decode (22 ms for 16 rows): experts 1 ms, expected 2",
        ),
    ],
)
def test_the_largest_cause_is_named(measured: Measured, text: str) -> None:
    found, ratios = compare(EXPECTED, {"decode": measured}, FACTS)
    assert found == text
    assert ratios["decode"]["step"] == pytest.approx(measured.step_s / 0.030)


def test_both_phases_are_told_and_none_is_no_failure() -> None:
    text, ratios = compare(EXPECTED, {"prefill": AS_EXPECTED, "decode": AS_EXPECTED}, FACTS)
    assert text.count("plan as expected") == 2
    assert ratios.keys() == {"decode", "prefill"}
    text, ratios = compare(EXPECTED, {}, FACTS)
    assert "was not measured" in text
    assert ratios == {}


def test_a_dense_model_has_no_experts_to_compare() -> None:
    facts = FACTS._replace(num_moe_layers=0)
    measured = Measured(0.030, {0: 0.01}, {}, None)
    _, ratios = compare(EXPECTED, {"decode": measured}, facts)
    assert ratios["decode"].keys() == {"step", "attention", "head, sampling and planning"}


def test_local_layers_have_no_hop() -> None:
    measured = AS_EXPECTED._replace(experts_s={0: 0.008, 1: 0.008})
    _, ratios = compare(EXPECTED, {"decode": measured}, FACTS, num_local=4)
    assert ratios["decode"]["experts"] == 1.0
