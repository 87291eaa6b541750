"""Drafts on a node: whatever is drafted, tokens and cache are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_nodes.loading import load_runner
from attention_nodes.step.model_runner import ModelRunner
from spec_decode.draft import ROOT, Draft, DraftRequest, DraftText
from tests.attention_nodes.plans import Planner, ahead, one_by_one, tokens_of
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from topspin.errors import ProtocolError
from topspin.messages import StepResult, unpack_ints

PROMPTS = {1: [5, 9, 200, 31], 2: [17, 3, 44]}
NUM_TOKENS = 14
MAX_DRAFT = 5


def chain(*tokens: int) -> Draft:
    return Draft.chain(tokens)


def right(truth: list[int]) -> Draft:
    return chain(*truth)


def wrong(truth: list[int]) -> Draft:
    return chain(*((token + 1) % 250 for token in truth))


def partly(truth: list[int]) -> Draft:
    return chain(*truth[:2], *((token + 1) % 250 for token in truth[2:]))


def second_branch(truth: list[int]) -> Draft:
    """Draft two tokens, the first of them twice: its second child's child is the right one."""
    if len(truth) < MAX_DRAFT:
        return right(truth)
    first, second = truth[:2]
    return Draft(
        ((first + 1) % 250, first, (second + 2) % 250, second, truth[2]), (ROOT, ROOT, 1, 1, 3)
    )


class Script:
    """Drafts from the tokens that will come, as `form` turns them into a draft.

    `requests` are those that it has seen, `ended` the texts of sequences that have left.
    """

    def __init__(self, truth: dict[int, list[int]], form: Callable[[list[int]], Draft]) -> None:
        self._texts = {seq_id: PROMPTS[seq_id] + truth[seq_id] for seq_id in truth}
        self._form = form
        self.requests: list[DraftRequest] = []
        self.ended: list[tuple[int, list[int], int, str]] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for each in requests:
            self.requests.append(each)
            text = self._texts[each.text.seq_id]
            known = len(each.text.tokens)
            assert each.text.tokens.tolist() == text[:known]
            drafts.append(self._form(text[known : known + each.at_most]))
        return drafts

    def end(self, text: DraftText) -> None:
        self.ended.append((text.seq_id, text.tokens.tolist(), text.num_prompt, text.salt))

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drafts"), "llama")


@torch.inference_mode()
def runner_of(path: Path, script: Script | None = None, **settings: Any) -> ModelRunner:
    return load_runner(path, engine_config(path, **settings).for_node(), drafter=script)


def plain(runner: ModelRunner, **sampling: Any) -> dict[int, list[int]]:
    """Return the tokens without drafts."""
    planner = Planner()
    for seq_id, prompt in PROMPTS.items():
        planner.add(seq_id, prompt, **sampling)
    planner.step({seq_id: len(prompt) for seq_id, prompt in PROMPTS.items()})
    for _ in range(NUM_TOKENS - 1):
        planner.decode([1, 2])
    return tokens_of(one_by_one(runner, planner.plans))


def drafted(
    runner: ModelRunner,
    *,
    run: Callable[..., list[StepResult]] = one_by_one,
    num_steps: int = NUM_TOKENS - 1,
    max_length: int = len(PROMPTS[1]) + NUM_TOKENS,
    m: int = 1,
    leaves: bool = False,
    **sampling: Any,
) -> list[StepResult]:
    """Run steps in which sequence 1 may have a draft and sequence 2 has none.

    If it `leaves`, sequence 1 takes no part in one more step.
    """
    planner = Planner()
    planner.add(1, PROMPTS[1], max_length=max_length, **sampling)
    planner.add(2, PROMPTS[2], **sampling)
    planner.step({1: len(PROMPTS[1]), 2: len(PROMPTS[2])}, drafts={1: 2})
    for _ in range(num_steps):
        parts = [{2: 1, 1: 1}] if m == 1 else [{2: 1}, {1: 1}]
        planner.step(*parts, drafts={1: MAX_DRAFT})
    if leaves:
        planner.step({2: 1}, finished=[1])
    return run(runner, planner.plans)


