"""The engine plan: its nodes, and each one's part."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.topspin.plan.nodes import ATTENTION, DRAFT, EXPERT, LINK, LOCAL, SELF, made_of
from tests.topspin.plans import DENSE, plan
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.precision import rules_of
from topspin.plan.rules.checks import check_plan
from topspin.plan.settings import (
    ExecutionPolicy,
    FailoverPolicy,
    GatewaySection,
    SchedulingPolicy,
    TraceSection,
)
from topspin.plan.spec import LinkSpec, ServeConfig, load_serve_config


def test_nodes_are_found_by_role_and_index() -> None:
    second = replace(ATTENTION, index=1, max_num_seqs=4)
    made = made_of(EXPERT, ATTENTION, second)
    check_plan(made)
    assert made.attention == [ATTENTION, second]
    assert made.experts == [EXPERT]
    assert made.for_node("attention", 1).node == made.for_node("attention", 1).attention == second
    assert made.for_node("expert").node == EXPERT
    assert [str(node) for node in made.nodes] == ["expert 0", "attention 0", "attention 1"]
    with pytest.raises(AssertionError, match="expert 0 is no attention node"):
        _ = made.for_node("expert").attention


def test_attention_nodes_share_draft_nodes_by_index() -> None:
    attention = [replace(ATTENTION, index=index) for index in range(3)]
    drafts = [replace(DRAFT, index=index, address=f"ipc:{index}") for index in range(2)]
    made = made_of(*attention, EXPERT, *drafts, speculation=SELF)
    assert made.drafts == drafts
    assert made.for_node("draft", 1).draft == drafts[1]
    found = [made.for_node("attention", index).draft_address for index in range(3)]
    assert found == ["ipc:0", "ipc:1", "ipc:0"]
    assert made_of(ATTENTION, EXPERT).for_node("attention").draft_address is None
    with pytest.raises(AssertionError, match="expert 0 is no draft node"):
        _ = made.for_node("expert").draft


def test_every_node_gets_the_parts_that_it_shares() -> None:
    made = replace(
        plan(attention_nodes=2, gbps=5.0),
        precision=rules_of("int8"),
        kv_cache=KvCacheSpec(block_size=32),
        scheduling=SchedulingPolicy(micro_batches=3),
        failover=FailoverPolicy(restart=True),
        trace=TraceSection(enabled=False),
        execution=ExecutionPolicy(spin_count=7),
    )
    for config in (made.for_node("attention", 1), made.for_node("expert")):
        for section in ("model", "precision", "kv_cache", "link", "execution", "trace"):
            assert getattr(config, section) == getattr(made, section)
        assert (config.num_attention, config.num_experts) == (2, 1)
        assert (config.micro_batches, config.restart) == (3, True)
        assert not hasattr(config, "nodes")


@pytest.mark.parametrize(
    ("tokens", "link", "window", "rows"),
    [
        ((64,), LINK, 32, 32),
        ((64, 24), LINK, 32, 56),  # a window of each attention node at once
        ((16, 24), LINK, 24, 40),  # no window is larger than any node's step
        ((64, 24), LOCAL, 32, 64),  # one process serves one attention node after the other
    ],
)
def test_windows_and_batches_follow_the_nodes(
    tokens: tuple[int, ...], link: LinkSpec, window: int, rows: int
) -> None:
    nodes = [
        replace(ATTENTION, index=i, max_num_batched_tokens=count) for i, count in enumerate(tokens)
    ]
    config = made_of(*nodes, EXPERT, link=link).for_node("expert")
    assert (config.link.window_rows, config.batch_rows) == (window, rows)


def test_one_process_on_one_device_shares_it() -> None:
    cuda = {"attention_device": "cuda", "expert_device": "cuda"}
    assert plan(**cuda).shares_device
    assert plan(**cuda).for_node("expert").shares_device
    for other in (
        plan(transport="local"),
        plan(**cuda, transport="cuda_ipc"),
        plan(attention_device="cuda", transport="local"),
        plan(DENSE, **cuda, transport="local"),
    ):
        assert not other.shares_device


def test_processes_read_the_plan_and_the_gateways_settings(tmp_path: Path) -> None:
    made = plan(micro_batches=2)
    config = ServeConfig(plan=made, gateway=GatewaySection(port=7))
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(config))
    assert load_serve_config(str(file)) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "truncated"),
        (b"{}", "plan"),
        (b'{"plan": {"colour": 1}}', "colour"),
        (b"\xff\xfe", "malformed"),
        (b'{"plan": {"model": {"path": "\xff"}}}', "(?i:utf-8)"),
        (None, "No such file"),
    ],
)
def test_a_damaged_configuration_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--config {file}: .*{reason}"):
        load_serve_config(str(file))
