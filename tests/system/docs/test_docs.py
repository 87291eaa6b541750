"""The commands of README and docs, run as they stand there.

Owns the list of all blocks of commands, and who runs each. What a reader has to fill in (a model, a
folder) is filled in, ports are free ones, and the default model is a tiny one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.deploy.quantisation.sources import planted
from tests.system.conftest import Tiny
from tests.system.rig.server import Server, is_running
from tests.test_docs import PAGES, ROOT, blocks

CLUSTER = "needs a cluster"
BY_HAND = "make serve and make test: .ci/run runs the second, and people the first"
QUICK_START = "tests.system.docs.test_quickstart.test_the_quick_start_works"
BEFORE_A_CLUSTER = "tests.test_docs.test_the_steps_before_a_cluster_run"
RUN_BY: dict[str, tuple[str, ...]] = {
    "README.md": (BY_HAND, *2 * (QUICK_START,)),
    "agents.md": (
        "test_a_context_for_agents",
        "tests.clients.test_agents.test_an_agent_answers_twice",
    ),
    "first_change.md": 6 * ("test_a_first_change",),
    "hosts.md": 2 * ("test_the_processes_of_an_engine_started_by_hand",),
    "kubernetes.md": (
        CLUSTER,
        *3 * (BEFORE_A_CLUSTER,),
        *3 * (CLUSTER,),
        BEFORE_A_CLUSTER,
        CLUSTER,
    ),
    "long_contexts.md": ("test_a_longer_context",),
    "planner.md": ("test_a_plan_is_searched_and_served",),
    "plans.md": ("test_a_plan_is_printed_and_served",),
    "quantisation.md": 2 * ("test_checkpoints_are_quantised",),
    "quickstart.md": (
        BY_HAND,
        *3 * (QUICK_START,),
        "test_other_models_and_layouts",
    ),
    "runbook.md": ("test_dashboard_and_alerts_are_written",),
    "troubleshooting.md": ("test_facts_for_a_report",),
}
"""Who runs each block of commands, in the order of the page."""


def commands_of(page: str) -> list[tuple[str, str]]:
    """Return the blocks of commands of a page, with their info strings."""
    (path,) = (each for each in PAGES if each.name == page)
    return [
        (info, text)
        for info, text in blocks(path)
        if info.split()[:1] in (["sh"], ["bash"], ["python"]) or text.startswith("topspin ")
    ]


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_somebody_runs_every_block(page: str) -> None:
    found = commands_of(page)
    named = RUN_BY.get(page, ())
    assert len(found) == len(named), [text for _, text in found]
    for (info, _), name in zip(found, named, strict=True):
        assert (info == "sh cluster") == (name == CLUSTER)
    check_there_are({*named} - {CLUSTER, BY_HAND}, __name__)


def check_there_are(tests: Iterable[str], module: str) -> None:
    """Fail if a test does not exist: one of `module`, or with the name of its own."""
    for each in tests:
        where, _, name = each.rpartition(".")
        assert hasattr(importlib.import_module(where or module), name), each


def filled(text: str, **values: object) -> str:
    """Return a block with words replaced."""
    for word, value in values.items():
        assert re.search(rf"\b{word}\b", text), word
        text = re.sub(rf"\b{word}\b", str(value), text)
    return text


def run(text: str, directory: Path) -> str:
    """Run a block; returns what it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=directory,
        # The ARGS of a make that runs these tests are pytest's, not those of a make in a block.
        env={**os.environ, "PATH": path, "ARGS": "", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


class Documented(Server):
    """A documented `topspin serve`; ends by SIGTERM."""

    def __init__(self, command: str, directory: Path) -> None:
        words = shlex.split(command.removeprefix("topspin "))
        if "--port" not in words:
            words += ["--port", "0"]
        self._start(directory, ["topspin", *words], cwd=directory)


def answers(url: str, **headers: str) -> None:
    """Fail unless a server answers a completion."""
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        asked = {"model": model, "prompt": [5, 9, 200], "max_tokens": 2, "ignore_eos": True}
        answer = client.post("/v1/completions", json=asked)
        assert answer.json()["usage"]["completion_tokens"] == 2, answer.text


def serve(command: str, directory: Path) -> None:
    with Documented(command, directory) as server:
        answers(server.url)


@pytest.mark.slow
def test_dashboard_and_alerts_are_written(tmp_path: Path) -> None:
    ((_, text),) = commands_of("runbook.md")
    run(text, tmp_path)
    assert json.loads((tmp_path / "dashboard.json").read_text())["panels"]
    assert "TopspinEngineDown" in (tmp_path / "alerts.yaml").read_text()


@pytest.mark.slow
def test_facts_for_a_report(tmp_path: Path) -> None:
    ((_, text),) = commands_of("troubleshooting.md")
    assert "torch" in run(text, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_first_change(tmp_path: Path) -> None:
    """The page's tests pass, fail for the reason that it names, and pass, in a copy."""
    copy = tmp_path / "topspin"
    left_out = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / ".venv").symlink_to(Path(sys.executable).parents[1])
    run("git init -q; git add .; git -c user.name=a -c user.email=a@b commit -qm a", copy)
    tests, *changes, back = [text for _, text in commands_of("first_change.md")]
    again = f"{tests.strip()} -k temperature 2>&1 || true"
    assert " passed" in run(tests, copy)
    failures = []
    for change in changes:
        run(change, copy)
        failures.append(sorted(set(re.findall(r"FAILED .*::(\w+)", run(again, copy)))))
    cold, low = "test_a_temperature_below_a_hundredth_is_greedy", "test_a_low_temperature_is_nearly"
    assert failures == [[cold], [], [f"{low}_greedy"], []]
    run(back, copy)
    assert run("git status --porcelain --untracked-files=no", copy) == ""


@pytest.mark.slow
def test_a_plan_is_printed_and_served(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.path, tmp_path / "smollm2-moe")
    ((_, text),) = commands_of("plans.md")
    text = text.replace("serve smollm2-moe", "serve ./smollm2-moe").replace("8000", "0")
    first, second = text.strip().splitlines()
    run(first, tmp_path)
    serve(second, tmp_path)


@pytest.mark.slow
def test_other_models_and_layouts(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.path, tmp_path / "smollm2-moe")
    _, text = commands_of("quickstart.md")[-1]
    text = text.replace("smollm2-moe", "./smollm2-moe").replace("9000", "0")
    *served, printed = filled(text, MODEL_DIR=tiny.path).strip().splitlines()
    assert len(served) == 3
    for command in served:
        serve(command, tmp_path)
    assert "role: expert" in run(printed, tmp_path)


@pytest.mark.slow
def test_a_context_for_agents(tmp_path: Path) -> None:
    """make says what it would run: what it needs is installed already."""
    model = make_checkpoint(
        tmp_path / "model", "qwen3_moe", head_dim=64, max_position_embeddings=8192
    )
    _, text = commands_of("agents.md")[0]
    said = run(text.replace("make", f"make -n --no-print-directory -C {ROOT}"), tmp_path)
    started = re.search(r"^exec \S+/(topspin serve .*)$", said, flags=re.MULTILINE)
    assert started is not None
    with Documented(filled(started[1], **{"smollm2-moe": model}), tmp_path) as server:
        answers(server.url)
        served = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert served["max_model_len"] == 32768


@pytest.mark.slow
def test_a_longer_context(tmp_path: Path) -> None:
    model = make_checkpoint(
        tmp_path / "model", "qwen3_moe", head_dim=64, max_position_embeddings=8192
    )
    ((_, text),) = commands_of("long_contexts.md")
    with Documented(filled(text, MODEL=model), tmp_path) as server:
        answers(server.url)
        served = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert served["max_model_len"] == 32768


@pytest.mark.slow
def test_a_plan_is_searched_and_served(tmp_path: Path) -> None:
    """For the example that any machine can serve."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=2048)
    ((_, text),) = commands_of("planner.md")
    text = filled(text.replace("8xh200", "laptop"), DIR=model).replace("\\\n", " ")
    searched, served = text.strip().splitlines()
    run(searched.replace("docs/", f"{ROOT}/docs/"), tmp_path)
    serve(served, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_are_quantised(tmp_path: Path) -> None:
    model = planted(tmp_path / "model")
    run(f"topspin serve {model} --quantization int8 --print-plan > plan.yaml", tmp_path)
    (_, forms), (_, measured) = commands_of("quantisation.md")
    commands = [*forms.strip().splitlines(), *measured.strip().splitlines()]
    assert len(commands) == 6
    for number, command in enumerate(commands):
        out = tmp_path / f"out-{number}"
        run(command.replace("MODEL", str(model)).replace("-o DIR", f"-o {out}"), tmp_path)
        if "quantize" in command:
            config = json.loads((out / "config.json").read_text())
            assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def free_port() -> int:
    """Return a port that nobody has: a plan names it before it is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def processes(commands: Sequence[str], directory: Path) -> list[subprocess.Popen[bytes]]:
    started = []
    for command in commands:
        argv = [sys.executable, "-m", *command.split()]
        with (directory / f"{len(started)}.log").open("w") as log:
            started.append(subprocess.Popen(argv, cwd=directory, stdout=log, stderr=log))
    return started


@pytest.mark.slow
def test_the_processes_of_an_engine_started_by_hand(tiny: Tiny, tmp_path: Path) -> None:
    """All on one host, with keys; the page's `network` and an API key are added."""
    flags = "--restart on --transport tcp --kv-cache-memory 8MiB --layout shared --num-threads 1"
    run(f"topspin serve {tiny.path} {flags} --print-plan > plan.yaml", tmp_path)
    with (tmp_path / "plan.yaml").open("a") as plan:
        plan.write(f"network:\n  control: tcp://127.0.0.1:{free_port()}\n")
    (tmp_path / "api-keys").write_text("me: a-key-of-the-tests-1234\n")
    (tmp_path / "api-keys").chmod(0o440)
    (_, started), (_, keys) = commands_of("hosts.md")
    run(keys, tmp_path)
    port = free_port()
    *others, gateway = started.strip().splitlines()
    running = processes([*others, f"{gateway} --port {port}"], tmp_path)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(url, running)
        answers(url, authorization="Bearer a-key-of-the-tests-1234")
        # Gateway, nodes, and then the scheduler, which nodes need to leave.
        for each in (running[-1], *running[1:-1], running[0]):
            each.send_signal(signal.SIGTERM)
            assert each.wait(30) == 0, each.args
    finally:
        for each in running:
            each.kill()
            each.wait()


def wait_for_health(url: str, running: Sequence[subprocess.Popen[bytes]]) -> None:
    while True:
        assert all(is_running(each.pid) for each in running)
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(0.1)
