"""A plan of `topspin plan` is served, with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.placement.command import main as plan
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.system.server import Server
from tests.system.test_serve import complete
from topspin.plan.file import read_plan

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


@pytest.mark.parametrize(
    "hosts", ["one machine", pytest.param("two devices", marks=pytest.mark.slow)]
)
def test_a_planned_engine_serves(tmp_path: Path, hosts: str) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")
    cluster, workload, output = (tmp_path / f"{name}.yaml" for name in ("c", "w", "plan"))
    cluster.write_text(f"hosts:\n- name: here\n{HOSTS[hosts]}\n{LINK}\n")
    workload.write_text(WORKLOAD)
    asked = ["--cluster", str(cluster), "--model", str(path), "--workload", str(workload)]
    assert plan([*asked, "-o", str(output)]) == 0
    planned = read_plan(str(output))
    assert planned.expected is not None
    expected = oracle_generate(path, PROMPTS, NUM_TOKENS).tokens
    with Server(path, tmp_path, plan=planned) as server:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert complete(server.url, prompt, max_tokens=NUM_TOKENS) == tokens
