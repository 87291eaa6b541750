"""Greedy fp32 tokens equal transformers' where nodes compute on a device, sampled ones the CPU's.

The device is the CPU: Triton's kernels are interpreted, and all else is what a GPU's nodes do
(Place.is_device), but for the calls into its driver. Interpretation is slow, hence few prompts
and tokens; and it is no work for two threads at once, so roles that compute at the same time in
threads of this process have one on Triton and one on the CPU's kernels, and whole processes are
tests/system/test_devices.py's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import Engine, engine_config
from tests.identity.conftest import Case, CaseOf

NUM_TOKENS = 5
# Short ones: two in a step, and one that joins them with a longer context.
PROMPTS = 3


def short(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shortest prompts of `case` and the beginnings of their continuations."""
    order = sorted(range(len(case.prompts)), key=lambda idx: len(case.prompts[idx]))[:PROMPTS]
    return (
        [case.prompts[idx] for idx in order],
        [case.tokens[idx][:NUM_TOKENS] for idx in order],
    )


def check(case: Case, **settings: Any) -> None:
    config = engine_config(case.path, kernels="triton", **settings)
    prompts, tokens = short(case)
    with Engine(config) as engine:
        assert engine.generate(prompts, max_tokens=NUM_TOKENS) == tokens


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("qwen2_moe", {}),
        ("qwen3_moe", {"gpu_streams": 2, "micro_batches": 2, "expert_nodes": 2}),
        ("mixtral_sliding_window", {"cuda_graphs": False, "micro_batches": 2}),
    ],
)
def test_attention_and_experts_on_one_device(
    case_of: CaseOf, variant: str, settings: dict[str, Any]
) -> None:
    check(case_of(variant), **settings)


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_attention_on_a_device_and_experts_on_the_cpu(case_of: CaseOf, transport: Any) -> None:
    check(
        case_of("qwen2_moe"),
        transport=transport,
        expert_kernels="cpu",
        expert_nodes=2,
        micro_batches=2,
    )
