"""--deterministic: every log-probability of every token has the same bits in every setting.

A request's logits may not depend on: the layout, the transport, micro-batches, the token budget,
block size, companions, cached prefixes, preemption, threads. The whole distribution over the
vocabulary is compared, in both dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

from models.description.config import load_model_config
from tests.checkpoints import MOE_VARIANTS, VOCAB_SIZE, oracle_model
from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from tests.pairwise import cover_pairs
from topspin.messages import TokenLogprobs
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan

slow = pytest.mark.slow
DTYPES = ("float32", "bfloat16")
# A shared expert and a dense layer; a sliding window; QK-norm and four experts per token.
VARIANT = "qwen2_moe"
SPREAD = ("mixtral_sliding_window", "qwen3_moe", "llama_gqa_rope_linear")
PLAIN: dict[str, Any] = {"transport": "local", "micro_batches": 1, "block_size": 4}


class Answer(NamedTuple):
    """A request's tokens, and the whole distribution for each of them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


def settings_of(
    case: Case, *, max_num_seqs: int = 16, max_num_batched_tokens: int = 48, **settings: Any
) -> EnginePlan:
    """Return a plan; the budget may be less than tests.engine's 16 sequences."""
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return engine_config(case.path, deterministic=True, **(PLAIN | settings | limits))


def ask(engine: Engine, prompts: Iterable[list[int]], **sampling: Any) -> list[Answer]:
    """Run `prompts` at once."""
    options = {"max_tokens": NUM_TOKENS, "logprobs": VOCAB_SIZE, **sampling}
    ids = [engine.add(prompt, **options) for prompt in prompts]
    engine.collect()
    answers = []
    for request_id in ids:
        request = engine.requests[request_id]
        assert request.failed is None, request.failed
        assert all(len(each.top_ids) == VOCAB_SIZE for each in request.logprobs)
        answers.append(Answer(request.tokens, request.logprobs))
    return answers


def run(case: Case, **settings: Any) -> list[Answer]:
    with Engine(settings_of(case, **settings)) as engine:
        return ask(engine, case.prompts)


Plain = Callable[[str, str], list[Answer]]


@pytest.fixture(scope="module")
def plain(case_of: CaseOf) -> Plain:
    """Return a cached function that gives a variant's answers on the plainest layout."""
    cache: dict[tuple[str, str], list[Answer]] = {}

    def get(variant: str, dtype: str) -> list[Answer]:
        if (variant, dtype) not in cache:
            cache[variant, dtype] = run(case_of(variant), dtype=dtype)
        return cache[variant, dtype]

    return get


def layout(transport: str, attention: int, experts: int, micro_batches: int) -> dict[str, Any]:
    return {
        "transport": transport,
        "attention_nodes": attention,
        "expert_nodes": experts,
        "micro_batches": micro_batches,
    }


SETTINGS = (
    layout("tcp", 1, 3, 4),
    {"block_size": 16, "max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    {"num_threads": 2, "transport": "shm"},
    {"num_threads": 3, "window_rows": 3, "max_num_batched_tokens": 200},
)
# One with nodes and micro-batches, one with other steps and threads.
BY_DEFAULT = (0,)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(
            settings,
            dtype,
            id=f"{'-'.join(map(str, settings.values()))}-{dtype}",
            # By default each setting runs with one dtype, alternating; with slow tests, both.
            marks=[slow] if idx not in BY_DEFAULT or (idx + row) % 2 else [],
        )
        for idx, settings in enumerate(SETTINGS)
        for row, dtype in enumerate(DTYPES)
    ],
)
def test_the_same_bits(case_of: CaseOf, plain: Plain, settings: dict[str, Any], dtype: str) -> None:
    assert run(case_of(VARIANT), dtype=dtype, **settings) == plain(VARIANT, dtype)


@slow
@pytest.mark.parametrize(
    ("variant", "transport", "topology", "micro_batches", "dtype"),
    cover_pairs(
        [*MOE_VARIANTS, "llama3_rope"],
        ("local", "shm", "tcp"),
        ((1, 1), (2, 2), (1, 3)),
        (1, 2, 3, 4),
        DTYPES,
    ),
)
def test_families_on_layouts(
    case_of: CaseOf,
    plain: Plain,
    variant: str,
    transport: str,
    topology: tuple[int, int],
    micro_batches: int,
    dtype: str,
) -> None:
    budget = {"local": 16, "shm": 33, "tcp": 90}[transport]
    result = run(
        case_of(variant),
        dtype=dtype,
        block_size=4 * micro_batches,
        max_num_batched_tokens=budget,
        **layout(transport, *topology, micro_batches),
    )
    assert result == plain(variant, dtype)


