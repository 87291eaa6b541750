"""On every layout, greedy output in fp32 equals transformers' token for token.

The engine is whole (scheduler, control channel, transports), its processes are threads; see
tests/engine.py. All pairs of family and layout settings are marked slow.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.description.config import load_model_config
from tests.checkpoints import MOE_VARIANTS, VARIANTS, make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.identity.conftest import MIN_MARGIN, NUM_TOKENS, CaseOf
from tests.pairwise import cover_pairs

TRANSPORTS = ("local", "shm", "tcp")
TOPOLOGIES = ((1, 1), (2, 2), (1, 3))
MICRO_BATCHES = (1, 2, 3, 4)
# Every family by default, and with slow rows every pair of layout settings.
SPREAD = tuple(
    (variant, *layout)
    for variant, layout in zip(
        cycle(MOE_VARIANTS), cover_pairs(TRANSPORTS, TOPOLOGIES, MICRO_BATCHES), strict=False
    )
)
assert len(SPREAD) >= len(MOE_VARIANTS)
DENSE = tuple(sorted(set(VARIANTS) - set(MOE_VARIANTS)))
slow = pytest.mark.slow


def generate(
    case_of: CaseOf,
    variant: str,
    transport: str,
    topology: tuple[int, int],
    micro_batches: int,
    **settings: Any,
) -> None:
    case = case_of(variant)
    config = engine_config(
        case.path,
        attention_nodes=topology[0],
        expert_nodes=topology[1],
        transport=transport,  # type: ignore[arg-type]
        micro_batches=micro_batches,
        **settings,
    )
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens


@pytest.mark.parametrize(
    ("variant", "transport", "topology", "micro_batches"),
    [
        *SPREAD[: len(MOE_VARIANTS)],
        *(pytest.param(*row, marks=slow) for row in SPREAD[len(MOE_VARIANTS) :]),
    ],
)
def test_every_family(
    case_of: CaseOf, variant: str, transport: str, topology: tuple[int, int], micro_batches: int
) -> None:
    generate(case_of, variant, transport, topology, micro_batches)


@pytest.mark.parametrize(
    ("variant", "transport"),
    [
        # By default each row runs with one transport, alternating; with slow tests, both.
        pytest.param(variant, transport, marks=[slow] if (idx + row) % 2 else [])
        for idx, variant in enumerate(DENSE)
        for row, transport in enumerate(("local", "shm"))
    ],
)
def test_dense_models_run_without_expert_nodes(
    case_of: CaseOf, variant: str, transport: str
) -> None:
    generate(case_of, variant, transport, (2, 1), 2)


@slow
@pytest.mark.parametrize(
    ("transport", "topology", "micro_batches"), [*product(TRANSPORTS, TOPOLOGIES, MICRO_BATCHES)]
)
def test_every_layout(
    case_of: CaseOf, transport: str, topology: tuple[int, int], micro_batches: int
) -> None:
    generate(case_of, "qwen2_moe", transport, topology, micro_batches)


def test_an_fp32_payload_changes_no_token_and_a_bf16_payload_none_of_a_bf16_model(
    case_of: CaseOf,
) -> None:
    generate(case_of, "qwen2_moe", "shm", (1, 3), 2, payload="fp32")
    case = case_of("qwen2_moe")
    outputs = []
    for payload in ("auto", "bf16"):
        config = engine_config(
            case.path, expert_nodes=2, transport="tcp", dtype="bfloat16", payload=payload
        )
        with Engine(config) as engine:
            # One at a time: in bf16 a token may depend on the requests in its step.
            outputs.append(
                [engine.generate([prompt], max_tokens=NUM_TOKENS) for prompt in case.prompts]
            )
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("payload", ["fp8", pytest.param("int8", marks=slow)])
def test_a_compressed_payload_serves_the_whole_engine(case_of: CaseOf, payload: Any) -> None:
    case = case_of("qwen2_moe")
    outputs = []
    for transport in ("local", "shm"):
        config = engine_config(
            case.path, expert_nodes=1, transport=transport, payload=payload, micro_batches=2
        )
        with Engine(config) as engine:
            # One at a time: sums that differ in the last bit, as those of other batches do, may be
            # rounded to another code.
            outputs.append(
                [engine.generate([prompt], max_tokens=NUM_TOKENS) for prompt in case.prompts]
            )
    # The rows are coded token by token, so the transport does not matter.
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.parametrize(
    ("topology", "micro_batches"),
    [
        ((2, 2), 2),
        pytest.param((1, 1), 3, marks=slow),
        pytest.param((1, 3), 4, marks=slow),
    ],
)
def test_layouts_over_nixl(case_of: CaseOf, topology: tuple[int, int], micro_batches: int) -> None:
    generate(case_of, "qwen3_moe", "nixl", topology, micro_batches)


@slow
@pytest.mark.parametrize(
    ("variant", "transport", "topology", "micro_batches", "kernels"),
    cover_pairs(MOE_VARIANTS, TRANSPORTS, TOPOLOGIES, MICRO_BATCHES, ("cpu", "reference")),
)
def test_families_on_layouts(
    case_of: CaseOf,
    variant: str,
    transport: str,
    topology: tuple[int, int],
    micro_batches: int,
    kernels: str,
) -> None:
    generate(case_of, variant, transport, topology, micro_batches, kernels=kernels)


@pytest.mark.parametrize(
    "variant", ["mixtral_sliding_window", pytest.param("qwen3_moe", marks=slow)]
)
def test_reference_kernels(case_of: CaseOf, variant: str) -> None:
    generate(case_of, variant, "shm", (1, 1), 2, kernels="reference")


@pytest.mark.parametrize(
    ("transport", "topology", "micro_batches"),
    [pytest.param("shm", (1, 1), 1, marks=slow), ("local", (2, 2), 3)],
)
def test_preemption_does_not_change_tokens(
    case_of: CaseOf, transport: str, topology: tuple[int, int], micro_batches: int
) -> None:
    """A pool little larger than the longest request forces recomputation."""
    case = case_of("mixtral")
    model = load_model_config(case.path)
    bytes_per_token = 2 * 4 * model.num_layers * model.kv_size
    longest = max(map(len, case.prompts)) + NUM_TOKENS
    config = engine_config(
        case.path,
        attention_nodes=topology[0],
        expert_nodes=topology[1],
        transport=transport,  # type: ignore[arg-type]
        micro_batches=micro_batches,
        kv_cache_bytes=(longest + 8) * bytes_per_token,
    )
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("transport", "topology", "micro_batches"),
    [pytest.param("shm", (1, 1), 2, marks=slow), ("tcp", (2, 2), 1)],
)
def test_prefix_cache_hits_do_not_change_tokens(
    case_of: CaseOf, transport: str, topology: tuple[int, int], micro_batches: int
) -> None:
    case = case_of("olmoe")
    config = engine_config(
        case.path,
        attention_nodes=topology[0],
        expert_nodes=topology[1],
        transport=transport,  # type: ignore[arg-type]
        micro_batches=micro_batches,
    )
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        cold = engine.stats()
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        warm = engine.stats()
        assert warm.prefix_cache_hits > cold.prefix_cache_hits
        longest = max(range(len(case.prompts)), key=lambda idx: len(case.prompts[idx]))
        # The first may go to a node that has not cached it; then all have.
        cached = []
        for _ in range(2):
            again = engine.add(case.prompts[longest], max_tokens=NUM_TOKENS)
            engine.collect()
            assert engine.requests[again].tokens == case.tokens[longest]
            cached.append(engine.requests[again].num_cached_tokens)
        assert max(cached) >= len(case.prompts[longest]) - 5
        # Another tenant has no cached prefix.
        other = engine.add(case.prompts[longest], max_tokens=NUM_TOKENS, cache_salt="other")
        engine.collect()
        assert engine.requests[other].tokens == case.tokens[longest]
        assert engine.requests[other].num_cached_tokens == 0


def test_dynamic_ntk_shares_no_prefix(tmp_path: Path) -> None:
    """Beyond its trained length such a model rotates a prompt's keys by the prompt's own length."""
    path = make_checkpoint(tmp_path, "llama_dynamic_ntk", max_position_embeddings=32)
    rng = np.random.default_rng(2)
    prefix = rng.integers(0, 250, size=40).tolist()
    prompts = [prefix, [*prefix[:36], 9, 7], prefix[:33]]
    oracle = oracle_generate(path, prompts, 12)
    assert min(oracle.margins) >= MIN_MARGIN, oracle.margins
    with Engine(engine_config(path)) as engine:
        tokens = [engine.generate([prompt], max_tokens=12)[0] for prompt in prompts]
        assert tokens == oracle.tokens
        assert engine.stats().prefix_cache_hits == 0
