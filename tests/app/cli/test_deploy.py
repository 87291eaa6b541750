"""`topspin deploy render`: what it writes, says and refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from app.cli.main import main
from deploy.services.contained import contained
from tests.checkpoints import make_checkpoint
from tests.deploy.kubernetes.renders import plan_named
from tests.gguf_files import write_gguf
from tests.structs import changed
from topspin.plan.file import read_plan

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


def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, Path]:
    """Return the file of a plan that `topspin serve --print-plan` gives, and its model's folder."""
    models = tmp_path / "models"
    models.mkdir()
    path = make_checkpoint(models / "tiny", "qwen3_moe")
    assert main(["serve", str(path), "--layout", "shared", *flags, "--print-plan"]) == 0
    file = tmp_path / "plan.yaml"
    file.write_text(capsys.readouterr().out)
    return str(file), models


@pytest.mark.parametrize("name", ["alone/tiny.gguf", "alone"])
def test_a_gguf_file_is_a_model_too(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own name, or by that of a folder with nothing else."""
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "alone").mkdir()
    write_gguf(make_checkpoint(tmp_path / "plain", "qwen3_moe"), tmp_path / "alone" / "tiny.gguf")
    assert main(["serve", str(tmp_path / name), "--layout", "shared", "--print-plan"]) == 0
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(capsys.readouterr().out)
    command = ["deploy", "render", "--plan", str(plan), "-o", str(out), "--cpus", "1"]
    assert main([*command, "--models", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "", "the memory is known: the model is"
    assert read_plan(str(out / "base" / "plan.yaml")).model.path == f"/topspin/models/{name}"


@pytest.mark.parametrize(("transport", "cores"), [("tcp", "3"), ("local", "4")])
def test_a_printed_plan_is_rendered_as_it_is(
    transport: str, cores: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, models = printed(tmp_path, capsys, "--transport", transport)
    out = tmp_path / "out"
    command = ["deploy", "render", "--plan", file, "-o", str(out)]
    assert main([*command, "--cpus", "3"]) == 2
    assert "give --models DIR, the folder above it" in capsys.readouterr().err
    assert main([*command, "--models", str(models)]) == 2
    assert "attention 0: num_threads null is every core of a host; give --cpus N" in (
        capsys.readouterr().err
    )
    assert main([*command, "--cpus", "3", "--models", str(models)]) == 0
    assert capsys.readouterr().err == "", "the memory is known: the model is"
    plan = read_plan(str(out / "base" / "plan.yaml"))
    assert plan.model.path == "/topspin/models/tiny"
    assert {node.num_threads for node in plan.nodes} == {3}
    workload = "engine" if transport == "local" else "expert"
    (found,) = yaml.safe_load_all((out / "base" / f"{workload}.yaml").read_text())
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == cores
    assert not [each for each in (out / "models").iterdir() if "Job" in each.read_text()]


def test_compose_has_the_folder_of_models_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, models = printed(tmp_path, capsys, "--transport", "tcp")
    out = tmp_path / "out"
    command = ["deploy", "render", "--plan", file, "-o", str(out), "--format", "compose"]
    assert main([*command, "--models", str(models)]) == 0
    composed = yaml.safe_load((out / "compose.yaml").read_text())
    mounts = {
        name: [each["source"] for each in own["volumes"] if each["target"] == "/topspin/models"]
        for name, own in composed["services"].items()
    }
    names = ("scheduler", "gateway", "attention-0", "expert-0")
    assert mounts == {name: [str(models)] for name in names}
    assert composed["volumes"] == {}


def test_the_default_model_is_where_pull_has_made_it(tmp_path: Path) -> None:
    made = tmp_path / "cache" / "models" / "smollm2-moe"
    made.mkdir(parents=True)
    shutil.copy(MODEL / "config.json", made)
    out = tmp_path / "out"
    models = ("--models", str(tmp_path / "cache"), "--format", "compose")
    assert render("kubernetes.yaml", "-o", str(out), *models) == 0
    services = yaml.safe_load((out / "compose.yaml").read_text())["services"]
    assert not [name for name in services if name.startswith("pull")]
    assert services["expert-0"]["mem_reservation"] > 0
    assert read_plan(str(out / "plan.yaml")).model.path == "smollm2-moe"


def test_a_draft_model_is_in_the_folder_too(tmp_path: Path) -> None:
    plan = plan_named("drafts, gpus")
    printed = changed(plan, {"speculation.model": str(tmp_path / "draft")})
    found = contained(printed, cpus=None, models=tmp_path)
    assert found.speculation is not None
    assert found.speculation.model == "/topspin/models/draft"
    assert found.model.path == plan.model.path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cpus", "2"), "--cpus 2: has no effect: the plan says how many threads or cores"),
        (("--cpus", "0"), "--cpus 0: give a number between 1 and 1024"),
        (("--models", "/nowhere"), "models/smollm2-moe"),
        (
            ("--models", "/x", "--model", str(MODEL)),
            "has no effect with --models",
        ),
    ],
)
def test_flags_that_change_nothing_are_refused(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render("kubernetes.yaml", "-o", str(tmp_path / "out"), *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, models = printed(tmp_path, capsys)
    command = ["deploy", "render", "--plan", file, "-o", str(tmp_path / "out"), "--cpus", "1"]
    for folder in (models / "tiny", tmp_path / "out"):
        assert main([*command, "--models", str(folder)]) == 2
        said = f"--models {folder}: the plan's model {models / 'tiny'} is not below that folder"
        assert said in capsys.readouterr().err


def test_a_plan_that_no_cluster_runs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render("laptop.yaml", "-o", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith("topspin deploy: error: attention 0: num_threads")
    assert not (tmp_path / "out").exists()
