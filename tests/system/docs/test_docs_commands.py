"""Commands inside the text of README and docs, run as they stand there.

Owns the list of all commands of ours in backticks or indented lines, and who runs each. Blocks of
commands are those of `test_docs` in this folder; `kubectl` and `docker` need a cluster or a
container engine by themselves.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from app.cli.main import main
from tests.checkpoints import make_checkpoint
from tests.server.gateway.operations.collector import collector
from tests.system.conftest import Tiny
from tests.system.docs.test_docs import (
    CLUSTER,
    QUICK_START,
    Documented,
    answers,
    check_there_are,
    commands_of,
    filled,
    run,
    serve,
)
from tests.system.rig.server import Server
from tests.system.rig.streams import NUM_STREAMS, Load
from tests.test_docs import OTHERS, PAGES, ROOT, TARGETS, blocks, words_of

FLAGS_OF_MAKE = (
    'make serve ARGS="--attention-nodes 2 --expert-nodes 2 --micro-batches 2 --transport tcp"'
)
LOAD = "topspin bench serve --url http://127.0.0.1:8000 --max-concurrency 16"
SWEEP = "topspin bench sweep --capacity-factors 1,2,5 --goodput ttft:2000 tpot:200"
TRACE = "topspin trace --seconds 2 -o trace.json"
PICTURE = f"{TRACE} --png rally.png"
LOSS = "topspin bench quantization MODEL"
STEP = "topspin bench step DIR --context 8000"
PRINT = "topspin serve DIR --max-num-seqs 2 --layout shared --print-plan > plan.yaml"
INTERPRET = "TRITON_INTERPRET=1 topspin serve --plan plan.yaml"
ROTATE = "topspin keys keys --rotate add"
IN_4_BITS = "topspin serve DIR --quantization int4"
COLLECT = "topspin serve smollm2-moe --otlp-traces-endpoint http://localhost:4318/v1/traces"

RUN_BY: dict[str, dict[str, str]] = {
    "README.md": {
        FLAGS_OF_MAKE: "test_flags_reach_serve_through_make",
        "topspin serve DIR": "tests.system.docs.test_docs.test_other_models_and_layouts",
    },
    "agents.md": {
        "topspin serve MODEL": "tests.system.docs.test_docs.test_other_models_and_layouts"
    },
    "architecture.md": {PICTURE: "test_load_and_traces_of_a_server"},
    "gpus.md": {
        PRINT: "test_the_code_path_of_gpus_without_one",
        INTERPRET: "test_the_code_path_of_gpus_without_one",
    },
    "hosts.md": {
        ROTATE: "test_keys_are_rotated",
        "topspin probe FILE": (
            "tests.system.test_hosts.test_two_by_two_nodes_with_keys_give_transformers_tokens"
        ),
    },
    "kubernetes.md": {"topspin probe FILE": CLUSTER},
    "load_testing.md": {
        LOAD: "test_load_and_traces_of_a_server",
        SWEEP: ("tests.benchmarks.load.test_sweep.test_factors_of_the_capacity_that_was_measured"),
    },
    "models.md": {
        STEP: "tests.benchmarks.kernels.test_step.test_every_op_and_the_bytes_of_its_weights",
        LOSS: "test_the_loss_of_quantisation_is_measured",
        "topspin models DIR": "tests.app.cli.test_models.test_the_facts_of_a_checkpoint",
        "topspin pull smollm2-moe": QUICK_START,
    },
    "plans.md": {
        "topspin quantize MODEL --bits 4 -o DIR": (
            "tests.system.docs.test_docs.test_checkpoints_are_quantised"
        ),
    },
    "quantisation.md": {
        IN_4_BITS: "test_a_checkpoint_is_quantised_while_it_is_loaded",
        "topspin serve DIR": "tests.system.docs.test_docs.test_other_models_and_layouts",
    },
    "runbook.md": {TRACE: "test_load_and_traces_of_a_server"},
    "tracing.md": {COLLECT: "test_spans_reach_a_collector"},
}
"""Who runs each command that has arguments, by page."""


def commands_in_text(page: Path) -> set[str]:
    """Return the commands of `topspin`, `make` and `curl` outside blocks, each as one line."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"(?<!`)`((?:[^`\\]|\\.)+)`", text)
    indented = re.findall(r"^ {4,}(\S.*)$", text, flags=re.MULTILINE)
    found = (" ".join(each.split()) for each in (*quoted, *indented))
    return {each for each in found if re.match(r"(\w+=\S* )*(\S+/)?(topspin|make|curl) \S", each)}


def name_of(command: str) -> list[str] | None:
    """Return the words of a command that is only named, such as `topspin keys --rotate`."""
    program, *words = words_of(command) or [""]
    if program == "make":
        return [program, *words] if TARGETS.issuperset(words) else None
    num_names = 2 if words[:1] in (["bench"], ["deploy"]) else 1
    is_name = all(word.startswith("--") and "=" not in word for word in words[num_names:])
    return [program, *words] if is_name and program.endswith("topspin") else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_somebody_runs_every_command_of_the_text(page: Path) -> None:
    found = {each for each in commands_in_text(page) if name_of(each) is None}
    assert found == set(RUN_BY.get(page.name, {}))


def test_those_who_run_them_exist() -> None:
    assert RUN_BY.keys() <= {page.name for page in PAGES}
    named = {name for page in RUN_BY.values() for name in page.values()}
    check_there_are(named - {CLUSTER}, __name__)


NAMES = {
    tuple(name[1:])
    for page in PAGES
    for name in map(name_of, commands_in_text(page))
    if name is not None and name[0] != "make"
}


@pytest.mark.parametrize("words", sorted(NAMES), ids=" ".join)
def test_a_name_is_that_of_a_command_and_its_flags(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [word for word in words if not word.startswith("-")]
    with pytest.raises(SystemExit) as status:
        main([*names, "--help"])
    assert status.value.code == 0
    shown = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert shown >= set(words) - set(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_blocks_hold_no_command(page: Path) -> None:
    """A block without an info string, or with another one, would be run by nobody."""
    programs = "|".join(["topspin", "make", "python", *sorted(OTHERS)])
    for block in blocks(page):
        if block not in commands_of(page.name):
            assert not re.search(rf"^\W*({programs}) ", block[1], flags=re.MULTILINE), block[1]


def test_extras_to_install_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"\.\[(\w+)\]", page.read_text())}
    assert named
    assert named <= set(importlib.metadata.metadata("topspin").get_all("Provides-Extra") or ())


def test_keys_are_rotated(tmp_path: Path) -> None:
    """By the steps that the page names, one after the other."""
    _, (_, make) = commands_of("hosts.md")
    run(filled(make, **{"plan.yaml": ROOT / "docs" / "plans" / "laptop.yaml"}), tmp_path)
    secret = tmp_path / "keys" / "expert" / "expert.secret"
    before = secret.read_text()
    page = (ROOT / "docs" / "hosts.md").read_text()
    then = re.search(rf"`{ROTATE}`, then `(\w+)`, then `(\w+)`", page)
    assert then is not None
    for step in ("add", *then.groups()):
        run(filled(ROTATE, add=step), tmp_path)
    assert secret.read_text() != before
    assert not list(tmp_path.glob("keys/*/*.next"))


@pytest.mark.slow
def test_load_and_traces_of_a_server(tiny: Tiny, tmp_path: Path) -> None:
    """Prompts are fewer than the 1,000 by default; the model is `tiny` with more positions."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=2048)
    with Server(model, tmp_path, "--kv-cache-memory", "64MiB") as server:
        port = server.url.rpartition(":")[2]
        load = run(filled(f"{LOAD} --num-prompts 32", **{"8000": port}), tmp_path)
        assert re.search(r"Successful requests\D+32\b", load)
        with Load([server.url], tiny) as requests:
            for name, command in (("trace.json", TRACE), ("rally.png", PICTURE)):
                requests.wait_for(NUM_STREAMS)
                command = command.replace("topspin trace", f"topspin trace --url {server.url}")
                run(command, tmp_path)
                assert (tmp_path / name).stat().st_size > 10_000
        assert requests.wrong == []


@pytest.mark.slow
def test_flags_reach_serve_through_make(tiny: Tiny, tmp_path: Path) -> None:
    """make says what it would run: what it needs is installed already."""
    assert FLAGS_OF_MAKE.startswith("make serve ")
    command = FLAGS_OF_MAKE.replace("make", f"make -n --no-print-directory -C {ROOT}", 1)
    *_, last = run(command, tmp_path).splitlines()
    started = re.fullmatch(r"exec \S+/(topspin serve .*)", last)
    assert started is not None
    with Documented(filled(started[1], **{"smollm2-moe": tiny.path}), tmp_path) as server:
        answers(server.url)
        assert {"attention 1", "expert 1"} <= server.pids.keys()


@pytest.mark.slow
def test_a_checkpoint_is_quantised_while_it_is_loaded(tiny: Tiny, tmp_path: Path) -> None:
    serve(filled(IN_4_BITS, DIR=tiny.path), tmp_path)


@pytest.mark.slow
def test_spans_reach_a_collector(tiny: Tiny, tmp_path: Path) -> None:
    with collector() as found:
        command = COLLECT.replace("http://localhost:4318/v1/traces", found.url)
        serve(filled(command, **{"smollm2-moe": tiny.path}), tmp_path)
        assert any(span.name.startswith("text_completion ") for span in found.receive().spans)


@pytest.mark.slow
def test_the_code_path_of_gpus_without_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(filled(PRINT, DIR=tiny.path), tmp_path)
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan.read_text().replace("kernels: cpu", "kernels: triton"))
    assert plan.read_text().count("kernels: triton") == 2
    setting, _, command = INTERPRET.partition(" ")
    monkeypatch.setenv(*setting.split("="))
    serve(command, tmp_path)


@pytest.mark.slow
def test_the_loss_of_quantisation_is_measured(tmp_path: Path) -> None:
    """Without writing to the folder of results, which is the repository's."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=2048)
    printed = run(filled(f"{LOSS} --no-write", MODEL=model), tmp_path)
    assert {"bf16", "kv-fp8", "int8", "int4"} <= set(printed.split())
