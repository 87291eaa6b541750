"""Recorded decode steps on the CPU give the tokens of the same steps layer by layer, in bf16.

The kernels are the same, and a row's result does not depend on other rows, so tokens are equal,
drawn ones too. That steps without recordings are right is for the other tests of this folder.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from attention_nodes.step import recorded_steps
from kernels.contracts import SEGMENT_KEYS, AttentionMeta
from kernels.cpu import attention
from kernels.cpu.compiled.matmul.linear import block_width
from kernels.cpu.compiled.program import Program
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine import Engine, engine_config
from tests.pairwise import slow_rows
from topspin.plan.precision import Format, PrecisionRule
from topspin.plan.settings import KvDtype, Transport
from topspin.plan.speculation import Speculation

pytestmark = pytest.mark.skipif(
    not block_width(), reason="this processor leaves bf16 products to oneDNN"
)

# Longer ones would be attended to in groups, whose sums depend on who else is there.
PROMPTS = [[7, 3, 9, 200, 4], [17] * 8, [5], [100, 101, 102, 250], [9, 8, 7, 6, 5, 4, 3, 2]]
NUM_TOKENS = 20
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128}


def run(path: Path, weights: Format, *, recordings: bool, **settings: Any) -> Any:
    """Return greedy and drawn continuations, greedy ones again, and how often a program ran."""
    plan = engine_config(
        path,
        dtype="bfloat16",
        window_rows=64,
        num_threads=2,
        recordings=recordings,
        **settings,
    )
    rules = () if weights == "none" else (PrecisionRule(format=weights, part="experts"),)
    with (
        mock.patch.object(Program, "run", autospec=True, side_effect=Program.run) as replay,
        Engine(msgspec.structs.replace(plan, precision=rules)) as engine,
    ):
        greedy = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        drawn = engine.generate(PROMPTS[:2], max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
        again = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    return greedy, drawn, again, replay.call_count


@pytest.mark.parametrize(
    ("variant", "weights", "expert_nodes", "kv_cache_dtype"),
    [
        ("qwen3_moe", "none", 1, "auto"),
        pytest.param("mixtral", "int4", 2, "fp8", marks=pytest.mark.slow),
        pytest.param("llama", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("olmoe_clip_qkv", "none", 1, "fp8", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "mxfp4", 1, "auto", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("minimax_m2", "none", 2, "auto", marks=pytest.mark.slow),
        pytest.param("ernie4_5_moe", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "int8", 2, "fp8", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", "none", 1, "auto", marks=pytest.mark.slow),
        pytest.param("olmoe", "none", 2, "auto", marks=pytest.mark.slow),
        pytest.param("mixtral", "none", 2, "auto", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "int8", 1, "fp8", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_steps_layer_by_layer(
    tmp_path: Path,
    variant: str,
    weights: Format,
    expert_nodes: int,
    kv_cache_dtype: KvDtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "recordings")
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "expert_nodes": expert_nodes}
    sizes = dict(SIZES)
    if not variant.startswith(("qwen", "glm", "ernie", "deepseek")):
        sizes["intermediate_size"] = sizes.pop("moe_intermediate_size")
    path = make_checkpoint(tmp_path, variant, **sizes)
    *plain, none = run(path, weights, recordings=False, **settings)
    *recorded, runs = run(path, weights, recordings=True, **settings)
    assert recorded == plain
    assert none == 0
    assert runs > 2 * NUM_TOKENS - 10
    assert "not recorded" not in caplog.text


DRAFT_MODEL = Speculation(
    method="draft_model",
    model="self-int4",
    num_speculative_tokens=6,
    adaptive=False,
    branches=True,
    draft_width=3,
    draft_passes=3,
)


@pytest.mark.slow
def test_steps_and_passes_with_trees_are_recorded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of a tree has the bits of the same row in plain decoding."""
    caplog.set_level("INFO", "recordings")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    path = make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    *plain, none = run(path, "none", recordings=False)
    trees: Counter[str] = Counter()
    renew = attention.renew

    def counted(recorded: AttentionMeta, fresh: AttentionMeta) -> None:
        if fresh.tree_mask is not None:
            trees["target" if fresh.tree_lens is None else "draft"] += 1
        renew(recorded, fresh)

    monkeypatch.setattr("kernels.cpu.attention.renew", counted)
    *found, runs = run(path, "none", recordings=True, speculation=DRAFT_MODEL)
    assert found == plain
    assert none == 0
    assert runs > NUM_TOKENS
    assert min(trees["target"], trees["draft"]) > NUM_TOKENS // 2
    assert "not recorded" not in caplog.text


