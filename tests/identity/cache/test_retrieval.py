"""Decoding with retrieval against transformers with the same selection in its attention."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from app.cli.trace.accounts import accounts_of
from app.cli.trace.report import lanes_of
from attention_nodes.long_contexts.retrieval import place_bytes
from kernels.contracts import SEGMENT_KEYS, KeyCodes, Retrieval
from kernels.retrieval import encode, learn_codebooks, select, summaries_of
from models.description.config import load_model_config
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_model
from tests.engine import Engine, engine_config
from tests.structs import changed
from topspin.devices import KernelName
from topspin.plan.kv_cache import KvLayerRule
from topspin.plan.retrieval import RetrievalPolicy, policy_of
from topspin.plan.speculation import Speculation
from topspin.trace import Kind

NUM_TOKENS = 12
BUDGET = 96
PROMPT_LENS = (SEGMENT_KEYS + 250, 2 * SEGMENT_KEYS + 18, 300)
DELAY = 64
CACHE_BYTES = 24 * 2**20


def codebooks_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the codebooks of one segment, which are learnt once though each step asks."""
    return _codebooks_of_bytes(keys.contiguous().numpy().tobytes(), tuple(keys.shape))


@cache
def _codebooks_of_bytes(values: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    keys = torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)
    return learn_codebooks(keys, num_iterations=4)


def codes_of(keys: torch.Tensor, closed: int, coded: int) -> KeyCodes:
    """Return the codes of the first `coded` keys [G, n, D], a segment behind the other.

    What is behind the first `closed` is coded by the last codebook of these.
    """
    centroids, codes, summaries = [], [], []
    for begin in range(0, coded, SEGMENT_KEYS):
        own = keys[:, begin : min(begin + SEGMENT_KEYS, coded)]
        book = codebooks_of(own) if begin < closed else centroids[-1]
        centroids.append(book)
        found = torch.zeros(*book.shape[:2], SEGMENT_KEYS, dtype=torch.uint8)
        found[:, :, : own.shape[1]] = encode(own, book)
        codes.append(found)
        summaries.append(summaries_of(own))
    return KeyCodes(torch.stack(centroids), torch.stack(codes), torch.stack(summaries))


