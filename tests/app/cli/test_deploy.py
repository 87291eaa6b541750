"""`topspin deploy render`: what it writes, says and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.main import main

PLANS = Path(__file__).parents[3] / "docs" / "plans"
MODEL = Path(__file__).parents[2] / "deploy" / "placement" / "models" / "smollm2-moe"


def render(plan: str, *arguments: str) -> int:
    return main(["deploy", "render", "--plan", str(PLANS / plan), *arguments])


def test_a_second_call_replaces_what_the_first_has_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert render("kubernetes.yaml", "-o", str(out)) == 0
    key = out / "secrets" / "keys" / "expert" / "expert.secret"
    key.parent.mkdir(parents=True)
    key.write_text("kept")
    assert (out / "base" / "attention.yaml").exists()
    assert render("unequal.yaml", "-o", str(out), "--model", str(MODEL)) == 0
    assert not (out / "base" / "attention.yaml").exists()
    assert (out / "base" / "nodes.yaml").exists()
    assert key.read_text() == "kept"


def test_a_folder_of_others_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    assert render("kubernetes.yaml", "-o", str(tmp_path)) == 2
    assert "is not empty, and was not written by this command" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["notes"]


def test_memory_is_asked_for_where_the_model_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path / "cache"))
    nodes = tmp_path / "out" / "base" / "expert.yaml"
    assert render("kubernetes.yaml", "-o", str(tmp_path / "out")) == 0
    assert "smollm2-moe is not on this host, so nodes ask for no memory" in capsys.readouterr().err
    assert "memory: " not in nodes.read_text()
    assert render("kubernetes.yaml", "-o", str(tmp_path / "out"), "--model", str(MODEL)) == 0
    assert capsys.readouterr().err == ""
    assert "memory: " in nodes.read_text()


def test_compose_is_another_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render("unequal.yaml", "-o", str(tmp_path), "--format", "compose") == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        *("compose.yaml", "plan.yaml", ".topspin-deploy")
    }


@pytest.mark.parametrize(
    "flag", [("--gateways", "3"), ("--prometheus", "http://p"), ("--rdma-resource", "rdma/ib")]
)
def test_what_a_compose_file_has_no_place_for_is_refused(
    flag: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert render("kubernetes.yaml", "-o", str(out), "--format", "compose", *flag) == 2
    assert f"{flag[0]}: has no effect with --format compose" in capsys.readouterr().err
    assert not out.exists()


def test_a_plan_that_no_cluster_runs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render("laptop.yaml", "-o", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith("topspin deploy: error: attention 0: num_threads")
    assert not (tmp_path / "out").exists()
