"""A trace of a whole engine: every hop of every layer is there, and tokens do not change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from app.cli.trace.report import lanes_of, make_report
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from topspin.plan.settings import TraceSection
from topspin.trace import Kind

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen2_moe")


@pytest.mark.parametrize(
    ("transport", "topology", "m"),
    [
        ("local", (1, 2), 2),
        pytest.param("shm", (2, 2), 2, marks=pytest.mark.slow),
        pytest.param("tcp", (1, 1), 1, marks=pytest.mark.slow),
    ],
)
def test_every_hop_is_stamped(
    path: Path, transport: str, topology: tuple[int, int], m: int
) -> None:
    config = engine_config(
        path,
        attention_nodes=topology[0],
        expert_nodes=topology[1],
        transport=transport,  # type: ignore[arg-type]
        micro_batches=m,
    )
    with Engine(config) as engine:
        engine.generate(PROMPTS, max_tokens=8)
        trace = engine.trace(seconds=60.0)
        num_steps = engine.stats().num_steps
    assert trace.missing == ()
    lanes = lanes_of(trace)
    names = [f"attention {i}" for i in range(topology[0])]
    names += [f"expert {i}" for i in range(topology[1])]
    assert [lane.name for lane in lanes] == ["scheduler", *names]
    report = make_report(lanes)
    assert report is not None
    num_moe_layers = len(load_model_config(path).moe_layers)
    assert (report.num_layers, report.num_micro_batches) == (num_moe_layers, m)
    assert report.t_a_s is not None
    assert report.t_e_s is not None
    assert report.replay_error is not None
    sent = [span.step for span in lanes[0].spans if span.kind == Kind.PLAN_SENT]
    assert set(sent) == set(range(1, num_steps + 1))
    for lane in lanes[1:]:
        if lane.role == "attention":
            dispatched = [s for s in lane.spans if s.kind == Kind.DISPATCHED]
            arrived = [s for s in lane.spans if s.kind == Kind.ARRIVED]
            assert len(arrived) == len(dispatched) * topology[1]
        else:
            replied = [s for s in lane.spans if s.kind == Kind.REPLIED]
            assert len(replied) == num_steps * num_moe_layers * m


def test_a_trace_changes_no_token_and_can_be_off(path: Path) -> None:
    tokens = []
    for enabled in (True, False):
        config = engine_config(path, transport="shm", micro_batches=2)
        config = msgspec.structs.replace(config, trace=TraceSection(enabled=enabled))
        with Engine(config) as engine:
            tokens.append(engine.generate(PROMPTS, max_tokens=8))
            trace = engine.trace(seconds=60.0)
        assert trace.missing == ()
        assert all(bool(node.records) == enabled for node in trace.nodes)
    assert tokens[0] == tokens[1]


def test_phases_of_steps_are_measured(path: Path) -> None:
    with Engine(engine_config(path, transport="shm")) as engine:
        engine.generate(PROMPTS, max_tokens=8)
        stats = engine.stats()
    phases = stats.step_phases
    assert set(phases) >= {"attention", "expert", "wait", "sample", "scheduler_gap"}
    assert sum(phases["attention"].counts) == stats.num_steps
    assert 0 < phases["expert"].sum_s < stats.step_seconds
    # The first step after idleness has no gap; all others do.
    assert sum(phases["scheduler_gap"].counts) == stats.num_steps - 1