class Oracle:
    """Attention of transformers in which a decoded token sees what `policy` lets it see."""

    def __init__(self, policy: RetrievalPolicy) -> None:
        self.policy = policy
        self.in_fp8 = False
        self.layers = (0, 1)
        """Those that select keys, and keep them in fp8 if any does."""
        self.num_selected = 0
        self.recalls: list[float] = []
        """By step, and in it by layer, the share of the best keys that are selected."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        is_plain = module.layer_idx not in self.layers
        if self.in_fp8 and not is_plain:
            key, value = (each.to(torch.float8_e4m3fn).float() for each in (key, value))
        repeat, num_new, length = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        seen = torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new)
        seen = seen.expand(query.shape[1], num_new, length)
        if num_new == 1 and not is_plain:
            kept = self._kept(query[0].transpose(0, 1), key[0], length - 1)
            seen = seen & kept.repeat_interleave(repeat, 0)[:, None]
        scores = query[0] @ key[0].repeat_interleave(repeat, 0).transpose(1, 2) * scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out = weights @ value[0].repeat_interleave(repeat, 0)
        return out.transpose(0, 1)[None], None

    def _kept(self, query: torch.Tensor, keys: torch.Tensor, committed: int) -> torch.Tensor:
        policy = self.policy
        kept = torch.ones(len(keys), committed + 1, dtype=torch.bool)
        closed = (committed - min(DELAY, policy.num_recent)) // SEGMENT_KEYS * SEGMENT_KEYS
        coded = max(closed, 0)
        if coded:
            coded = max(coded, (committed - policy.num_recent) // 64 * 64)
        coded = min(coded, closed + SEGMENT_KEYS)
        end = min(coded, committed - policy.num_recent)
        if end - policy.num_sinks <= policy.num_selected:
            return kept
        codes = codes_of(keys, closed, coded)
        summarised = min(closed, end - 1) // SEGMENT_KEYS
        searched = summarised if policy.num_searched is None else policy.num_searched // 1024
        retrieval = Retrieval(
            seqs=torch.zeros(1, dtype=torch.int32),
            segments=torch.arange(len(codes.codes), dtype=torch.int32)[None],
            coded_end=torch.tensor([end], dtype=torch.int32),
            budgets=torch.tensor([policy.num_selected], dtype=torch.int32),
            summarised=torch.tensor([summarised], dtype=torch.int32),
            kept=torch.tensor([min(searched, summarised)], dtype=torch.int32),
            num_sinks=policy.num_sinks,
        )
        kept[:, policy.num_sinks : end] = False
        selected = select(query, codes, retrieval, 0)
        self.recalls.append(recall_of(query[0], keys, selected, range(policy.num_sinks, end)))
        kept.scatter_(1, selected, True)
        self.num_selected += 1
        return kept


def recall_of(
    query: torch.Tensor, keys: torch.Tensor, selected: torch.Tensor, searched: range
) -> float:
    """Return the share of the best of the `searched` keys [G, n, D] that are `selected` [G, k]."""
    num_groups, count = selected.shape
    products = query.view(num_groups, -1, query.shape[-1]) @ keys.transpose(1, 2)
    found = 0
    for group, best in enumerate(products.amax(1).tolist()):
        ranked = sorted(searched, key=best.__getitem__, reverse=True)
        found += len(set(ranked[:count]) & set(selected[group].tolist()))
    return found / (num_groups * count)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    policy = policy_of(BUDGET)
    assert policy is not None
    made = Oracle(policy)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "retrieving", made.attend)
    return made


def generate(path: Any, prompts: list[list[int]], implementation: str) -> list[list[int]]:
    model = oracle_model(path)
    model.set_attn_implementation(implementation)
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    return make_checkpoint(directory, "qwen3_moe", max_position_embeddings=4096)


def prompts_of(lengths: tuple[int, ...] = PROMPT_LENS) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB_SIZE - 8, size=length).tolist() for length in lengths]


def config_of(path: Any, **settings: Any) -> Any:
    return engine_config(
        path,
        block_size=16,
        kv_cache_bytes=CACHE_BYTES,
        max_num_batched_tokens=512,
        window_rows=256,
        **settings,
    )


@pytest.mark.parametrize(
    ("variant", "kernels", "kv_cache_dtype", "lengths"),
    [
        ("qwen3_moe", "cpu", "auto", (SEGMENT_KEYS + 250, 300)),
        pytest.param("qwen3_moe", "cpu", "auto", PROMPT_LENS, marks=pytest.mark.slow),
        pytest.param("llama", "reference", "auto", PROMPT_LENS, marks=pytest.mark.slow),
        pytest.param("llama", "cpu", "fp8", PROMPT_LENS, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers_with_the_same_selection(
    tmp_path: Any,
    oracle: Oracle,
    variant: str,
    kernels: Any,
    kv_cache_dtype: Any,
    lengths: tuple[int, ...],
) -> None:
    path = make_checkpoint(tmp_path, variant, max_position_embeddings=4096)
    prompts = prompts_of(lengths)
    dense = generate(path, prompts, "eager")
    oracle.in_fp8 = kv_cache_dtype == "fp8"
    expected = generate(path, prompts, "retrieving")
    assert oracle.num_selected > 0
    assert expected != dense, "the selection matters"
    config = config_of(
        path, kernels=kernels, kv_cache_dtype=kv_cache_dtype, kv_retrieval_tokens=BUDGET
    )
    with Engine(config) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == expected
        stats = engine.stats()
    closed = [length // SEGMENT_KEYS for length in lengths]
    assert stats.kv.num_selected_rows > sum(map(bool, closed)) * NUM_TOKENS
    assert stats.kv.num_coded_segments == sum(closed)


@pytest.mark.slow
def test_layers_choose_whether_they_retrieve_and_how_they_are_kept(
    path: Path, oracle: Oracle
) -> None:
    prompts = prompts_of((SEGMENT_KEYS + 250, 300))
    oracle.in_fp8 = True
    others = [generate(path, prompts, each) for each in ("eager", "retrieving")]
    oracle.layers = (1,)
    expected = generate(path, prompts, "retrieving")
    assert expected not in others
    config = config_of(path, kv_cache_dtype="fp8", kv_retrieval_tokens=BUDGET)
    rule = KvLayerRule(layers=(0,), dtype="auto", retrieval=False)
    with Engine(changed(config, {"kv_cache.layers": (rule,)})) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == expected
        assert engine.stats().kv.num_selected_rows == NUM_TOKENS - 1, "one layer's"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_only_the_best_segments_are_searched(path: Path, oracle: Oracle, kernels: Any) -> None:
    prompts = prompts_of((3 * SEGMENT_KEYS + 200, 2 * SEGMENT_KEYS - 4))
    everywhere = generate(path, prompts, "retrieving")
    oracle.policy = msgspec.structs.replace(oracle.policy, num_searched=SEGMENT_KEYS)
    expected = generate(path, prompts, "retrieving")
    assert expected != everywhere, "the choice of segments matters"
    config = config_of(path, kernels=kernels, kv_retrieval_tokens=BUDGET)
    with Engine(changed(config, {"kv_cache.retrieval": oracle.policy})) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == expected


@pytest.mark.slow
def test_requests_choose_how_many_keys(path: Path, oracle: Oracle) -> None:
    """In one batch: the server's number, a request's own, and all."""
    (prompt,) = prompts_of((SEGMENT_KEYS + 250,))
    expected = [*generate(path, [prompt], "eager"), *generate(path, [prompt], "retrieving")]
    oracle.policy = oracle.policy.with_tokens(300)
    expected += generate(path, [prompt], "retrieving")
    assert len({str(tokens) for tokens in expected}) == 3
    # The compiled search takes keys of nearly equal scores for equal.
    with Engine(config_of(path, kernels="reference", kv_retrieval_tokens=BUDGET)) as engine:
        ids = [
            engine.add(prompt, max_tokens=NUM_TOKENS, kv_retrieval_tokens=asked)
            for asked in (0, None, 300)
        ]
        engine.collect()
        assert [engine.requests[each].tokens for each in ids] == expected


@pytest.mark.slow
def test_recall_is_that_of_a_search_of_all_keys(
    path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels round scores, so that they may select others of nearly equal keys."""
    prompts = prompts_of((2 * SEGMENT_KEYS + 90,))
    tokens = generate(path, prompts, "retrieving")
    num_steps = len(oracle.recalls) // 2
    assert num_steps == NUM_TOKENS - 1
    period = 3
    wanted = [
        oracle.recalls[2 * step + turn % 2] for turn, step in enumerate(range(0, num_steps, period))
    ]
    assert 0.1 < min(wanted) < max(wanted) < 0.95, "it is neither chance nor all"
    monkeypatch.setattr("attention_nodes.long_contexts.retrieval.RECALL_PERIOD", period)
    checks: tuple[tuple[KernelName, float], ...] = (("reference", 1e-6), ("cpu", 0.01))
    for kernels, tolerance in checks:
        with Engine(config_of(path, kernels=kernels, kv_retrieval_tokens=BUDGET)) as engine:
            assert engine.generate(prompts, max_tokens=NUM_TOKENS) == tokens
            stats = engine.stats()
        assert stats.kv.num_recalls == len(wanted)
        assert stats.kv.recall_sum / len(wanted) == pytest.approx(np.mean(wanted), abs=tolerance)


