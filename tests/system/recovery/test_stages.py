"""Stages as real processes of `topspin serve --plan`: streams go on whatever process is killed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from app.cli.main import main as topspin
from deploy.placement.devices import save_profile
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.deploy.placement import samples
from tests.engine import engine_config
from tests.identity.layouts.test_stages import staged
from tests.system.rig import chaos
from tests.system.rig.chaos import Streams, check_identical, wait_until, wait_until_whole
from tests.system.rig.server import Server
from topspin.plan.file import read_plan

NUM_TOKENS = 60
MIN_MARGIN = 5e-4


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "num_attention"), [("shm", 1), ("tcp", 2)])
def test_streams_survive_the_end_of_each_process(
    tmp_path: Path, transport: str, num_attention: int
) -> None:
    path = make_checkpoint(tmp_path, "qwen2_moe")
    prompts = [[5, 9, 200, 31, 77], list(range(40, 70)), [(7 * i) % 250 for i in range(150)]]
    result = oracle_generate(path, prompts, NUM_TOKENS)
    assert min(result.margins) >= MIN_MARGIN, min(result.margins)
    plan = engine_config(
        path,
        transport=transport,  # type: ignore[arg-type]
        attention_nodes=num_attention,
        expert_nodes=2,
        micro_batches=2,
        # A step takes about 20 ms, so that a loss falls into the middle of one.
        latency_us=2000.0,
        restart=True,
    )
    plan = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, path=str(path)))
    with Server(path, tmp_path, plan=staged(plan, 1, 3, 4)) as server:
        for role in ("stage 0", "attention 0", "scheduler", "stage 1"):
            told = "scheduler was killed" if role == "scheduler" else f"lost {role}"
            seen = len(server.output)
            streams = Streams(server.url, prompts, NUM_TOKENS)
            streams.wait_for_events(12)
            chaos.kill(server, role)
            wait_until(lambda: told in server.output[seen:], "not noticed")  # noqa: B023
            check_identical(streams.join(), result.tokens)
            wait_until_whole(server)
        streams = Streams(server.url, prompts, NUM_TOKENS)
        streams.wait_for_events(12)
        chaos.stop_and_continue(server, "stage 1")
        check_identical(streams.join(), result.tokens)
        wait_until_whole(server)


@pytest.mark.slow
def test_a_planned_cut_is_served(tmp_path: Path) -> None:
    """`topspin plan` cuts a model that fits no single CPU; the plan gives the oracle's tokens."""
    path = make_checkpoint(tmp_path, "llama")
    prompts = [[5, 9, 200, 31, 77], list(range(40, 70))]
    result = oracle_generate(path, prompts, NUM_TOKENS)
    assert min(result.margins) >= MIN_MARGIN, min(result.margins)
    save_profile(samples.cpu(cores=1), tmp_path / "cpu.json")
    host = {
        "name": "box",
        "devices": [{"device": "cpu.json", "count": 2, "memory": "921KiB"}],
        "links": [{"transport": "shm", "alpha_us": 20, "gbps": 100}],
    }
    asked = {
        "prompt": {"mean": 60, "p95": 100},
        "output": {"mean": 40, "p95": 60},
        "users": 2,
        "max_model_len": 256,
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"hosts": [host]}))
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(asked))
    files = ["--cluster", str(tmp_path / "cluster.yaml"), "--model", str(path)]
    files += ["--workload", str(tmp_path / "workload.yaml"), "-o", str(tmp_path / "plan.yaml")]
    assert topspin(["plan", *files]) == 0
    plan = read_plan(str(tmp_path / "plan.yaml"))
    assert [node.layers for node in plan.nodes] == [(0, 1), (1, 2)]
    # The cores of this machine are not counted here: nodes share them.
    nodes = [msgspec.structs.replace(node, cores=(), wait="block") for node in plan.nodes]
    plan = msgspec.structs.replace(plan, nodes=tuple(nodes))
    with Server(path, tmp_path, plan=plan) as server:
        check_identical(Streams(server.url, prompts, NUM_TOKENS).join(), result.tokens)
