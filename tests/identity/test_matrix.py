"""Every allowed pair of features is in an engine that gives the tokens of the reference.

The reference is transformers; where a feature rounds numbers (keys in fp8, say), it is one node of
each role in one process with what rounds and nothing else, whose tokens other tests of this folder
compare with transformers, and only tokens that lead by a margin count. A few rows run by default,
with each feature once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.contracts import SEGMENT_KEYS
from models.description.config import load_model_config
from models.description.facts import facts_of
from tests.checkpoints import VOCAB_SIZE
from tests.engine import Engine, engine_config
from tests.identity import matrix
from tests.identity.conftest import HEAD, NUM_TOKENS, PROMPT_LENS, Case, CaseOf, make_variant
from tests.identity.matrix import Row, covering_rows, is_rounded, made_of, some_of
from tests.models.quantised.forms import make_mxfp4
from tests.structs import changed
from topspin.plan.precision import PrecisionRule
from topspin.plan.rules.combinations import conflicts_in
from topspin.plan.rules.features import FEATURES
from topspin.plan.spec import EnginePlan

ROWS = covering_rows()
BY_DEFAULT = some_of(ROWS)
# In log-probabilities: far above what one code rounded the other way changes. Rounding costs models
# with sigmoid routers several times as much (tests/models/families/test_divergence.py).
MARGIN = 0.5
SIGMOID_MARGIN = 1.0
BY_SIGMOIDS = (*matrix.WITH_A_HEAD, "minimax_m2")
# An expert chosen the other way may turn a token that leads by any margin: with fp8 payloads a
# second expert node alone has taken 1.3 from a lead. What is wrong turns most prompts.
PROMPTS_PER_TURNED = 4
NUM_CLEAR = 4
MXFP4 = "/mxfp4"
# Few tokens, again and again: drafts find something in what was written.
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "max_tokens": NUM_TOKENS,
    "logit_bias": dict.fromkeys(range(40, 44), 18.0),
}
SPECULATION = ("drafts", "branches", "draft nodes")
Tokens = list[list[int]]


def test_every_allowed_pair_is_in_a_row() -> None:
    names = [name for axis in matrix.axes() for name in axis]
    met = {pair for row in ROWS for pair in map(frozenset, combinations(matrix.found_in(row), 2))}
    assert set(matrix.allowed_pairs()) <= met
    assert {name for pair in met for name in pair} >= {*names}
    assert {name for row in BY_DEFAULT for name in row} == {*names}


def test_other_pairs_are_of_the_table() -> None:
    """But for what a method of drafts has no use for, or no model of MODELS has, and formats."""
    allowed = set(matrix.allowed_pairs())
    others = {
        (one, other)
        for one, other in combinations(matrix.TRIED, 2)
        if FEATURES[one].axis != FEATURES[other].axis
        and frozenset((one, other)) not in allowed
        and not conflicts_in(matrix.given_to(*matrix.MOE, (one, other)))
    }
    assert others == {
        ("draft nodes", "drafts by suffix"),
        ("draft nodes", "drafts by n-gram"),
        ("draft nodes", "drafts by the model's own head"),
        ("spill to a file", "drafts by the model's own head"),
        ("kernels `reference`", "quantised weights"),
        ("kernels `deterministic`", "quantised weights"),
    }


def model_of(row: Row) -> str:
    turn = matrix.IN_TURN[ROWS.index(row) % len(matrix.IN_TURN)]
    if matrix.HEAD in row:
        turn = matrix.WITH_A_HEAD[0]
    model = next((name for name in row if name in matrix.MODELS), turn)
    if matrix.HEAD in row:
        return model + HEAD
    return model + MXFP4 if model == "gpt_oss" and "quantised weights" in row else model


def plan_of(path: Path, names: Iterable[str]) -> EnginePlan:
    """Return a plan of one node of each role with features; contexts may be long."""
    base = engine_config(
        path,
        transport="shm",
        block_size=16,
        kv_cache_bytes=24 * 2**20,
        max_num_batched_tokens=512,
        window_rows=256,
    )
    model = load_model_config(path)
    made = made_of(facts_of(model, path), base, set(names))
    if model.quantisation is None:
        return made
    experts = PrecisionRule(format="mxfp4", part="experts")
    return changed(made, {"precision": (*made.precision, experts)})


def make(directory: Path, model: str, **sizes: Any) -> Path:
    """Write a model; of `model`/mxfp4 its experts are stored, and served, in that format."""
    if not model.endswith(MXFP4):
        return make_variant(directory, model, **sizes)
    make_mxfp4(directory, **sizes)
    return directory / "coded"


@pytest.fixture(scope="module")
def long_case_of(tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """Return a cached function that gives a model of long contexts and prompts, without answers."""
    rng = np.random.default_rng(5)
    lengths = (SEGMENT_KEYS + 150, *PROMPT_LENS[:15])
    prompts = [rng.integers(0, VOCAB_SIZE - 8, size=length).tolist() for length in lengths]

    @cache
    def get(model: str) -> Case:
        path = tmp_path_factory.mktemp("model")
        return Case(make(path, model, max_position_embeddings=4096), prompts, [])

    return get


@pytest.fixture(scope="module")
def drawn(case_of: CaseOf) -> Callable[[str], Tokens]:
    """Return a cached function that gives the sampled tokens of one node of each role."""

    @cache
    def get(model: str) -> Tokens:
        case = case_of(model)
        with Engine(plan_of(case.path, ())) as engine:
            return engine.generate(case.prompts[:2], **SAMPLING)

    return get


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{idx}", marks=[] if row in BY_DEFAULT else [pytest.mark.slow])
        for idx, row in enumerate(ROWS)
    ],
)
def test_tokens_are_those_of_the_reference(
    case_of: CaseOf, long_case_of: CaseOf, drawn: Callable[[str], Tokens], row: Row
) -> None:
    model = model_of(row)
    retrieves = any(
        FEATURES[name].axis in ("retrieval", "spill") for name in row if name in FEATURES
    )
    is_answered = not (retrieves or model.endswith(MXFP4))
    case = case_of(model) if is_answered else long_case_of(model)
    rounding = [name for name in row if is_rounded([name])]
    prompts, expected = case.prompts, case.tokens
    if rounding:
        kernels = [name for name in row if name.startswith("kernels")]
        with Engine(plan_of(case.path, [*rounding, *kernels])) as engine:
            # A draft is verified by one selection for all of it: other tokens of long contexts.
            prompts = prompts[1:] if retrieves and has_drafts(row) else prompts
            margin = SIGMOID_MARGIN if model.startswith(BY_SIGMOIDS) else MARGIN
            expected = engine.clear_tokens(prompts, max_tokens=NUM_TOKENS, margin=margin)
        assert sum(map(len, expected)) >= NUM_CLEAR
    with Engine(plan_of(case.path, row)) as engine:
        # The second time their prompts may be cached, and answers are foreseen.
        for _ in range(2):
            found = engine.generate(prompts, max_tokens=NUM_TOKENS)
            cut = [tokens[: len(want)] for tokens, want in zip(found, expected, strict=True)]
            turned = [pair for pair in zip(cut, expected, strict=True) if pair[0] != pair[1]]
            num_clear = sum(map(bool, expected))
            assert len(turned) <= (num_clear // PROMPTS_PER_TURNED if rounding else 0), turned
            assert {*map(len, found)} == {NUM_TOKENS}
        if not rounding:
            assert engine.generate(prompts[:2], **SAMPLING) == drawn(model)
            assert (engine.stats().num_drafts > 0) == has_drafts(row)


def has_drafts(row: Row) -> bool:
    return any(name in FEATURES and FEATURES[name].axis in SPECULATION for name in row)
