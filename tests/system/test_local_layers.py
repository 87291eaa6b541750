"""Layers that become local while real processes serve: where that is faster, or nodes die."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest

from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.engine import engine_config
from tests.identity.conftest import MIN_MARGIN, Case
from tests.structs import changed, with_nodes
from tests.system.rig.server import Server
from tests.system.test_serve import complete
from topspin.plan.local_experts import LocalExperts
from topspin.plan.spec import EnginePlan

pytestmark = pytest.mark.slow

PROMPTS = [[5 + 31 * number, 9, 200 - 17 * number] for number in range(8)]
NUM_TOKENS = 60
MAX_ROUNDS = 60


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a checkpoint whose experts take most of a layer's time, and the oracle's tokens."""
    path = make_checkpoint(
        tmp_path_factory.mktemp("wide"),
        "mixtral",
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=4,
        max_position_embeddings=256,
    )
    found = oracle_generate(path, PROMPTS, NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(found.margins) if margin >= MIN_MARGIN]
    assert len(clear) >= 3, found.margins
    return Case(path, [PROMPTS[idx] for idx in clear], [found.tokens[idx] for idx in clear])


def plan_of(path: Path, **settings: object) -> EnginePlan:
    plan = engine_config(path, transport="shm", **settings)
    layers = load_model_config(path).moe_layers
    return msgspec.structs.replace(plan, local_experts=LocalExperts(layers=layers))


def num_local(server: Server) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(r'^topspin_local_layers\{model_name="tiny"\} (\d+)', text, re.MULTILINE)
    assert found, text
    return int(found[1])


def check_round(server: Server, case: Case) -> None:
    """Answer the prompts, some at a time; so load varies and changes meet running requests."""
    with ThreadPoolExecutor(3) as pool:
        answer = partial(complete, server.url, max_tokens=NUM_TOKENS)
        assert list(pool.map(answer, case.prompts)) == case.tokens


def changes(server: Server) -> list[int]:
    """Return how many layers were to be local, by each change of mind."""
    return [int(found) for found in re.findall(r"(\d+) layers are to be local", server.output)]


def test_a_slow_link_makes_all_layers_local(case: Case, tmp_path: Path) -> None:
    with Server(case.path, tmp_path, plan=plan_of(case.path, latency_us=2000.0)) as server:
        assert num_local(server) == 0
        rounds = 0
        while num_local(server) != 4 or rounds < 6:
            check_round(server, case)
            rounds += 1
            assert rounds < MAX_ROUNDS, server.output
        # A busy machine may slow one side for a while.
        assert changes(server)[0] == changes(server)[-1] == 4


def test_layers_stay_remote_where_the_expert_node_is_faster(case: Case, tmp_path: Path) -> None:
    plan = with_nodes(plan_of(case.path), "attention", slow=6.0)
    with Server(case.path, tmp_path, plan=plan) as server:
        rounds = 0
        while changes(server) != [4, 0]:
            check_round(server, case)
            rounds += 1
            assert rounds < MAX_ROUNDS, server.output
        check_round(server, case)
        assert num_local(server) == 0


def test_layers_are_local_while_their_expert_node_is_gone(case: Case, tmp_path: Path) -> None:
    """The only expert node is killed; requests go on, first without it, then with its successor."""
    plan = plan_of(case.path, restart=True, restart_deadline_s=60.0)
    with Server(case.path, tmp_path, plan=plan) as server:
        check_round(server, case)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(check_round, server, case)
            server.kill("expert 0")
            running.result()
        assert "ready: without expert 0" in server.output
        rounds = 0
        while "a node is back" not in server.output:
            check_round(server, case)
            rounds += 1
            assert rounds < MAX_ROUNDS, server.output
        check_round(server, case)


def test_an_attention_node_that_dies_while_layers_are_local(case: Case, tmp_path: Path) -> None:
    plan = plan_of(case.path, restart=True, restart_deadline_s=60.0, attention_nodes=2)
    assert plan.local_experts is not None
    always = msgspec.structs.replace(plan.local_experts, when="always")
    plan = changed(plan, {"local_experts": always, "nodes": tuple(plan.attention)})
    with Server(case.path, tmp_path, plan=plan) as server:
        check_round(server, case)
        assert num_local(server) == 4
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(check_round, server, case)
            server.kill("attention 0")
            running.result()
        check_round(server, case)
