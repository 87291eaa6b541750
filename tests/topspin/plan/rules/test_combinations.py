"""The table of what does not go together: every row refuses, at the start, with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import serve as serve_command
from app.cli.main import main
from tests.app.cli.checkpoint import write_checkpoint
from tests.structs import changed
from tests.topspin.plan.given import GIVERS, given
from tests.topspin.plans import FACTS, plan
from topspin.plan.file import print_plan
from topspin.plan.rules.combinations import CONFLICTS, Conflict, conflicts_in, print_page
from topspin.plan.rules.features import CONDITIONS, FEATURES


def test_the_page_is_the_table() -> None:
    page = Path(__file__).parents[4] / "docs" / "combinations.md"
    assert page.read_text(encoding="utf-8") == print_page()


def test_names_are_those_of_features_and_conditions() -> None:
    named = {name for row in CONFLICTS for name in (row.this, row.other)}
    assert CONDITIONS.keys() <= named <= CONDITIONS.keys() | FEATURES.keys()
    assert not CONDITIONS.keys() & FEATURES.keys()
    assert GIVERS.keys() == CONDITIONS.keys() | FEATURES.keys()


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.this} + {row.other}")
def test_both_are_refused_before_a_process_is_started(
    row: Conflict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By this row alone: one of the two by itself, or with other features, is served."""
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    path = write_checkpoint(tmp_path / "tiny")
    base = changed(plan(restart=False, num_threads=1), {"model.path": str(path)})
    made = given(base, FACTS, (row.this, row.other))
    assert {met for met, _ in conflicts_in(made)} == {row}
    file = tmp_path / "plan.yaml"
    file.write_text(print_plan(made))
    assert main(["serve", "--plan", str(file)]) == 2
    place = conflicts_in(made)[0][1].removesuffix(row.why)
    assert capsys.readouterr().err == f"topspin serve: error: --plan {file}: {place}{row.why}\n"
    assert "; " in row.why
