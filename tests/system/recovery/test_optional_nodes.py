"""Processes of an engine that join late, and leave on SIGTERM, under load."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.engine import engine_config
from tests.structs import changed
from tests.system.conftest import Tiny
from tests.system.rig.server import Server
from tests.system.rig.streams import DEADLINE_S, NUM_STREAMS, Load
from topspin.plan.spec import EnginePlan

NUM_EXPERTS = 8


def plan_of(tiny: Tiny) -> EnginePlan:
    """Return a plan of one node of each role, and another one of each that is optional."""
    plan = engine_config(
        tiny.path,
        attention_nodes=2,
        expert_nodes=2,
        transport="shm",
        max_num_seqs=NUM_STREAMS // 2,
        restart=True,
        restart_deadline_s=60.0,
        redundant_experts=NUM_EXPERTS,
    )
    nodes = tuple(changed(node, {"optional": node.index == 1}) for node in plan.nodes)
    return changed(plan, {"nodes": nodes})


def wait_for(server: Server, text: str, *, after: int = 0) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while text not in server.output[after:]:
        assert time.monotonic() < end_s, f"no {text!r} in {server.output}"
        time.sleep(0.02)


@pytest.mark.slow
def test_nodes_join_and_leave_under_load(tiny: Tiny, tmp_path: Path) -> None:
    with Server(tiny.path, tmp_path, plan=plan_of(tiny)) as server:
        with Load([server.url], tiny) as load:
            for name in ("expert 1", "attention 1"):
                wait_for(server, f"{name} has loaded")
            load.wait_for(4 * NUM_STREAMS)
            # Optional ones leave for good.
            for name in ("expert 1", "attention 1"):
                os.kill(server.pids[name], signal.SIGTERM)
                wait_for(server, f"topspin: {name} has left")
                load.wait_for(NUM_STREAMS)
            # The others are waited for.
            for name in ("expert 0", "attention 0"):
                seen = len(server.output)
                os.kill(server.pids[name], signal.SIGTERM)
                wait_for(server, f"{name} exited with status 0; it is started again", after=seen)
                load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []
        assert "taken for dead" not in server.output
        server.pids = server.pids_by_role()
        assert sorted(server.pids) == ["attention 0", "expert 0", "gateway", "scheduler"]