@pytest.mark.parametrize(
    ("single_rows", "kv_cache_dtype"),
    slow_rows([(8, "fp8")], beside=[(8, "auto"), (32, "auto")]),
)
def test_steps_of_parts_of_prompts_are_recorded_too(
    tmp_path: Path,
    single_rows: int,
    kv_cache_dtype: KvDtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 9 to 32 rows: whole ones, and the ends of longer ones; in groups, and one by one."""
    monkeypatch.setattr("kernels.cpu.attention.SINGLE_ROWS", single_rows)
    monkeypatch.setattr("attention_nodes.step.recorded_steps.SINGLE_ROWS", single_rows)
    caplog.set_level("INFO", "recordings")
    path = make_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    monkeypatch.setattr("kernels.cpu.attention.renew", renew := mock.Mock(wraps=attention.renew))
    rng = np.random.default_rng(4)
    lengths = (20, 32, 20, 32 + 20, 20, 32 + 20)
    prompts = [rng.integers(0, VOCAB_SIZE - 8, size=length).tolist() for length in lengths]
    found = []
    for recordings in (False, True):
        config = engine_config(
            path,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            max_num_batched_tokens=32,
            window_rows=32,
            num_threads=2,
            recordings=recordings,
        )
        with Engine(config) as engine:  # one by one: who else is there changes a group's sums
            found.append([engine.generate([each], max_tokens=4) for each in prompts])
    assert found[0] == found[1]
    joined = [call.args[1].max_query_len for call in renew.call_args_list]
    assert Counter(joined)[20] == 4
    assert Counter(joined)[32] == 1
    assert "not recorded" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_steps_that_retrieve_are_recorded_too(
    tmp_path: Path,
    kv_cache_dtype: KvDtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beside sequences that do not; both grow, and one begins to retrieve meanwhile.

    Steps whose selections are looked at are not, and give the same tokens.
    """
    caplog.set_level("INFO", "recordings")
    path = make_checkpoint(tmp_path, "qwen3_moe", max_position_embeddings=2048, **SIZES)
    rng = np.random.default_rng(4)
    # Codebooks come into use with the 24th token behind their segment.
    lengths = (SEGMENT_KEYS + 200, SEGMENT_KEYS + 15, 300)
    prompts = [rng.integers(0, VOCAB_SIZE - 8, size=length).tolist() for length in lengths]
    monkeypatch.setattr("kernels.cpu.attention.renew", renew := mock.Mock(wraps=attention.renew))
    monkeypatch.setattr("attention_nodes.long_contexts.retrieval.RECALL_PERIOD", 5)
    found = []
    for recordings in (False, True):
        config = engine_config(
            path,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            kv_retrieval_tokens=96,
            kv_cache_bytes=8 * 2**20,
            block_size=16,
            num_threads=2,
            recordings=recordings,
        )
        with Engine(config) as engine:
            found.append(engine.generate(prompts, max_tokens=2 * NUM_TOKENS))
            counts = engine.stats().kv
        assert counts.num_selected_rows > 2 * NUM_TOKENS
        assert 2 * NUM_TOKENS // 5 <= counts.num_recalls <= NUM_TOKENS
        assert 0 < counts.recall_sum < counts.num_recalls
    assert found[0] == found[1]
    kinds = Counter(call.args[1].retrieval is not None for call in renew.call_args_list)
    assert kinds[True] > NUM_TOKENS
    assert "not recorded" not in caplog.text


@pytest.mark.slow
def test_steps_of_heads_whose_keys_are_searched_in_plain_torch_are_called_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the positions of their own, not of the step that could not be recorded."""
    caplog.set_level("INFO", "recordings")
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=2048, head_dim=24)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, VOCAB_SIZE - 8, size=n).tolist() for n in (SEGMENT_KEYS + 150, 30)]
    found = []
    for recordings in (False, True):
        config = engine_config(
            path,
            dtype="bfloat16",
            kv_retrieval_tokens=96,
            block_size=16,
            max_num_batched_tokens=512,
            window_rows=256,
            recordings=recordings,
        )
        with Engine(config) as engine:
            # One after the other: plain torch rounds by the chunks of a prompt, and these depend
            # on when the other one arrives.
            found.append([engine.generate([each], max_tokens=NUM_TOKENS) for each in prompts])
            assert engine.stats().kv.num_selected_rows > NUM_TOKENS
    assert found[0] == found[1]
    assert "steps of this kind are not recorded" in caplog.text


@pytest.mark.slow
def test_a_recording_that_was_forgotten_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "llama", **SIZES)
    *plain, _ = run(path, "none", recordings=False)
    monkeypatch.setattr(recorded_steps, "MAX_RECORDINGS", 1)
    *recorded, runs = run(path, "none", recordings=True)
    assert recorded == plain
    assert runs > NUM_TOKENS


@pytest.mark.slow
def test_heads_that_share_long_keys_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many numbers as in DeepSeek-V2-Lite: tasks have some of a key's query heads."""
    caplog.set_level("INFO", "recordings")
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}
    path = make_checkpoint(tmp_path, "deepseek_v2_lite", num_key_value_heads=16, **SIZES, **sizes)
    *plain, none = run(path, "none", recordings=False)
    *recorded, runs = run(path, "none", recordings=True)
    assert recorded == plain
    assert (none, "not recorded" in caplog.text) == (0, False)
    assert runs > 2 * NUM_TOKENS - 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "attention_nodes", "expert_nodes", "micro_batches"),
    [
        ("shm", 1, 1, 1),
        ("shm", 2, 2, 2),
        ("tcp", 1, 3, 2),
    ],
)
def test_between_processes_the_hops_are_recorded_too(
    tmp_path: Path,
    transport: Transport,
    attention_nodes: int,
    expert_nodes: int,
    micro_batches: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "recordings")
    path = make_checkpoint(tmp_path, "mixtral", hidden_size=64, intermediate_size=64)
    *plain, none = run(path, "none", recordings=False, expert_nodes=expert_nodes)
    *recorded, runs = run(
        path,
        "none",
        recordings=True,
        expert_nodes=expert_nodes,
        attention_nodes=attention_nodes,
        transport=transport,
        micro_batches=micro_batches,
    )
    assert recorded == plain
    assert none == 0
    assert runs > 2 * (1 + expert_nodes) * NUM_TOKENS
    assert "not recorded" not in caplog.text
