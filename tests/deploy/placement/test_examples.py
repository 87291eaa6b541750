"""The plans and reports of the example clusters are what `topspin plan` gives.

`python -m tests.deploy.placement.test_examples [NAME ...]` writes them anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deploy.placement.command import main

DOCS = Path(__file__).parents[3] / "docs"
MODELS = Path(__file__).parent / "models"
REPORTS = Path(__file__).parent / "reports"
EXAMPLES = {
    "laptop": ("smollm2-moe", "smollm2-moe"),
    "8xh200": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
    "h20_l40s": ("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "gpu_cpu_hosts": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
    "megascale_infer": ("mixtral-8x22b", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    "gpt_oss_h100": ("gpt-oss-120b", "openai/gpt-oss-120b"),
    "deepseek_h200": ("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
}
"""By cluster: the directory with the model's config.json, and its name in the plan."""


def planned(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the plan and the report of an example, as the command writes them."""
    directory, model = EXAMPLES[name]
    path, flags = str(MODELS / directory), ["-o", str(folder / "plan.yaml")]
    for option, ending in (("--cluster", "yaml"), ("--workload", "workload.yaml")):
        flags += [option, str(DOCS / "clusters" / f"{name}.{ending}")]
    assert main([*flags, "--model", path]) == 0
    report = json.loads(
        (folder / "plan.json").read_text(), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    assert len(report["engines"]) == 1
    del report["engines"][0]["file"]
    return (folder / "plan.yaml").read_text().replace(path, model), report


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "laptop" else [pytest.mark.slow]) for name in EXAMPLES],
)
def test_an_example_gives_its_plan_and_report(name: str, tmp_path: Path) -> None:
    plan, report = planned(name, tmp_path)
    assert (DOCS / "plans" / "planned" / f"{name}.yaml").read_text() == plan
    assert json.loads((REPORTS / f"{name}.json").read_text()) == report


def test_every_example_cluster_has_a_plan() -> None:
    clusters = {path.name.split(".")[0] for path in (DOCS / "clusters").glob("*.yaml")}
    plans = {path.stem for path in (DOCS / "plans" / "planned").glob("*.yaml")}
    assert clusters == plans == {path.stem for path in REPORTS.glob("*.json")} == set(EXAMPLES)


if __name__ == "__main__":
    for each in sys.argv[1:] or EXAMPLES:
        with tempfile.TemporaryDirectory() as place:
            text, told = planned(each, Path(place))
        (DOCS / "plans" / "planned" / f"{each}.yaml").write_text(text)
        told_text = json.dumps(told, indent=1, sort_keys=True)
        (REPORTS / f"{each}.json").write_text(told_text + "\n")
