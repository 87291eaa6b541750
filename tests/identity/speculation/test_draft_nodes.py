"""Draft nodes of their own through the whole engine: the tokens of plain decoding, in fewer steps.

They compute while attention nodes verify, so how a tree has grown when it is asked for depends on
the moment: tokens may not.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, CaseOf
from tests.identity.speculation.test_draft_model import TREES, VARIANT, speculation_of
from tests.identity.speculation.test_speculation import (
    SAMPLINGS,
    TIMEOUT_S,
    accepted,
    ask,
    config_of,
    crowded_config_of,
    generate_until,
    was_preempted,
)
from tests.identity.test_sampling import SAMPLING

slow = pytest.mark.slow
LAYOUTS = (
    ("shm", (2, 2), 2, 1, TREES),
    pytest.param("shm", (2, 1), 1, 2, TREES, marks=slow),
    pytest.param("shm", (3, 2), 3, 2, {**TREES, "draft_passes": 2}, marks=slow),
)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "topology", "micro_batches", "nodes", "settings"), LAYOUTS)
def test_a_perfect_draft_gives_transformers_tokens_in_few_steps(
    case_of: CaseOf,
    transport: str,
    topology: tuple[int, int],
    micro_batches: int,
    nodes: int,
    settings: dict[str, Any],
) -> None:
    case = case_of(VARIANT)
    speculation = speculation_of(case.path, **settings)
    config = config_of(
        case, transport, topology, micro_batches, speculation=speculation, draft_nodes=nodes
    )
    with Engine(config) as engine:
        generate_until(
            engine,
            case,
            lambda stats: (
                accepted(stats) > NUM_TOKENS
                and stats.num_root_hits > 0
                and 0 < stats.num_overlapped_passes < stats.num_draft_passes
                and stats.draft_pass_seconds > 0
            ),
        )


def test_another_checkpoint_changes_no_token(case_of: CaseOf, tmp_path: Any) -> None:
    case = case_of("llama")
    draft = make_checkpoint(tmp_path, "mixtral_sliding_window", seed=77)
    config = engine_config(case.path, draft_nodes=1, speculation=speculation_of(draft))
    with Engine(config) as engine:
        generate_until(
            engine,
            case,
            lambda stats: stats.num_root_misses > 0 and stats.num_draft_tokens > accepted(stats),
        )


@slow
def test_seeded_draws_are_those_of_plain_decoding(case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    options = [{"max_tokens": NUM_TOKENS, **each} for each in (SAMPLING, *SAMPLINGS[2:4])]
    with Engine(config_of(case, "shm", (1, 2), 2)) as engine:
        plain = [ask(engine, case, **sampling) for sampling in options]
    speculation = speculation_of(case.path, **TREES)
    config = config_of(case, "shm", (1, 2), 2, speculation=speculation, draft_nodes=1)
    with Engine(config) as engine:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not accepted(engine.stats()):
            for sampling, expected in zip(options, plain, strict=True):
                found = ask(engine, case, **sampling)
                assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert time.monotonic() < deadline_s


@pytest.mark.slow
def test_preempted_requests_begin_again_on_the_draft_node(case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    config = crowded_config_of(case, draft_nodes=1, speculation=speculation_of(case.path))
    with Engine(config) as engine:
        generate_until(engine, case, was_preempted)
