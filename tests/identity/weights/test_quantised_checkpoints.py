"""Engines on quantised checkpoints: transformers' tokens on the dequantised model, or nearly.

With --quantization none the matrices are dequantised, so that greedy tokens in fp32 are
transformers'. By default codes are served as they are, beside rows of 8 bits on the CPU: the
divergence of the next token's distribution is bounded, and a table that moves experts changes no
clear token.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, oracle_generate, oracle_model
from tests.engine import Engine, engine_config
from tests.identity.speculation.test_speculation import accepted
from tests.identity.weights.test_expert_tables import only_copies, random_tables
from tests.models.quantised.forms import FAMILIES, FORMS, make_mxfp4, make_quantised
from topspin.expert_table import even_shares
from topspin.plan.speculation import Speculation

NUM_TOKENS = 8
MANY_TOKENS = 24
PROMPT_LENS = (5, 41, 17, 30, 8)
# In logits, of which sums in another order differ by less.
MARGIN = 1e-3
# In log-probabilities: a row whose sum is rounded otherwise may get other codes of 8 bits.
CLEAR_LEAD = 0.1
# In nats, of most positions; where the router has a near tie, other experts answer, and the mean is
# larger.
USUAL_KL = (0.005, 0.06)
"""The most of the median and of the mean."""
# A sigmoid router has more near ties, and what latents are made of is rounded twice.
MOST_KL = {"glm4_moe": (0.005, 0.1), "deepseek_v3": (0.008, 0.15)}
MXFP4 = ("gpt_oss", "mxfp4")
CASES = [
    MXFP4,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(FAMILIES, FORMS)),
]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENS]


def make(path: Path, family: str, form: str) -> None:
    """Write a model to `path`/coded, and dequantised to `path`/plain."""
    if form == "mxfp4":
        make_mxfp4(path, num_hidden_layers=2)
    else:
        make_quantised(path, family, FORMS[form])


@pytest.mark.parametrize(("family", "form"), CASES)
def test_dequantised_tokens_are_transformers(tmp_path: Path, family: str, form: str) -> None:
    make(tmp_path, family, form)
    wanted = oracle_generate(tmp_path / "plain", prompts(), NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(wanted.margins) if margin > MARGIN]
    assert len(clear) >= 3, wanted.margins
    with Engine(engine_config(tmp_path / "coded", quantization="none")) as engine:
        found = engine.generate([prompts()[idx] for idx in clear], max_tokens=NUM_TOKENS)
    assert found == [wanted.tokens[idx] for idx in clear]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_codes_are_served_with_a_bounded_divergence(tmp_path: Path, family: str, form: str) -> None:
    make(tmp_path, family, form)
    config = engine_config(tmp_path / "coded")
    part = "experts" if form == "mxfp4" else "attention"
    assert part in {rule.part for rule in config.precision}
    model = oracle_model(tmp_path / "plain")
    found = []
    with Engine(config) as engine:
        for prompt in prompts():
            request = engine.requests[engine.add(prompt, max_tokens=1, prompt_logprobs=20)]
            engine.collect()
            with torch.no_grad():
                wanted = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            for position, each in enumerate(request.prompt_logprobs[-len(prompt) + 1 :]):
                found.append(divergence(wanted[position], each.top_ids, each.top_logprobs))
    assert len(found) == sum(PROMPT_LENS) - len(PROMPT_LENS)
    median, mean = MOST_KL.get(family, USUAL_KL)
    assert 0 < statistics.median(found) < median
    assert statistics.mean(found) < mean


def divergence(wanted: torch.Tensor, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> float:
    """Return KL(wanted || found) over the tokens `ids`, and all others as one."""
    p, q = wanted[list(ids)].exp().tolist(), [math.exp(each) for each in logprobs]
    p.append(max(1 - sum(p), 1e-12))
    q.append(max(1 - sum(q), 1e-12))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "transport"),
    [
        ("ct-int4-groups", "shm"),
        ("mxfp4", "shm"),
        ("gptq-4-desc-act", "tcp"),
        ("fp8-blocks", "local"),
    ],
)
def test_moved_experts_keep_their_codes(tmp_path: Path, form: str, transport: str) -> None:
    """Tables change while prompts and streams go on: expert nodes read codes meanwhile."""
    make(tmp_path, "mixtral", form)
    config = engine_config(
        tmp_path / "coded",
        expert_nodes=2,
        transport=transport,
        **only_copies(2),
        max_num_batched_tokens=16,
    )
    assert any(rule.part == "experts" for rule in config.precision)
    tables = random_tables(even_shares(8 + 2, 2), seed=5)
    with Engine(config) as engine:
        wanted = engine.clear_tokens(prompts(), max_tokens=MANY_TOKENS, margin=CLEAR_LEAD)
        assert sum(map(len, wanted)) > (MANY_TOKENS // 2 if form == "mxfp4" else MANY_TOKENS)
        found = []
        # On a busy machine requests may end before the experts of a table have been read.
        while engine.stats().expert_table_version < 2:
            requests = engine.generate_on(prompts(), tables, max_tokens=MANY_TOKENS)
            found.append([each.tokens for each in requests])
        assert engine.stats().expert_migrations > 0
    for tokens in found:
        pairs = zip(tokens, wanted, strict=True)
        assert [each[: len(want)] for each, want in pairs] == wanted


@pytest.mark.slow
def test_a_draft_model_keeps_its_codes(tmp_path: Path) -> None:
    """A dequantised target accepts nearly all that the same checkpoint, in codes, drafts."""
    make_quantised(tmp_path, "mixtral", FORMS["ct-int4-groups"])
    coded = tmp_path / "coded"
    wanted = oracle_generate(tmp_path / "plain", prompts(), NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(wanted.margins) if margin > MARGIN]
    speculation = Speculation(
        method="draft_model", model=str(coded), num_speculative_tokens=3, adaptive=False
    )
    config = engine_config(coded, quantization="none", speculation=speculation)
    with Engine(config) as engine:
        found = engine.generate([prompts()[idx] for idx in clear], max_tokens=NUM_TOKENS)
        stats = engine.stats()
    assert found == [wanted.tokens[idx] for idx in clear]
    assert accepted(stats) > 0.6 * stats.num_draft_tokens > 0