@pytest.mark.slow
def test_a_budget_for_the_whole_context_is_plain_attention(path: Path) -> None:
    prompts = prompts_of()
    with Engine(config_of(path)) as engine:
        expected = engine.generate(prompts, max_tokens=NUM_TOKENS)
    with Engine(config_of(path, kv_retrieval_tokens=4096)) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == expected
        assert engine.stats().kv.num_selected_rows == 0


@pytest.mark.slow
def test_shared_prefixes_share_codes(path: Path) -> None:
    (prompt,) = prompts_of((2 * SEGMENT_KEYS + 90,))
    with Engine(config_of(path, kv_retrieval_tokens=BUDGET)) as engine:
        first = engine.generate([prompt], max_tokens=NUM_TOKENS)
        coded = engine.stats().kv.num_coded_segments
        assert engine.generate([prompt], max_tokens=NUM_TOKENS) == first
        stats = engine.stats()
    assert stats.prefix_cache_hits > 0
    assert coded == stats.kv.num_coded_segments == 2


@pytest.mark.slow
@pytest.mark.parametrize("recordings", [True, False])
def test_search_and_attention_are_apart_in_the_trace(path: Path, recordings: bool) -> None:
    config = config_of(
        path, kv_retrieval_tokens=BUDGET, transport="shm", num_threads=2, recordings=recordings
    )
    with Engine(config) as engine:
        engine.generate(prompts_of((SEGMENT_KEYS + 250,)), max_tokens=NUM_TOKENS)
        lanes = lanes_of(engine.trace(60.0))
    (attention,) = [lane for lane in lanes if lane.role == "attention"]
    last = max(span.step for span in attention.spans)
    parts = (Kind.ATTENTION, Kind.SEARCHED, Kind.READ, Kind.ATTENDED)
    found = [(s.layer, s.kind) for s in attention.spans if s.step == last and s.kind in parts]
    one = [Kind.ATTENTION, Kind.SEARCHED, Kind.ATTENDED, Kind.ATTENTION]
    assert found == [(layer, kind) for layer in range(2) for kind in one]
    accounts = {each.name: each.seconds for each in accounts_of(attention, [], [last], None)}
    assert accounts["search for keys"] > 0
    assert accounts["attention to selected keys"] > 0


