"""Failover in one process (nodes are threads): faults in frames, and a live node given up.

The live node that is declared dead is a real process, without a supervisor that would end it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from unittest import mock

import msgspec
import pytest

from kernels.cpu.compiled.matmul.linear import block_width
from kernels.cpu.compiled.program import Program
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.faults import OnDemand, faulty_nets, faulty_node
from tests.m2n_comm.faults import Change, Damage, Drop, Duplicate, Fault, Reorder
from tests.structs import changed, with_nodes
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.chaos import wait_until
from topspin.plan.spec import EnginePlan

slow = pytest.mark.slow
DEADLINE_S = 0.5
FAULTS: dict[str, Fault] = {
    "dropped": Drop(),
    "duplicated": Duplicate(),
    "reordered": Reorder(),
    "of another step": Change("step", 999),
    "of another life": Change("incarnation", 999),
    "of another table": Change("table_version", 999),
    "damaged": Damage(20),
}


def make_config(
    tiny: Tiny,
    transport: Literal["shm", "tcp"],
    *,
    deadline_s: float = DEADLINE_S,
    num_nodes: int = 1,
) -> EnginePlan:
    return engine_config(
        tiny.path,
        transport=transport,
        deadline_s=deadline_s,
        restart=True,
        restart_deadline_s=60.0,
        attention_nodes=num_nodes,
        expert_nodes=num_nodes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "transport"),
    [("attention", "tcp"), ("expert", "shm"), ("attention", "shm"), ("expert", "tcp")],
)
def test_every_fault_of_a_frame_is_recovered_from(
    tiny: Tiny, role: str, transport: Literal["shm", "tcp"]
) -> None:
    config = make_config(tiny, transport, num_nodes=2)
    with faulty_node(role, 0) as injector, Engine(config) as engine:
        for name, fault in FAULTS.items():
            disturb(engine, tiny, injector, fault, name)
        stats = engine.stats()
        assert stats.num_preemptions == 0
        assert stats.num_replays >= len(tiny.prompts)
    assert injector.num_injected == len(FAULTS)
    assert engine.dead == []
    # Over shared memory a duplicate is never read twice; all other faults are noticed.
    assert engine.states.count("recovering") >= len(FAULTS) - 2


def with_replicas(tiny: Tiny, config: EnginePlan) -> EnginePlan:
    """Return `config` with every expert on both nodes."""
    model = load_model_config(tiny.path)
    assert model.moe is not None
    plan = with_nodes(config, "expert", experts=model.moe.num_experts)
    return changed(plan, {"balance.interval_s": 0.0})


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=slow)])
def test_an_expert_node_with_live_replicas_is_done_without(
    tiny: Tiny, transport: Literal["shm", "tcp"]
) -> None:
    config = with_replicas(tiny, make_config(tiny, transport, num_nodes=2))
    with faulty_node("expert", 1) as injector, Engine(config) as engine:
        engine.may_restart.clear()
        disturb(engine, tiny, injector, RuntimeError("a bug"), "crash")
        assert "without expert 1" in engine.details
        # Once it can come back, it does, with its experts.
        engine.may_restart.set()
        engine.wait_until_whole()
        assert engine.generate(tiny.prompts, max_tokens=NUM_TOKENS) == tiny.tokens
        assert engine.stats().expert_table_version == 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@slow
def test_losses_while_the_expert_table_changes(
    tiny: Tiny, transport: Literal["shm", "tcp"]
) -> None:
    """Experts move all the time, frames are lost, and nodes crash, in turn."""
    injectors = {("expert", 1): OnDemand(), ("attention", 0): OnDemand()}
    config = make_config(tiny, transport, num_nodes=2)
    with (
        faulty_nets(lambda role, index: injectors.get((role, index))),
        Engine(config) as engine,
    ):
        balancer = engine.service.balancer

        def change_on() -> None:
            if not balancer.is_changing:
                table = engine.service.formation.table
                swapped = tuple(layer[::-1] for layer in table.slots)
                balancer.ask(msgspec.structs.replace(table, slots=swapped))

        faults: list[Fault | Exception] = [Drop(), RuntimeError("a bug")] * 2
        for number, fault in enumerate(faults):
            injector = list(injectors.values())[number // 2]
            disturb(engine, tiny, injector, fault, f"loss {number}", meanwhile=change_on)
        assert all(each.num_injected == 2 for each in injectors.values())
        assert engine.stats().expert_table_version > 4


def disturb(
    engine: Engine,
    tiny: Tiny,
    injector: OnDemand,
    fault: Fault | Exception,
    name: str,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Let `fault` happen in the middle of all requests; their outputs must not change."""
    ids = [engine.add(prompt, max_tokens=NUM_TOKENS, cache_salt=name) for prompt in tiny.prompts]

    def have(count: int) -> bool:
        meanwhile()
        return all(len(engine.requests[each].tokens) >= count for each in ids)

    engine.collect(until=lambda: have(4))
    injector.fault = fault
    engine.collect(until=lambda: have(NUM_TOKENS))
    assert [engine.requests[each].tokens for each in ids] == tiny.tokens, name
    assert all(engine.requests[each].failed is None for each in ids)