def written(runner: ModelRunner, seq_id: int) -> list[torch.Tensor]:
    """Return all keys and values of a sequence's committed positions."""
    table, cache = runner._table, runner._decoder.kv
    row = table._row_of[seq_id]
    slots = [
        int(table.block_tables[row, 0, place // 4]) * 4 + place % 4
        for place in range(int(table.num_committed[row]))
    ]
    return [each.flatten(0, 1)[slots] for each in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("form", [right, wrong, partly, second_branch])
def test_any_draft_leaves_the_tokens_and_the_bits_of_plain_decoding(
    checkpoint: Path, form: Callable[[list[int]], Draft]
) -> None:
    expected = runner_of(checkpoint, deterministic=True)
    truth = plain(expected)
    script = Script(truth, form)
    runner = runner_of(checkpoint, script, deterministic=True)
    results = drafted(runner)
    assert tokens_of(results) == truth
    for seq_id in PROMPTS:
        theirs = written(expected, seq_id)
        for mine, each in zip(written(runner, seq_id), theirs, strict=True):
            # Of a draft that completes its sequence the last token is not fed.
            assert torch.equal(mine, each[: len(mine)])
        assert len(written(runner, seq_id)[0]) >= len(theirs[0]) - 1
    num_steps = sum(1 for result in results if counts_of(result)[1])
    expected_steps = {right: 3, wrong: NUM_TOKENS, partly: 5, second_branch: 4}[form]
    assert num_steps == expected_steps, [counts_of(result) for result in results]


def counts_of(result: StepResult) -> dict[int, int]:
    seq_ids = unpack_ints(result.seq_ids)
    counts = unpack_ints(result.counts) if result.counts else [1] * len(seq_ids)
    return dict(zip(seq_ids, counts, strict=True))


@pytest.mark.parametrize("form", [partly, second_branch])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "logprobs": 2},
        # Each of a few tokens becomes less likely whenever it was chosen.
        {"logit_bias": dict.fromkeys(range(4), 20.0), "frequency_penalty": 2.0},
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, 250, 3))},
    ],
)
def test_sampling_and_penalties_follow_each_path(
    checkpoint: Path, sampling: dict[str, Any], form: Callable[[list[int]], Draft]
) -> None:
    runner = runner_of(checkpoint)
    truth = plain(runner, **sampling)
    runner = runner_of(checkpoint, Script(truth, form))
    results = drafted(runner, m=2, **sampling)
    assert tokens_of(results) == truth
    assert max(counts_of(result)[1] for result in results) >= 3
    if "logprobs" in sampling:
        for result in results:
            counts = {seq_id: n for seq_id, n in counts_of(result).items() if n}
            assert {seq_id: len(each) for seq_id, each in result.logprobs.items()} == counts


@pytest.mark.slow
def test_nothing_is_fed_or_drafted_beyond_the_greatest_length(checkpoint: Path) -> None:
    truth = plain(runner_of(checkpoint))
    for max_length in range(len(PROMPTS[1]) + 1, len(PROMPTS[1]) + NUM_TOKENS):
        script = Script(truth, right)
        runner = runner_of(checkpoint, script)
        results = drafted(runner, max_length=max_length)
        assert tokens_of(results) == {1: truth[1][: max_length - len(PROMPTS[1])], 2: truth[2]}
        assert counts_of(results[-1]) == {2: 1, 1: 0}
        row = runner._table._row_of[1]
        assert runner._table.num_committed[row] == max_length - 1
        assert all(len(each.text.tokens) + each.at_most < max_length for each in script.requests)


def test_a_node_without_a_drafter_decodes_one_by_one(checkpoint: Path) -> None:
    runner = runner_of(checkpoint)
    truth = plain(runner)
    results = drafted(runner_of(checkpoint))
    assert tokens_of(results) == truth
    assert not any(result.counts for result in results)


@pytest.mark.slow
def test_a_step_ahead_begins_where_the_draft_ended(tmp_path: Path) -> None:
    """On a device (Triton's kernels, interpreted): the next step is planned before the result."""
    path = make_checkpoint(
        tmp_path, "llama", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2
    )
    truth = plain(runner_of(path))
    script = Script(truth, second_branch)
    runner = runner_of(path, script, kernels="triton")
    # Sequence 1 is forgotten while its last draft is under way.
    results = drafted(runner, run=ahead, num_steps=2, leaves=True)
    assert [counts_of(result).get(1) for result in results] == [3, 4, 4, None]
    assert tokens_of(results) == {1: truth[1][:11], 2: truth[2][:4]}
    # The drafter learns of it what was known then.
    assert script.ended == [(1, PROMPTS[1] + truth[1][:7], len(PROMPTS[1]), "")]


def test_a_draft_without_reserved_slots_is_refused(checkpoint: Path) -> None:
    runner = runner_of(checkpoint)
    planner = Planner()
    planner.add(1, [5] * 30, max_length=64)
    planner.step({1: 30}, drafts={1: 3})
    with pytest.raises(ProtocolError, match="a draft goes past the blocks"):
        one_by_one(runner, planner.plans)
