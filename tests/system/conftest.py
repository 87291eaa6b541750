"""A tiny checkpoint with transformers' answers, shared by the tests of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import make_checkpoint, oracle_generate

PROMPTS = [[5, 9, 200, 31, 77], list(range(40, 70)), [250]]
NUM_TOKENS = 24
MIN_MARGIN = 1e-3


class Tiny(NamedTuple):
    """A checkpoint, prompts, and their greedy continuations by transformers in fp32."""

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3_moe")
    result = oracle_generate(path, PROMPTS, NUM_TOKENS)
    assert min(result.margins) >= MIN_MARGIN, result.margins
    return Tiny(path, PROMPTS, result.tokens)
