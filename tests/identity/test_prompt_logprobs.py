"""Log-probabilities of prompts equal transformers' in fp32, however the prompt was computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint, oracle_model
from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, CaseOf, crowded_config
from topspin.messages import TokenLogprobs

NUM_TOP = 3
# Below this difference another order of summation may swap two tokens.
MIN_GAP = 1e-3


def logprobs_of(path: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return transformers' log-probabilities [len(prompt) - 1, V] for tokens after the first."""
    model = oracle_model(path)
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([list(prompt)])).logits[0, :-1].float().log_softmax(-1)
            for prompt in prompts
        ]


def check(found: Sequence[TokenLogprobs], prompt: Sequence[int], expected: torch.Tensor) -> None:
    assert len(found) == len(prompt) - 1
    for entry, token, row in zip(found, prompt[1:], expected, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(NUM_TOP + 1)
        assert entry.top_logprobs == pytest.approx(best.values[:NUM_TOP].tolist(), abs=1e-4)
        if bool((best.values.diff() < -MIN_GAP).all()):
            assert entry.top_ids == tuple(best.indices[:NUM_TOP].tolist())
        if bool(((row - row[token]).abs() < MIN_GAP).sum() == 1):
            assert entry.rank == int((row > row[token]).sum()) + 1


def test_chunks_cached_prefixes_and_prompts_without_output(case_of: CaseOf) -> None:
    case = case_of("qwen2_moe")
    case = case._replace(prompts=case.prompts[:4])
    expected = logprobs_of(case.path, case.prompts)
    config = engine_config(
        case.path,
        attention_nodes=2,
        expert_nodes=2,
        transport="shm",
        micro_batches=2,
        max_num_seqs=4,
        max_num_batched_tokens=11,  # no prompt is computed in one step
    )
    with Engine(config) as engine:
        for max_tokens in (4, 0):
            ids = [
                engine.add(prompt, max_tokens=max_tokens, prompt_logprobs=NUM_TOP)
                for prompt in case.prompts
            ]
            engine.collect()
            answers = zip(ids, case.prompts, case.tokens, expected, strict=False)
            for each, prompt, tokens, rows in answers:
                request = engine.requests[each]
                assert request.finish_reason == "length"
                assert request.tokens == tokens[:max_tokens]
                # The second time the prompts are cached, but their rows are needed.
                assert request.num_cached_tokens == 0
                check(request.prompt_logprobs, prompt, rows)
        longest = max(case.prompts, key=len)
        # The first may go to the node that has not cached it; then both have.
        asked = []
        for _ in range(2):
            asked.append(engine.add(longest, max_tokens=0))
            engine.collect()
        assert max(engine.requests[each].num_cached_tokens for each in asked) > 0
        alone = engine.add([7], max_tokens=0, prompt_logprobs=NUM_TOP)
        engine.collect()
        for each in (*asked, alone):
            request = engine.requests[each]
            assert (request.finish_reason, request.tokens) == ("length", [])
            assert request.prompt_logprobs == []
        assert engine.stats().prompt_tokens == 2 * (sum(map(len, case.prompts)) + len(longest)) + 1


@pytest.mark.slow
def test_preempted_prompts_are_scored_once(case_of: CaseOf) -> None:
    case = case_of("mixtral")
    expected = logprobs_of(case.path, case.prompts)
    config = crowded_config(case, max_num_batched_tokens=16)
    with Engine(config) as engine:
        ids = [
            engine.add(prompt, max_tokens=NUM_TOKENS, prompt_logprobs=NUM_TOP)
            for prompt in case.prompts
        ]
        engine.collect()
        assert engine.stats().num_preemptions > 0
        for each, prompt, tokens, rows in zip(
            ids, case.prompts, case.tokens, expected, strict=True
        ):
            assert engine.requests[each].tokens == tokens
            check(engine.requests[each].prompt_logprobs, prompt, rows)


def test_more_rows_than_are_scored_at_once_fill_the_context(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral_sliding_window")
    length = load_model_config(path).context_length
    prompt = [(7 * idx * idx) % 250 for idx in range(length)]
    (expected,) = logprobs_of(path, [prompt])
    with Engine(engine_config(path, max_num_batched_tokens=length)) as engine:
        request = engine.add(prompt, max_tokens=0, prompt_logprobs=NUM_TOP)
        engine.collect()
        assert len(prompt) > 128
        check(engine.requests[request].prompt_logprobs, prompt, expected)
