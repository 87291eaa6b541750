"""Plans with nodes that may be missing: what must be there, and what cannot join late."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.topspin.plan.test_spec import ATTENTION, DRAFT, EXPERT, LOCAL, SELF, made_of
from tests.topspin.plan.test_stages import HEAD, stage
from tests.topspin.plans import FACTS
from topspin.errors import ConfigError
from topspin.plan.file import print_plan
from topspin.plan.from_flags import check_model
from topspin.plan.settings import FailoverSection
from topspin.plan.spec import EnginePlan

OTHER = replace(ATTENTION, index=1, optional=True)


def growing(*nodes: Any, restart: bool = True, **fields: Any) -> EnginePlan:
    return made_of(*nodes, failover=FailoverSection(restart=restart), **fields)


def holding(*nodes: tuple[int, bool]) -> EnginePlan:
    """Return a plan of expert nodes: how many experts each holds, and whether it is optional."""
    experts = [
        replace(EXPERT, index=idx, experts=count, optional=optional)
        for idx, (count, optional) in enumerate(nodes)
    ]
    return growing(ATTENTION, *experts)


def test_nodes_of_both_roles_may_be_optional() -> None:
    plan = growing(ATTENTION, OTHER, EXPERT, replace(EXPERT, index=1, optional=True))
    plan.check()
    check_model(plan, FACTS)
    assert print_plan(plan).count("optional: true") == 2
    assert "optional" not in print_plan(growing(ATTENTION, EXPERT))


@pytest.mark.parametrize(
    ("plan", "refusal"),
    [
        (
            growing(replace(ATTENTION, optional=True), OTHER, EXPERT),
            "nodes: every attention node is optional; an engine serves without these",
        ),
        (
            growing(ATTENTION, replace(EXPERT, optional=True)),
            "nodes: every expert node is optional; an engine serves without these",
        ),
        (
            growing(ATTENTION, OTHER, EXPERT, restart=False),
            r"attention 1: optional: nodes join late by failover\.restart",
        ),
        (
            growing(ATTENTION, OTHER, EXPERT, link=LOCAL),
            "attention 1: optional: with transport local all nodes are one process",
        ),
        (
            growing(ATTENTION, EXPERT, replace(DRAFT, optional=True), speculation=SELF),
            "draft 0: optional: only attention and expert nodes can be",
        ),
        (
            growing(HEAD, stage(0, (1, 3), optional=True), EXPERT),
            "stage 0: optional: only attention and expert nodes can be",
        ),
        (
            growing(ATTENTION, replace(OTHER, layers=(0, 1)), stage(0, (1, 3), of=1), EXPERT),
            "attention 1: optional: stage 0 computes layers of it",
        ),
    ],
)
def test_what_cannot_join_late_or_be_missed_is_refused(plan: EnginePlan, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        plan.check()


def test_the_others_hold_every_expert() -> None:
    for held in (((8, False), (1, True)), ((3, True), (4, False), (4, False))):
        check_model(holding(*held), FACTS)
    refusal = r"^nodes: expert nodes that are not optional hold 4 \+ 3 .* the model's 8; "
    with pytest.raises(ConfigError, match=refusal):
        check_model(holding((4, False), (8, True), (3, False)), FACTS)
