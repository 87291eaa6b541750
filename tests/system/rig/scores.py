"""Checks of a server's log-probabilities of prompts, which equal transformers' in fp32.

Knows no test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch

from tests.checkpoints import oracle_model
from tests.system.conftest import Tiny

TOLERANCE = 1e-4
# Below this difference another order of summation may swap two tokens.
MIN_GAP = 1e-3
NUM_TOP = 3


def answer_of(url: str, path: str, **fields: object) -> Any:
    answer = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs_of(tiny: Tiny, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' log-probabilities [len - 1, V] for the tokens after the first."""
    with torch.no_grad():
        logits = oracle_model(tiny.path)(input_ids=torch.tensor([list(token_ids)])).logits
    return logits[0, :-1].float().log_softmax(-1)


def check_echo(url: str, tiny: Tiny) -> None:
    """Score texts as lm-evaluation-harness does, which asks if all tokens are the best."""
    texts = [prompt + tokens for prompt, tokens in zip(tiny.prompts, tiny.tokens, strict=True)]
    asked = {"echo": True, "logprobs": 1, "temperature": 0}
    for max_tokens in (0, 1):
        answer = answer_of(url, "completions", prompt=texts, max_tokens=max_tokens, **asked)
        assert answer["usage"]["completion_tokens"] == max_tokens * len(texts)
        for choice, prompt, text in zip(answer["choices"], tiny.prompts, texts, strict=True):
            expected = logprobs_of(tiny, text)
            scores = choice["logprobs"]
            assert len(scores["token_logprobs"]) == len(text) + max_tokens
            found = scores["token_logprobs"][: len(text)]
            own = expected.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
            assert found[0] is None
            assert found[1:] == pytest.approx(own.tolist(), abs=TOLERANCE)
            best = [max(top.values()) for top in scores["top_logprobs"][1 : len(text)]]
            assert best == pytest.approx(expected.max(-1).values.tolist(), abs=TOLERANCE)
            start = len(prompt)
            assert found[start:] == best[start - 1 :], "the continuation is greedy"


def check_prompt_logprobs(url: str, tiny: Tiny, path: str) -> None:
    """Compare vLLM's form, for two choices, of a completion or a chat."""
    asked = {"prompt_logprobs": NUM_TOP, "return_token_ids": True, "max_tokens": 2, "n": 2}
    if path == "completions":
        answer = answer_of(url, path, prompt=tiny.prompts[1], **asked)
        first, second = answer["choices"]
        prompt, found = first["prompt_token_ids"], first["prompt_logprobs"]
        assert second["prompt_logprobs"] == found
    else:
        messages = [{"role": "user", "content": "Score this."}]
        answer = answer_of(url, path, messages=messages, **asked)
        prompt, found = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert found[0] is None
    for entry, token_id, row in zip(found[1:], prompt[1:], logprobs_of(tiny, prompt), strict=True):
        if int(((row - row[token_id]).abs() < MIN_GAP).sum()) == 1:
            assert entry[str(token_id)]["rank"] == int((row > row[token_id]).sum()) + 1
        for candidate_id, candidate in entry.items():
            expected = row[int(candidate_id)].item()
            assert candidate["logprob"] == pytest.approx(expected, abs=TOLERANCE)
        by_rank = {candidate["rank"]: candidate["logprob"] for candidate in entry.values()}
        best = [by_rank[rank] for rank in range(1, NUM_TOP + 1)]
        assert best == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=TOLERANCE)
