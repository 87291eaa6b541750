"""The commands that `topspin scheduler`, `gateway` and `node` execute."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from app.cli.main import main
from app.launch.commands import inherited_config
from app.launch.role import (
    find_node,
    gateway_command,
    index_of,
    one_node_command,
    scheduler_command,
)
from tests.checkpoints import make_checkpoint
from tests.structs import changed, with_nodes
from tests.topspin.plans import plan
from topspin.errors import ConfigError
from topspin.plan.file import print_plan
from topspin.plan.network import NetworkSpec
from topspin.plan.spec import DraftNode, EnginePlan, ServeConfig, load_serve_config

KEYS = Path("/keys")
CONTROL = "tcp://10.0.0.1:7000"


def spread(transport: str = "tcp", *, trusted: bool = False, host: str = "10.0.0.2") -> EnginePlan:
    """Return a plan whose last node is on another host."""
    replace = msgspec.structs.replace
    *nodes, last = with_nodes(plan(), host="10.0.0.1").nodes
    return replace(
        plan(transport=transport),
        nodes=(*nodes, replace(last, host=host)),
        network=NetworkSpec(control=CONTROL, trusted=trusted),
    )


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    """Return the words behind each flag of a role's module."""
    words = argv[argv.index("-m") + 2 :]
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = ""
        else:
            found[list(found)[-1]] = (found[list(found)[-1]] + " " + word).strip()
    return found


def test_an_expert_node_listens_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    whole = spread()
    node = find_node(whole, "expert", whole.nodes[-1].index)
    command = one_node_command(whole, node, keys=KEYS, advertise="127.0.0.9")
    assert command.argv[command.argv.index("-m") + 1] == "expert_nodes"
    found = flags(command.argv)
    assert found["--control"] == CONTROL
    assert found["--host"] == "127.0.0.9"
    assert found["--keys"] == "/keys"
    assert found["--group"] == "expert"
    assert found["--peers"] == "attention"
    assert found["--transport"] == "tcp"
    assert "--trusted-network" not in found
    assert command.environment["OMP_NUM_THREADS"]
    assert "hugetlb" in command.environment["GLIBC_TUNABLES"]


def test_an_attention_node_only_connects() -> None:
    whole = spread("nixl", trusted=True)
    # Groups follow the keys of the plan.
    nodes = [changed(node, {"key": f"{node.role}s"}) for node in whole.nodes]
    whole = changed(whole, {"nodes": tuple(nodes)})
    command = one_node_command(whole, find_node(whole, "attention", 0), keys=KEYS, advertise=None)
    found = flags(command.argv)
    assert "--host" not in found
    assert (found["--group"], found["--peers"]) == ("attentions", "experts")
    assert "--trusted-network" in found


def test_a_draft_node_lets_attention_nodes_in() -> None:
    draft = DraftNode(index=0, device="cpu", kernels="cpu", wait="block", kv_cache_tokens=64)
    whole = spread()
    whole = changed(whole, {"nodes": (*whole.nodes, draft)})
    command = one_node_command(whole, draft, keys=KEYS, advertise=None)
    assert flags(command.argv)["--peers"] == "attention"
    assert "--host" not in command.argv
    command = one_node_command(whole, draft, keys=KEYS, advertise="127.0.0.9")
    assert flags(command.argv)["--host"] == "127.0.0.9"


def test_servers_get_the_whole_configuration() -> None:
    config = ServeConfig(plan=spread())
    fd = inherited_config(config)
    try:
        assert os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        assert load_serve_config(f"/dev/fd/{fd}") == config
        for bind, address in (
            (None, CONTROL),
            ("0.0.0.0", "tcp://0.0.0.0:7000"),
            ("::", "tcp://[::]:7000"),
        ):
            found = flags(scheduler_command(config, fd, keys=KEYS, bind=bind).argv)
            assert found == {
                "--config": f"/dev/fd/{fd}",
                "--control": address,
                "--keys": "/keys",
                "--group": "scheduler",
            }
        assert flags(gateway_command(config, fd, keys=KEYS).argv)["--group"] == "gateway"
    finally:
        os.close(fd)


def test_what_others_reach_needs_keys() -> None:
    whole = spread()
    for call in (
        lambda: scheduler_command(ServeConfig(plan=whole), 0, keys=None, bind=None),
        lambda: gateway_command(ServeConfig(plan=whole), 0, keys=None),
        lambda: one_node_command(whole, whole.nodes[0], keys=None, advertise=None),
    ):
        with pytest.raises(ConfigError, match=r"10\.0\.0\.1:7000: .* needs keys"):
            call()
    local = changed(whole, {"network": NetworkSpec(control="tcp://127.0.0.1:7000")})
    assert "--keys" not in gateway_command(ServeConfig(plan=local), 0, keys=None).argv


def test_a_plan_of_one_host_is_for_serve() -> None:
    with pytest.raises(ConfigError, match="the plan has no `network`"):
        one_node_command(plan(), plan().nodes[0], keys=None, advertise=None)


@pytest.mark.parametrize(
    ("text", "hostname", "index"),
    [
        ("3", "x", 3),
        ("ordinal", "expert-2", 2),
        ("ordinal+4", "topspin-expert-10", 14),
        ("worker*2", "topspin-attention-0-1", 0),
        ("worker*2", "topspin-attention-3-2", 7),
        ("worker*1+4", "topspin-attention-2-1", 6),
    ],
)
def test_an_index_may_come_from_the_hosts_name(text: str, hostname: str, index: int) -> None:
    assert index_of(text, hostname) == index


@pytest.mark.parametrize(
    ("text", "hostname"),
    [
        *(("ordinal", "expert"), ("ordinal+x", "e-1"), ("-1", "e-1"), ("x", "e-1")),
        *(("worker*2", "e-1"), ("worker*2", "e-1-0"), ("worker", "e-1-1"), ("9" * 10, "e-1")),
    ],
)
def test_an_index_that_is_none(text: str, hostname: str) -> None:
    with pytest.raises(ConfigError, match=r"--index .*: give N, or ordinal"):
        index_of(text, hostname)


def test_nodes_and_hosts_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match="the plan has no expert 9; it has attention 0"):
        find_node(spread(), "expert", 9)
    whole = spread(host="no-such-host.invalid")
    with pytest.raises(ConfigError, match=r"host 'no-such-host\.invalid' has no IPv4 address"):
        one_node_command(whole, whole.nodes[-1], keys=KEYS, advertise=None)


@pytest.mark.parametrize("role", ["scheduler", "gateway", "node expert --index 0"])
def test_commands_name_what_is_wrong_with_a_plan(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text("version: 1\n")
    assert main([*role.split(), "--plan", str(tmp_path / "plan.yaml")]) == 2
    assert "plan.yaml: Object missing required field" in capsys.readouterr().err


def test_serve_leaves_several_hosts_to_the_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = spread()
    model = msgspec.structs.replace(
        whole.model,
        path=str(make_checkpoint(tmp_path / "model", "qwen3_moe")),
        dtype="float32",
        max_model_len=128,
        hf_overrides=None,
    )
    (tmp_path / "plan.yaml").write_text(print_plan(changed(whole, {"model": model})))
    assert main(["serve", "--plan", str(tmp_path / "plan.yaml")]) == 2
    told = "start each with `topspin scheduler`, `topspin gateway` and `topspin node`"
    assert told in capsys.readouterr().err
