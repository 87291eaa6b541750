"""--deterministic: after a loss, log-probabilities have the bits of an undisturbed run.

Nodes are threads that crash in the middle of all streams; tests/system has real processes. The
whole distribution over the vocabulary is compared, of tokens before and after the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.engine import Engine
from tests.faults import faulty_node
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from tests.identity.test_deterministic import Answer, ask, run, settings_of
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan

VARIANT = "qwen2_moe"
NUM_EXPERTS = 8
NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def case(case_of: CaseOf) -> Case:
    whole = case_of(VARIANT)
    return Case(whole.path, whole.prompts[:NUM_PROMPTS], whole.tokens[:NUM_PROMPTS])


@pytest.fixture(scope="module")
def undisturbed(case: Case) -> Callable[[str], list[Answer]]:
    """Return a cached function that gives the answers of one node without failover."""
    cache: dict[str, list[Answer]] = {}

    def get(dtype: str) -> list[Answer]:
        if dtype not in cache:
            cache[dtype] = run(case, dtype=dtype)
        return cache[dtype]

    return get


def config_of(case: Case, transport: str, dtype: str, *, redundant: int) -> EnginePlan:
    return settings_of(
        case,
        transport=transport,
        dtype=dtype,
        attention_nodes=2,
        expert_nodes=2,
        micro_batches=2,
        max_num_batched_tokens=24,
        restart=True,
        restart_deadline_s=60.0,
        redundant_experts=redundant,
        balance=BalancePolicy(interval_s=0.0),
    )


ROWS = [
    ("expert", "live replicas", "shm", "bfloat16"),
    ("attention", "no replica", "tcp", "float32"),
    ("expert", "no replica", "tcp", "float32"),
    ("attention", "no replica", "shm", "bfloat16"),
    ("expert", "live replicas", "tcp", "float32"),
    ("expert", "no replica", "shm", "bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("role", "copies", "transport", "dtype"), ROWS)
def test_continued_streams_have_the_same_bits(
    case: Case,
    undisturbed: Callable[[str], list[Answer]],
    role: str,
    copies: str,
    transport: str,
    dtype: str,
) -> None:
    has_copies = copies == "live replicas"
    config = config_of(case, transport, dtype, redundant=NUM_EXPERTS if has_copies else 0)
    with faulty_node(role, 1) as injector, Engine(config) as engine:
        if has_copies or role == "attention":
            engine.may_restart.clear()  # the others continue without it
        whole = engine.generate_during(
            case.prompts, injector.crash, max_tokens=NUM_TOKENS, logprobs=VOCAB_SIZE
        )
        answers = [Answer(request.tokens, request.logprobs) for request in whole]
        assert injector.num_injected == 1
        assert engine.stats().num_replays > 0
        assert (f"without {role} 1" in engine.details) == (has_copies or role == "attention")
        engine.may_restart.set()
        engine.wait_until_whole()
        again = ask(engine, case.prompts)
    assert answers == undisturbed(dtype)
    assert again == undisturbed(dtype)
