"""The commands of an engine's roles: modules, arguments, descriptors and environments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.launch.child_process import RoleCommand
from app.launch.commands import node_commands, spare_commands
from app.launch.engine import role_commands
from tests.app.launch.engines import context_of, engine
from tests.app.launch.roles import ROOT
from tests.structs import changed
from topspin.cores import CORES_VARIABLE
from topspin.plan.spec import ServeConfig

NODE = ("--control", "ipc://@c", "--model", "/models/it's tiny")


def commands_of(config: ServeConfig) -> dict[str, RoleCommand]:
    """Return the commands of an engine by name; each runs a module by this Python."""
    commands = {command.name: command for command in role_commands(context_of(config))}
    assert all(each.argv[:3] == (sys.executable, "-P", "-m") for each in commands.values())
    return commands


def arguments_of(config: ServeConfig) -> dict[str, tuple[str, ...]]:
    return {name: command.argv[3:] for name, command in commands_of(config).items()}


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_separate_nodes(transport: str) -> None:
    config = engine(transport=transport, attention_nodes=2, expert_nodes=1)
    assert arguments_of(config) == {
        "scheduler": (
            *("server.scheduler", "--config", "/dev/fd/7", "--control", "ipc://@c"),
            *("--dead-fd", "9"),
        ),
        "expert 0": ("expert_nodes", *NODE, "--index", "0", "--transport", transport),
        "attention 0": ("attention_nodes", *NODE, "--index", "0"),
        "attention 1": ("attention_nodes", *NODE, "--index", "1"),
        "gateway": (
            *("server.gateway", "--config", "/dev/fd/7", "--control", "ipc://@c"),
            *("--listen-fd", "8"),
        ),
    }


def test_nodes_in_one_process() -> None:
    config = engine(transport="local", attention_nodes=2, expert_nodes=3)
    commands = arguments_of(config)
    assert set(commands) == {"scheduler", "local node", "gateway"}
    assert commands["local node"] == (
        *("app.launch.local_node", *NODE, "--attention-nodes", "2", "--expert-nodes", "3"),
    )


def test_who_is_stopped_when_and_who_inherits_what() -> None:
    config = engine()
    *others, last = config.plan.nodes
    config = changed(config, {"plan.nodes": (*others, replace(last, optional=True))})
    assert {name: (each.part, each.pass_fds) for name, each in commands_of(config).items()} == {
        "scheduler": ("coordinator", (7, 9)),
        "gateway": ("front", (7, 8)),
        "attention 0": ("worker", ()),
        "expert 0": ("worker", ()),
        "expert 1": ("optional", ()),
    }


def test_nodes_of_the_host_are_forked_and_others_executed() -> None:
    def forked(config: ServeConfig) -> set[str]:
        return {name for name, command in commands_of(config).items() if command.imports}

    config = engine()
    assert forked(config) == {"attention 0", "expert 0", "expert 1"}
    assert forked(engine(transport="local")) == {"local node"}
    assert forked(changed(config, {"plan.failover.standby": "none"})) == set()
    attention, *experts = config.plan.attention + config.plan.experts
    on_device = changed(config, {"plan.nodes": (replace(attention, device="cuda:0"), *experts)})
    assert forked(on_device) == {"expert 0", "expert 1"}


def test_spare_nodes_are_further_processes_of_nodes_that_are_not_optional() -> None:
    config = engine(expert_nodes=2)
    plan = changed(config.plan, {"failover.standby": "weights", "failover.restart": True})
    *others, last = plan.nodes
    plan = changed(plan, {"nodes": (*others, replace(last, optional=True))})
    nodes = {command.name: command for command in node_commands(plan, "ipc://@c")}
    spares = {command.name: command for command in spare_commands(plan, "ipc://@c")}
    assert sorted(spares) == ["spare attention 0", "spare expert 0"]
    for name, spare in spares.items():
        assert spare.part == "helper"
        assert spare.argv == nodes[name.removeprefix("spare ")].argv
    assert spare_commands(config.plan, "ipc://@c") == []


@pytest.mark.parametrize(
    ("transport", "told"), [("shm", {"attention 0", "expert 0"}), ("local", {"local node"})]
)
def test_nodes_that_are_restarted_notice_a_silent_scheduler_soon(
    transport: str, told: set[str]
) -> None:
    config = engine(transport=transport, expert_nodes=1)
    for restart, expected in ((False, set()), (True, told)):
        commands = arguments_of(changed(config, {"plan.failover.restart": restart}))
        assert {name for name, given in commands.items() if "--failover" in given} == expected


def test_a_folder_called_kernels_where_topspin_is_started_is_not_taken(tmp_path: Path) -> None:
    for name in ("kernels", "models", "server"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    command = commands_of(engine())["scheduler"]
    ask = "import kernels, models, server; print(kernels.__file__)"
    answer = subprocess.run(
        [*command.argv[:2], "-c", ask],
        env={**os.environ, **command.environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == str(ROOT / "kernels" / "__init__.py")


VARIABLES = ("OMP_NUM_THREADS", CORES_VARIABLE, "OMP_PROC_BIND", "GLIBC_TUNABLES")
ALL = str(len(os.sched_getaffinity(0)))


def settings_of(config: ServeConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return each node's threads, cores, whether threads are bound, and heap on huge pages."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = {
        name: [command.environment.get(variable) for variable in VARIABLES]
        for name, command in commands_of(config).items()
    }
    assert found.pop("scheduler") == found.pop("gateway") == [None] * 4
    return {
        name: (threads, cores, bound is not None, "glibc.malloc.hugetlb=1" in (heap or ""))
        for name, (threads, cores, bound, heap) in found.items()
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"attention 0": (ALL, "", True, True), "expert 0": (ALL, "", True, True)}),
        ({"num_threads": 3}, {"attention 0": ("3", "", ALL == "3", True)}),
        (
            {"layout": "split"},
            {
                "attention 0": ("1", "0", False, True),
                "expert 0": ("1", "1", False, True),
                "expert 1": ("2", "2,3", False, True),
            },
        ),
        # Nodes on a GPU leave cores and huge pages to those on the CPU.
        (
            {"attention_device": "cuda"},
            {"attention 0": (ALL, "", False, False), "expert 1": (ALL, "", True, True)},
        ),
        (
            {"expert_device": "cuda", "transport": "tcp"},
            {"attention 0": (ALL, "", True, True), "expert 1": (ALL, "", False, False)},
        ),
        (
            {"attention_device": "cuda", "expert_device": "cuda", "transport": "cuda_ipc"},
            {"attention 0": (ALL, "", False, False), "expert 0": (ALL, "", False, False)},
        ),
        (
            {"attention_device": "cuda", "expert_device": "cuda", "transport": "local"},
            {"local node": (ALL, "", False, False)},
        ),
        *(
            ({device: "cuda", "transport": "local"}, {"local node": (ALL, "", False, True)})
            for device in ("attention_device", "expert_device")
        ),
    ],
)
def test_only_nodes_get_settings_of_threads_cores_and_heap(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = settings_of(engine(**settings), monkeypatch)
    assert {name: found[name] for name in expected} == expected


def test_every_node_gets_its_own_threads_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(attention_nodes=2, expert_nodes=1).plan
    own: list[tuple[tuple[int, ...], int | None]] = [((0,), None), ((1, 2, 3), 2), ((4, 5), None)]
    nodes = tuple(
        replace(node, cores=cores, num_threads=threads)
        for node, (cores, threads) in zip(made.nodes, own, strict=True)
    )
    found = settings_of(ServeConfig(plan=replace(made, nodes=nodes)), monkeypatch)
    assert {name: each[:2] for name, each in found.items()} == {
        "attention 0": ("1", "0"),
        "attention 1": ("2", "1,2,3"),
        "expert 0": ("2", "4,5"),
    }
