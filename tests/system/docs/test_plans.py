"""Every example plan starts as it is, but for the model, and answers as one node of each does.

By default the nodes of one plan are threads; as processes all plans start with the slow tests.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine import Engine
from tests.structs import changed, one_of_each
from tests.system.rig.server import Server
from tests.system.test_serve import complete
from topspin.plan.file import print_plan, read_plan
from topspin.plan.spec import EnginePlan

PLANS = Path(__file__).parents[3] / "docs" / "plans"
PROMPTS = [[5 + 31 * number, 9, 200 - 17 * number] for number in range(4)]
NUM_TOKENS = 8
# Of the best log-probability: what sums in another order change, and codes rounded otherwise.
MARGIN, QUANTISED_MARGIN = 1e-3, 0.3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with as many layers, experts and positions as the plans' model."""
    return make_checkpoint(
        tmp_path_factory.mktemp("sixteen"),
        "mixtral",
        num_hidden_layers=30,
        num_local_experts=16,
        max_position_embeddings=8192,
    )


def on(plan: EnginePlan, checkpoint: Path) -> EnginePlan:
    """Return `plan` for the test's model, in fp32."""
    link = msgspec.structs.replace(plan.link, payload="fp32")
    fields = {"model.path": str(checkpoint), "model.dtype": "float32", "links": (link,)}
    return changed(plan, fields)


def expected_of(plan: EnginePlan) -> list[list[int]]:
    """Return the clear tokens of one node of each role, by prompt."""
    with Engine(one_of_each(plan, num_experts=16)) as engine:
        margin = QUANTISED_MARGIN if plan.precision else MARGIN
        expected = engine.clear_tokens(PROMPTS, max_tokens=NUM_TOKENS, margin=margin)
    assert sum(map(len, expected)) > len(PROMPTS)
    return expected


@pytest.mark.slow
def test_the_plan_of_every_kind_of_difference_answers(checkpoint: Path) -> None:
    plan = on(read_plan(str(PLANS / "unequal.yaml")), checkpoint)
    expected = expected_of(plan)
    with Engine(plan) as engine:
        answers = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer[: len(tokens)] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted(PLANS.glob("*.yaml"))])
def test_an_example_plan_starts_and_answers(name: str, checkpoint: Path, tmp_path: Path) -> None:
    plan = on(read_plan(str(PLANS / f"{name}.yaml")), checkpoint)
    expected = expected_of(plan)
    with Server(checkpoint, tmp_path, plan=plan) as server:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = complete(server.url, prompt, max_tokens=NUM_TOKENS)
            assert answer[: len(tokens)] == tokens


def test_the_examples_are_printed_plans() -> None:
    """A user who prints one gets the same lines, without the comment."""
    for path in PLANS.glob("*.yaml"):
        lines = path.read_text().splitlines(keepends=True)
        text = "".join(line for line in lines if not line.startswith("#"))
        assert print_plan(read_plan(str(path))) == text, path