@pytest.mark.parametrize("variant", [VARIANT, *(pytest.param(each, marks=slow) for each in SPREAD)])
def test_fp32_is_transformers_within_a_tolerance(
    case_of: CaseOf, plain: Plain, variant: str
) -> None:
    case, model = case_of(variant), oracle_model(case_of(variant).path)
    answers = plain(variant, "float32")
    assert [answer.tokens for answer in answers] == case.tokens
    for prompt, answer in zip(case.prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.tokens])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for row, entry in zip(expected, answer.logprobs, strict=True):
            got = torch.empty(VOCAB_SIZE)
            got[list(entry.top_ids)] = torch.tensor(entry.top_logprobs)
            torch.testing.assert_close(got, row, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_bf16_is_near_fp32_and_not_it(plain: Plain) -> None:
    for wide, narrow in zip(plain(VARIANT, "float32"), plain(VARIANT, "bfloat16"), strict=True):
        first, second = wide.logprobs[0], narrow.logprobs[0]
        assert first.top_logprobs != second.top_logprobs
        assert second.top_logprobs[0] == pytest.approx(first.top_logprobs[0], abs=0.2)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=slow)])
@pytest.mark.slow
def test_companions_and_cached_prefixes(case_of: CaseOf, plain: Plain, dtype: str) -> None:
    """Some alone and cold, then alone and cached, then all at once, some of them cached."""
    case = case_of(VARIANT)
    wanted = plain(VARIANT, dtype)
    some = case.prompts[:3]
    with Engine(settings_of(case, dtype=dtype, **layout("shm", 1, 2, 1))) as engine:
        alone = [ask(engine, [prompt])[0] for prompt in some]
        cold = engine.stats().prefix_cache_hits
        again = [ask(engine, [prompt])[0] for prompt in some]
        together = ask(engine, reversed(case.prompts))[::-1]
        assert engine.stats().prefix_cache_hits > cold
    assert alone == wanted[: len(some)]
    assert again == wanted[: len(some)]
    assert together == wanted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_preemption(case_of: CaseOf, plain: Plain, dtype: str) -> None:
    """A pool little larger than the longest request forces recomputation."""
    case = case_of(VARIANT)
    model = load_model_config(case.path)
    bytes_per_token = 2 * {"float32": 4, "bfloat16": 2}[dtype] * model.num_layers * model.kv_size
    longest = max(map(len, case.prompts)) + NUM_TOKENS
    config = settings_of(
        case, dtype=dtype, transport="shm", kv_cache_bytes=(longest + 8) * bytes_per_token
    )
    with Engine(config) as engine:
        assert ask(engine, case.prompts) == plain(VARIANT, dtype)
        assert engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("redundant", [3, 8])
def test_any_choice_of_replicas(case_of: CaseOf, plain: Plain, redundant: int) -> None:
    """Second copies change which node computes a pair, and with which other pairs."""
    copies = {"redundant_experts": redundant, "balance": BalancePolicy(interval_s=0.0)}
    config = settings_of(case_of(VARIANT), dtype="bfloat16", **layout("shm", 2, 3, 2), **copies)
    with Engine(config) as engine:
        assert ask(engine, case_of(VARIANT).prompts) == plain(VARIANT, "bfloat16")


@pytest.mark.slow
def test_compressed_payloads_keep_the_promise(case_of: CaseOf, plain: Plain) -> None:
    """Scales are per token, so int8 rows too are the same in any batch."""
    case = case_of(VARIANT)
    alone = run(case, dtype="bfloat16", payload="int8")
    assert alone != plain(VARIANT, "bfloat16")
    assert run(case, dtype="bfloat16", payload="int8", **layout("tcp", 2, 3, 3)) == alone


@slow
def test_seeded_draws(case_of: CaseOf) -> None:
    case = case_of(VARIANT)
    sampling = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.001, "presence_penalty": 0.3}
    answers = []
    for settings in (PLAIN, layout("tcp", 2, 3, 2)):
        with Engine(settings_of(case, dtype="bfloat16", **settings)) as engine:
            answers.append(ask(engine, case.prompts, **sampling))
    assert answers[0] == answers[1]
