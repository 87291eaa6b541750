"""A plan of `topspin plan` is served, with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.placement.command import main as plan
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.engine import Engine
from tests.system.rig.server import Server
from tests.system.test_serve import complete
from topspin.plan.file import read_plan
from topspin.plan.spec import EnginePlan

PROMPTS = [[5, 9, 200, 31], list(range(40, 70))]
NUM_TOKENS = 12
LINK = "  links: [{transport: shm, alpha_us: 5, gbps: 100}]"
HOSTS = {
    "one machine": "  devices: [{device: epyc-9354, cores: 2, memory: 4GiB}]",
    "two devices": (
        "  devices:\n  - {device: epyc-9354, cores: 1, memory: 4GiB}\n"
        "  - {device: epyc-9354, cores: 1, memory: 4GiB, slow: 1.5}"
    ),
}
WORKLOAD = "prompt: {mean: 20}\noutput: {mean: 12}\nusers: 4\nobjective: max_throughput\n"


def planned(directory: Path, path: Path, hosts: str) -> EnginePlan:
    cluster, workload, output = (directory / f"{name}.yaml" for name in ("c", "w", "plan"))
    cluster.write_text(f"hosts:\n- name: here\n{HOSTS[hosts]}\n{LINK}\n")
    workload.write_text(WORKLOAD)
    asked = ["--cluster", str(cluster), "--model", str(path), "--workload", str(workload)]
    assert plan([*asked, "-o", str(output)]) == 0
    found = read_plan(str(output))
    assert found.expected is not None
    return found


def test_a_planned_engine_serves(tmp_path: Path) -> None:
    """Its nodes are threads."""
    path = make_checkpoint(tmp_path / "model", "mixtral")
    with Engine(planned(tmp_path, path, "one machine")) as engine:
        found = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert found == oracle_generate(path, PROMPTS, NUM_TOKENS).tokens


@pytest.mark.slow
@pytest.mark.parametrize("hosts", HOSTS)
def test_processes_of_a_planned_engine_serve(tmp_path: Path, hosts: str) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")
    with Server(path, tmp_path, plan=planned(tmp_path, path, hosts)) as server:
        found = [complete(server.url, prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    assert found == oracle_generate(path, PROMPTS, NUM_TOKENS).tokens
