"""Plans of engines that are never started."""

from __future__ import annotations

from typing import Any

from topspin.plan.from_flags import resolve
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import OFF

FACTS = ModelFacts(
    dtype="bfloat16",
    max_positions=2048,
    num_layers=3,
    moe_layers=(1, 2),
    num_experts=8,
    num_mtp_layers=1,
)
DENSE = FACTS._replace(moe_layers=(), num_experts=0, num_mtp_layers=0)


def plan(facts: ModelFacts = FACTS, **asked: Any) -> EnginePlan:
    """Return the plan of the defaults on four cores, with settings that are asked for.

    Nodes guess no tokens unless that is asked for: steps then have one row per sequence.
    """
    fixed = {"path": "tiny", "cores": (0, 1, 2, 3), "speculation": OFF}
    return resolve(facts, **fixed | asked)
