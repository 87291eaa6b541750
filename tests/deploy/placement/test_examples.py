"""The plans of the example clusters are what the planner gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.placement.command import plan_texts, read_inputs
from deploy.placement.search.search import search

DOCS = Path(__file__).parents[3] / "docs"
MODELS = Path(__file__).parent / "models"
EXAMPLES = {
    "laptop": ("smollm2-moe", "smollm2-moe"),
    "8xh200": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
    "h20_l40s": ("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "gpu_cpu_hosts": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
}
"""By cluster: the directory with the model's config.json, and its name in the plan."""


def texts_of(name: str) -> list[str]:
    """Return the plans of an example, as the command would write them."""
    directory, model = EXAMPLES[name]
    inputs, facts = read_inputs(
        DOCS / "clusters" / f"{name}.yaml",
        str(MODELS / directory),
        DOCS / "clusters" / f"{name}.workload.yaml",
    )
    return plan_texts(inputs, search(inputs), model=model, facts=facts)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "laptop" else [pytest.mark.slow]) for name in EXAMPLES],
)
def test_an_example_gives_its_plan(name: str) -> None:
    [text] = texts_of(name)
    assert (DOCS / "plans" / "planned" / f"{name}.yaml").read_text() == text


def test_every_example_cluster_has_a_plan() -> None:
    clusters = {path.name.split(".")[0] for path in (DOCS / "clusters").glob("*.yaml")}
    plans = {path.stem for path in (DOCS / "plans" / "planned").glob("*.yaml")}
    assert clusters == plans == set(EXAMPLES)


if __name__ == "__main__":
    for each in sys.argv[1:] or EXAMPLES:
        [plan] = texts_of(each)
        (DOCS / "plans" / "planned" / f"{each}.yaml").write_text(plan)
