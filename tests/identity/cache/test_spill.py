"""Tokens with keys in a file are those with all keys in memory, whatever is spilled when."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from app.cli.trace.report import lanes_of
from attention_nodes.long_contexts.spill_file import SpillFile
from attention_nodes.step.sequences import IntArray
from kernels.contracts import SEGMENT_KEYS
from server.scheduler.planning import load_balancing
from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.identity.cache.test_retrieval import prompts_of
from topspin.plan.retrieval import SpillSpec
from topspin.plan.settings import KvDtype
from topspin.plan.speculation import Speculation
from topspin.trace import Kind

BUDGET = 64
NUM_TOKENS = 24
BYTES_PER_TOKEN = 2 * 4 * 2 * 2 * 32
"""Keys and values of the tiny model in fp32."""
NUM_BLOCKS = 5000
RECORD_BYTES = {"auto": 20 * 1024, "fp8": 8 * 1024}
"""Of a block of 16 tokens in the file."""
BESIDE = 3 * 2**20 + NUM_BLOCKS * 16 * 4 * 4
"""Codes, and where copies are: 4 bytes for each token, layer and head."""
LENGTH = 3 * SEGMENT_KEYS + 100


def config_of(path: Path, memory_tokens: int, spill: Path | None, **settings: Any) -> Any:
    """Return a configuration with about so many tokens in memory, and others in `spill`."""
    dtype = settings.get("kv_cache_dtype", "auto")
    token_bytes = BYTES_PER_TOKEN // (1 if dtype == "auto" else 4)
    if spill is not None:
        size_bytes = NUM_BLOCKS * RECORD_BYTES[dtype]
        settings["kv_spill"] = SpillSpec(directory=str(spill), size_bytes=size_bytes)
    return engine_config(
        path,
        block_size=16,
        kv_cache_bytes=memory_tokens * token_bytes + BESIDE,
        kv_retrieval_tokens=BUDGET,
        max_num_batched_tokens=512,
        window_rows=256,
        **settings,
    )


@pytest.fixture(autouse=True)
def _enter_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts fill the memory together: otherwise streams end before the next prompt is in."""
    monkeypatch.setattr(load_balancing, "UNPACED_S", math.inf)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "qwen3_moe", max_position_embeddings=8192)


@pytest.mark.slow
def test_sixteen_requests_of_several_times_the_memory(path: Path, tmp_path: Path) -> None:
    prompts = prompts_of(tuple(LENGTH + 37 * idx for idx in range(16)))
    with Engine(config_of(path, 80_000, None)) as engine:
        expected = engine.generate(prompts, max_tokens=NUM_TOKENS)
    with Engine(config_of(path, 13_000, tmp_path)) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == expected
        stats = engine.stats()
        assert not list(tmp_path.iterdir()), "the file has a name"
    num_blocks = sum(map(len, prompts)) // 16
    assert num_blocks * 16 > 4 * 13_000
    assert stats.kv.num_saved_blocks > num_blocks // 3
    assert stats.kv.num_read_keys > 0
    assert stats.kv.num_hot_keys > 0
    assert stats.num_preemptions == 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "memory_tokens"), [("auto", 6_000), ("fp8", 10_000)])
def test_prefixes_and_decoded_tokens_come_back_from_the_file(
    path: Path, tmp_path: Path, dtype: KvDtype, memory_tokens: int
) -> None:
    """A prompt is asked again, longer, after others have taken its memory."""
    first, *others = prompts_of((LENGTH, LENGTH + 40, LENGTH + 80, LENGTH + 120))
    rounds = []
    for num_tokens, spill in ((80_000, None), (memory_tokens, tmp_path)):
        with Engine(config_of(path, num_tokens, spill, kv_cache_dtype=dtype)) as engine:
            (answer,) = engine.generate([first], max_tokens=200)
            engine.generate(others, max_tokens=NUM_TOKENS)
            again = engine.generate([first + answer + [5, 6, 7]], max_tokens=NUM_TOKENS)
            stats = engine.stats()
            rounds.append((answer, again, stats.prefix_cache_hits))
            spans = [span for lane in lanes_of(engine.trace(60.0)) for span in lane.spans]
        kinds = [span.kind for span in spans]
        assert {Kind.FETCHED, Kind.CODED, Kind.ATTENDED} <= set(kinds)
        if spill is not None:
            assert (Kind.SEARCHED, Kind.READ, Kind.ATTENDED) in zip(
                kinds, kinds[1:], kinds[2:], strict=False
            )
    assert rounds[0] == rounds[1]
    assert rounds[1][2] > LENGTH
    assert stats.kv.num_loaded_blocks > LENGTH // 16


