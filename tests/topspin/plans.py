"""Settings and plans of engines that are never started."""

from __future__ import annotations

from typing import Any

from tests.structs import changed
from topspin.cores import LayoutChoice
from topspin.plan.from_flags import ModelFacts, resolve
from topspin.plan.settings import EngineConfig, ModelSection
from topspin.plan.spec import EnginePlan

FACTS = ModelFacts(
    dtype="bfloat16", max_positions=2048, num_layers=3, moe_layers=(1, 2), num_experts=8
)
DENSE = FACTS._replace(moe_layers=(), num_experts=0)


def plan(
    facts: ModelFacts = FACTS,
    *,
    cores: tuple[int, ...] = (0, 1, 2, 3),
    measured: LayoutChoice | None = None,
    **sections: Any,
) -> EnginePlan:
    """Return the plan of the defaults, with other `sections` where they are given."""
    sections.setdefault("model", ModelSection(path="tiny"))
    return resolve(EngineConfig(**sections), facts, cores=cores, measured=measured)


def with_setting(key: str, value: object) -> EngineConfig:
    """Return the defaults with one `section.field` changed."""
    return changed(EngineConfig(model=ModelSection(path="tiny")), {key: value})
