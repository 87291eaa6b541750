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


def make_tiny(
    directory: Path, family: str, prompts: list[list[int]], num_tokens: int, *, margin: float
) -> Tiny:
    """Make a checkpoint in `directory`; its choices of tokens must be clear by `margin`."""
    path = make_checkpoint(directory, family)
    result = oracle_generate(path, prompts, num_tokens)
    assert min(result.margins) >= margin, result.margins
    return Tiny(path, prompts, result.tokens)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("tiny")
    return make_tiny(directory, "qwen3_moe", PROMPTS, NUM_TOKENS, margin=MIN_MARGIN)
