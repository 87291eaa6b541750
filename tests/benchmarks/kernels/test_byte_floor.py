"""The weights that a step of one request reads, counted by hand for a tiny model.

tests/deploy/rig/test_random_weights.py has that 16 and 32 bits are counted right for every family.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.byte_floor import decode_floor, step_weight_bytes
from kernels.dispatch import select_ops
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from topspin.plan.precision import Format, rules_of

# The tiny qwen3_moe: 2 layers, hidden 64, 4 query and 2 key/value heads of 32, 4 of 8 experts of
# width 32 a token, 288 logits. Matrices as (outputs, inputs):
QKV, OUT, EXPERT, HEAD = (256, 64), (64, 128), ((64, 64), (64, 32)), (288, 64)
# Per layer two norms, two heads' norms and the router; then the last norm.
PLAIN = 2 * (2 * 64 + 2 * 32 + 8 * 64) + 64


def numbers(matrix: tuple[int, int]) -> int:
    return matrix[0] * matrix[1]


def test_the_chosen_experts_count_and_the_embeddings_do_not(tmp_path: Path) -> None:
    model = load_model_config(make_checkpoint(tmp_path, "qwen3_moe"))
    layer = numbers(QKV) + numbers(OUT) + 4 * sum(map(numbers, EXPERT))
    assert step_weight_bytes(model) == 2 * (2 * layer + numbers(HEAD) + PLAIN)
    # In groups of 32 inputs: codes, and a step and a minimum of two bytes each.
    eight = 2 * layer + numbers(HEAD)
    assert step_weight_bytes(model, rules_of("int8")) == eight + eight // 32 * 4 + 2 * PLAIN
    # The LM head stays in 8 bits.
    four = 2 * layer // 2 + 2 * layer // 32 * 4
    head = numbers(HEAD) + numbers(HEAD) // 32 * 4
    assert step_weight_bytes(model, rules_of("int4")) == four + head + 2 * PLAIN


@pytest.mark.parametrize("precision", ["int8", "int4", "mxfp4"])
def test_quantised_weights_are_those_of_the_kernels(tmp_path: Path, precision: Format) -> None:
    model = load_model_config(make_checkpoint(tmp_path, "qwen3_moe"))
    ops = select_ops("cpu", torch.bfloat16, ["int8", precision])

    def packed(shape: tuple[int, int], form: Format) -> int:
        return ops.pack_linear(torch.randn(shape), form).data.nbytes

    layer = packed(QKV, precision) + packed(OUT, precision)
    layer += 4 * sum(packed(each, precision) for each in EXPERT)
    expected = 2 * layer + packed(HEAD, "int8") + 2 * PLAIN
    assert step_weight_bytes(model, rules_of(precision)) == expected


def test_a_dense_model_reads_all_of_it(tmp_path: Path) -> None:
    model = load_model_config(make_checkpoint(tmp_path, "llama"))
    # 2 layers: q, k, v and o [64, 64], an MLP of width 96, two norms; the last norm, 288 logits.
    dense = 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64 + 288 * 64
    assert step_weight_bytes(model) == 2 * dense


def test_floor_counts_what_the_tokens_need(tmp_path: Path) -> None:
    model = load_model_config(make_checkpoint(tmp_path, "qwen3_moe"))
    assert model.moe is not None
    nothing = decode_floor(model, itemsize=2, touched=[0, 0], contexts=[])
    floor = decode_floor(model, itemsize=2, touched=[3, 5], contexts=[10, 21])
    # Keys and values of 31 positions seen and 2 written.
    assert floor["kv"] == 2 * 2 * model.kv_size * model.num_layers * (31 + 2)
    assert floor["experts"] == 2 * 8 * 3 * model.hidden_size * model.moe.intermediate_size
    assert floor["embed"] == 2 * 2 * model.hidden_size
    assert {what for what in floor if floor[what] != nothing[what]} == {"kv", "experts", "embed"}
    layers = (replace(model.layers[0], sliding_window=12), *model.layers[1:])
    windowed = decode_floor(
        replace(model, layers=layers), itemsize=2, touched=[3, 5], contexts=[10, 21]
    )
    assert floor["kv"] - windowed["kv"] == 2 * 2 * model.kv_size * (21 - 12)