@pytest.mark.slow
def test_codebooks_are_learnt_while_rows_are_with_experts(
    path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which changes no token: those of a prompt, and of a segment that closes beside it."""
    (prompt,) = prompts_of((2 * SEGMENT_KEYS + 18,))
    expected = generate(path, [prompt], "retrieving")
    config = config_of(path, kv_retrieval_tokens=BUDGET, transport="shm")
    num_learnt = []
    for num_rows in (1, 10**6):
        monkeypatch.setattr("attention_nodes.long_contexts.contexts.LEARNING_ROWS", num_rows)
        with Engine(config) as engine:
            assert engine.generate([prompt], max_tokens=NUM_TOKENS) == expected
            lanes = lanes_of(engine.trace(60.0))
        (spans,) = [lane.spans for lane in lanes if lane.role == "attention"]
        kinds = [span.kind for span in spans]
        num_learnt.append(sum(pair == (Kind.CODED, Kind.ARRIVED) for pair in pairwise(kinds)))
    # A segment's two layers, or more where the prompt ends with some left.
    assert num_learnt[0] >= 2
    assert num_learnt[1] == 0


@pytest.mark.slow
def test_preempted_sequences_are_coded_again(path: Path) -> None:
    """Two do not fit: one is preempted and begins again; the other answers the same.

    What the first had generated is computed again as a prompt, with attention to all keys, so that
    its later tokens may be others.
    """
    prompts = prompts_of((SEGMENT_KEYS + 300, SEGMENT_KEYS + 295))
    bytes_per_token = 2 * 4 * 2 * 2 * 32
    longest = 2 * SEGMENT_KEYS + 595
    settings: dict[str, Any] = {"kv_retrieval_tokens": BUDGET, "prefix_caching": False}
    with Engine(config_of(path, **settings)) as engine:
        expected = engine.generate(prompts, max_tokens=3 * NUM_TOKENS)[0]
    place = place_bytes(load_model_config(path), config_of(path, **settings).kv_cache)
    config = engine_config(
        path,
        block_size=16,
        kv_cache_bytes=(longest + 32) * bytes_per_token + 4 * place,
        max_num_batched_tokens=512,
        window_rows=256,
        **settings,
    )
    with Engine(config) as engine:
        found = engine.generate(prompts, max_tokens=3 * NUM_TOKENS)
        stats = engine.stats()
    assert found[0] == expected
    assert len(found[1]) == 3 * NUM_TOKENS
    assert stats.num_preemptions > 0
    assert stats.kv.num_selected_rows > 0


def test_drafts_of_a_sequence_share_its_selection(path: Path) -> None:
    """What a draft is verified by is another selection, so tokens may differ; none is lost."""
    (prompt,) = prompts_of((64,))
    speculation = Speculation(
        method="ngram", prompt_lookup_max=1, adaptive=False, num_speculative_tokens=4
    )
    config = config_of(path, kv_retrieval_tokens=BUDGET, speculation=speculation)
    with Engine(config) as engine:
        (found,) = engine.generate([prompt * 20], max_tokens=NUM_TOKENS)
        stats = engine.stats()
    assert len(found) == NUM_TOKENS
    assert stats.num_drafts > 0
    assert stats.kv.num_selected_rows > 0