@contextmanager
def expert_process(engine: Engine, tiny: Tiny) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "expert_nodes", "--control", engine.address),
            *("--model", str(tiny.path), "--index", "0", "--transport", "shm"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.skipif(not block_width(), reason="oneDNN computes bf16 here, unrecorded")
def test_a_node_that_is_killed_inside_a_recorded_step(tmp_path: Path) -> None:
    prompts = [[7, 3, 9, 200, 4], [5], [100, 101, 102, 250]]
    tiny = Tiny(make_checkpoint(tmp_path, "mixtral", hidden_size=64, intermediate_size=64), [], [])
    config = engine_config(
        tiny.path,
        dtype="bfloat16",
        transport="shm",
        window_rows=64,
        restart=True,
        restart_deadline_s=60.0,
    )
    with (
        mock.patch.object(Program, "run", autospec=True, side_effect=Program.run) as run,
        Engine(config, external=("expert 0",)) as engine,
        expert_process(engine, tiny) as first,
    ):
        engine.wait_until_ready()
        expected = engine.generate(prompts, max_tokens=NUM_TOKENS)
        ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
        found = [engine.requests[each].tokens for each in ids]
        engine.collect(until=lambda: all(len(tokens) >= 6 for tokens in found))
        # Frozen first, so that the attention node is inside of the step when it is killed.
        os.kill(first.pid, signal.SIGSTOP)
        seen, num_runs, killed_s = len(engine.log), run.call_count, time.monotonic()
        first.kill()
        engine.collect(until=lambda: any("expert 0" in text for _, text in engine.log[seen:]))
        before = [list(tokens) for tokens in found]
        assert time.monotonic() - killed_s < 5
        # Steps of a size are recorded after the first ones, and sizes differ as requests come.
        assert num_runs > NUM_TOKENS // 2
        with expert_process(engine, tiny):
            engine.collect()
            assert [engine.requests[each].failed for each in ids] == [None] * len(ids)
            assert [len(tokens) for tokens in found] == [NUM_TOKENS] * len(ids)
            for early, whole in zip(before, expected, strict=True):
                assert early == whole[: len(early)]
            assert engine.generate(prompts, max_tokens=NUM_TOKENS) == expected
            assert run.call_count > num_runs + NUM_TOKENS // 2


@slow
def test_a_node_that_comes_back_from_the_dead_harms_nobody(tiny: Tiny) -> None:
    config = make_config(tiny, "shm", deadline_s=30.0)
    with (
        Engine(config, external=("expert 0",)) as engine,
        expert_process(engine, tiny) as zombie,
    ):
        engine.wait_until_ready()
        ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in tiny.prompts]
        engine.collect(until=lambda: all(engine.requests[each].tokens for each in ids))
        os.kill(zombie.pid, signal.SIGSTOP)
        engine.collect(until=lambda: engine.state.state == "recovering")
        wait_until(lambda: engine.dead == [zombie.pid], "not taken for dead")
        with expert_process(engine, tiny):
            engine.wait_until_ready()
            # It wakes in the middle of a step of a past generation.
            os.kill(zombie.pid, signal.SIGCONT)
            engine.collect()
            assert [engine.requests[each].tokens for each in ids] == tiny.tokens
            _, log = zombie.communicate(timeout=20)
            assert zombie.returncode == 1
            assert "closed the control connection" in log or "refused" in log
            assert engine.generate(tiny.prompts, max_tokens=NUM_TOKENS) == tiny.tokens
            assert engine.dead == [zombie.pid]
