"""The manifests of example plans, whole: what a change of code changes in them is read.

`python -m tests.deploy.kubernetes.test_golden` writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.kubernetes.renders import render

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = {
    "kubernetes": "kubernetes",
    "one_pod": "unequal",
    "whole_cpu": "one process, 2 threads",
    "whole_gpus": "planned/h20_l40s",
    "over_hosts": "planned/megascale_infer",
}
"""By name of the file: the plan."""

UNSHOWN = ("plan.yaml", "dashboard.json", "alerts.yaml")
"""Files that are no engine's, and the plan, which is the example's."""


def text_of(name: str) -> str:
    """Return the files of an example, one after the other."""
    engine, files = render(EXAMPLES[name])
    shown = {path: text for path, text in files.items() if not path.endswith(UNSHOWN)}
    text = "".join(f"# {path}\n---\n{text}" for path, text in shown.items())
    # The revision changes with every field that a plan gets, and with each version of Topspin.
    text = text.replace(engine.revision, "REVISION")
    return re.sub(r"app.kubernetes.io/version: .*", "app.kubernetes.io/version: VERSION", text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_rendered_as_it_was(name: str) -> None:
    assert text_of(name) == (GOLDEN / f"{name}.yaml").read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in EXAMPLES:
        (GOLDEN / f"{name}.yaml").write_text(text_of(name))