@pytest.mark.slow
@pytest.mark.slow
def test_requests_that_attend_to_all_stay_in_memory(path: Path, tmp_path: Path) -> None:
    """Beside others that retrieve; they wait for their turn."""
    prompts = prompts_of((LENGTH, LENGTH + 10, LENGTH + 20, LENGTH + 30))
    asked = (0, None, 0, 300)
    found = []
    for memory_tokens, spill in ((80_000, None), (7_000, tmp_path)):
        with Engine(config_of(path, memory_tokens, spill)) as engine:
            ids = [
                engine.add(prompt, max_tokens=NUM_TOKENS, kv_retrieval_tokens=tokens)
                for prompt, tokens in zip(prompts, asked, strict=True)
            ]
            engine.collect()
            found.append([engine.requests[each].tokens for each in ids])
            num_saved = engine.stats().kv.num_saved_blocks
    assert found[0] == found[1]
    assert num_saved > 0


@pytest.mark.slow
def test_drafts_and_preemptions(path: Path, tmp_path: Path) -> None:
    """All requests end with all their tokens; what a preempted one computes again may differ.

    The four that attend to all fit the memory when they begin, and grow out of it.
    """
    prompts = [prompt[:1500] for prompt in prompts_of((LENGTH, LENGTH + 1, LENGTH + 2, LENGTH + 3))]
    long = prompts_of((LENGTH + 40, LENGTH + 50))
    speculation = Speculation(
        method="ngram", prompt_lookup_max=1, adaptive=False, num_speculative_tokens=4
    )
    config = config_of(path, 6_300, tmp_path, speculation=speculation)
    with Engine(config) as engine:
        first = engine.generate(long, max_tokens=NUM_TOKENS)
        ids = [engine.add(each, max_tokens=300, kv_retrieval_tokens=0) for each in prompts]
        engine.collect()
        again = engine.generate(long, max_tokens=NUM_TOKENS)
        stats = engine.stats()
    assert [len(engine.requests[each].tokens) for each in ids] == [300] * 4
    assert [len(each) for each in first + again] == [NUM_TOKENS] * 4
    assert stats.num_drafts > 0
    assert stats.num_preemptions > 0
    assert stats.kv.num_loaded_blocks > 0


def test_a_prompt_that_fills_the_memory_holds_up_nobody(path: Path, tmp_path: Path) -> None:
    (prompt,) = prompts_of((8000,))
    with Engine(config_of(path, 3_000, tmp_path)) as engine:
        most = engine.state.max_request_tokens
        ids = [engine.add(prompt[:count], max_tokens=0) for count in (most, most - 1)]
        ids.append(engine.add(prompt[:20], max_tokens=3))
        engine.collect()
        assert [engine.requests[each].failed for each in ids] == [None] * 3


FAILING = prompts_of(tuple(LENGTH + 37 * idx for idx in range(8)))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Return the answers to FAILING with all keys in memory."""
    with Engine(config_of(path, 80_000, None)) as engine:
        return engine.generate(FAILING, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize(
    "fails", ["load", *(pytest.param(each, marks=pytest.mark.slow) for each in ("save", "cut"))]
)
def test_a_file_that_fails_fails_the_requests_that_need_it(
    path: Path,
    tmp_path: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """None gets wrong tokens, and the engine serves on."""
    num_saved = 0
    save = SpillFile.save

    def break_it(file: SpillFile, blocks: IntArray, frames: IntArray, beat: Any) -> IntArray:
        nonlocal num_saved
        num_saved += len(blocks)
        if num_saved < 300:
            return save(file, blocks, frames, beat)
        if fails == "save":
            return blocks
        unsaved = save(file, blocks, frames, beat)
        if fails == "cut":
            size = os.fstat(file.fd).st_size
            os.ftruncate(file.fd, 0)
            os.ftruncate(file.fd, size)  # zeros are read from now on
            return unsaved
        empty = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
        os.dup2(empty, file.fd)  # nothing can be read from now on
        os.close(empty)
        return unsaved

    with Engine(config_of(path, 8_000, tmp_path)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(SpillFile, "save", break_it)
            ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in FAILING]
            engine.collect()
        failed = 0
        for each, tokens in zip(ids, expected, strict=True):
            request = engine.requests[each]
            if request.failed is None:
                assert request.tokens == tokens
            else:
                failed += 1
                assert "--kv-spill-dir" in request.failed.message
                assert request.tokens == tokens[: len(request.tokens)]
        assert failed > 0
        assert len(engine.generate([[9] * 200], max_tokens=5)[0]) == 5
        if fails == "save":
            # What failed is computed again, and coded from its own keys.
            assert engine.generate(FAILING[:3], max_tokens=NUM_TOKENS) == expected[:3]
