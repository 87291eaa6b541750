"""The sampler's glue: histories, bans, log-probabilities and failed rows by sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from attention_nodes.sampling.sampler import Drawn, Sampled, Sampler
from attention_nodes.step.sequences import SequenceTable, TableLimits
from attention_nodes.step.step_inputs import Slices, slice_up
from kernels import reference
from tests.attention_nodes.plans import micro_batch, new_sequence
from topspin.messages import SamplingParams, pack_ints, unpack_ints

VOCAB = 12
PROMPT = [3, 4, 5]


class Bench:
    """A table with sequences whose prompts are done, for sampling step by step."""

    def __init__(self, *params: SamplingParams) -> None:
        self.table = SequenceTable(TableLimits(32, 4, 32, VOCAB))
        self.sampler = Sampler(self.table, reference)
        for seq_id, each in enumerate(params):
            blocks = pack_ints(range(seq_id * 4, seq_id * 4 + 4))
            sequence = new_sequence(seq_id, PROMPT, blocks=blocks, max_length=20, sampling=each)
            self.table.admit(sequence)
        self._next_count = len(PROMPT)

    def step(self, logits: torch.Tensor, micro_batches: list[list[int]]) -> Drawn:
        parts: list[Slices] = []
        for seq_ids in micro_batches:
            plan = micro_batch(dict.fromkeys(seq_ids, self._next_count))
            parts.append(slice_up(plan, self.table))
            self.table.commit(parts[-1].rows, parts[-1].counts)
        self._next_count = 1
        sampled = Sampled.of(parts)
        rows = sampled.rows
        asked = self.sampler.ask(sampled)
        reserved = self.table.reserve(rows)
        drawn = [each.numpy() for each in self.sampler.draw(logits, asked)] if len(rows) else []
        if drawn:
            self.table.fill(reserved, drawn[0])
        verdict = self.sampler.judge(asked, drawn)
        return self.sampler.answer(asked, drawn, verdict)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, "temperature": 0.0, **changes})


def peaked(*tokens: int) -> torch.Tensor:
    logits = torch.zeros(len(tokens), VOCAB)
    logits[range(len(tokens)), list(tokens)] = 2.0
    return logits


def test_rows_follow_micro_batches_and_sequences() -> None:
    bench = Bench(greedy(), greedy(), greedy())
    drawn = bench.step(peaked(7, 8, 9), [[2], [0, 1]])
    assert list(unpack_ints(drawn.seq_ids)) == [2, 0, 1]
    assert list(unpack_ints(drawn.tokens)) == [7, 8, 9]
    rows = bench.table.rows_of(np.array([0, 1, 2]))
    assert bench.table.tokens[rows, 3].tolist() == [8, 9, 7]
    assert bench.step(torch.empty(0, VOCAB), [[]]) == Drawn(b"", b"", b"", {}, {}, {})


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    bench = Bench(greedy(min_tokens=2, eos_token_ids=(7,), stop_token_ids=(8,)), greedy())
    logits = peaked(7, 7)
    logits[:, 8], logits[:, 9] = 1.5, 1.0
    drawn = [list(unpack_ints(bench.step(logits, [[0, 1]]).tokens)) for _ in range(3)]
    assert drawn == [[9, 7], [9, 7], [7, 7]]


def test_penalties_see_the_prompt_and_the_output_apart() -> None:
    bench = Bench(greedy(presence_penalty=1.5), greedy(repetition_penalty=4.0))
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 6] = 2.0, 1.0  # 3 is in the prompt, 6 is not
    drawn = [list(unpack_ints(bench.step(logits, [[0, 1]]).tokens)) for _ in range(2)]
    # Presence counts the output only; repetition the prompt as well.
    assert drawn == [[3, 6], [6, 3]]


def test_logit_bias_belongs_to_its_row() -> None:
    bench = Bench(greedy(), greedy(logit_bias={10: 5.0}))
    assert list(unpack_ints(bench.step(peaked(1, 1), [[0, 1]]).tokens)) == [1, 10]


def test_log_probabilities_only_for_who_asked() -> None:
    bench = Bench(greedy(logprobs=2), greedy(), greedy(logprobs=0))
    logits = peaked(4, 5, 6)
    drawn = bench.step(logits, [[0, 1, 2]])
    expected = logits.log_softmax(-1)
    assert sorted(drawn.logprobs) == [0, 2]
    assert drawn.logprobs[0][0].logprob == pytest.approx(expected[0, 4].item())
    assert len(drawn.logprobs[0][0].top_ids) == 2
    assert drawn.logprobs[0][0].top_ids[0] == 4
    assert drawn.logprobs[2][0].top_ids == ()


def test_log_probabilities_of_tokens_by_id() -> None:
    wanted = [(7, 3, 4), (), (3,)]
    bench = Bench(*(greedy(logprobs=1, logprob_token_ids=each) for each in wanted))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    drawn = bench.step(logits, [[0, 1, 2]])
    expected = logits.log_softmax(-1)
    for row, token_ids in enumerate(wanted):
        shown = token_ids or (int(logits[row].argmax()),)
        assert drawn.logprobs[row][0].top_ids == shown
        found = drawn.logprobs[row][0].top_logprobs
        assert found == pytest.approx(expected[row, list(shown)].tolist(), abs=1e-5)


def test_a_row_without_numbers_fails_alone_and_the_next_step_goes_on() -> None:
    bench = Bench(greedy(), greedy(temperature=1.0, logprobs=1), greedy())
    logits = peaked(4, 5, 6)
    logits[1, 3] = math.nan
    for _ in range(2):
        drawn = bench.step(logits, [[0, 1, 2]])
        assert list(unpack_ints(drawn.seq_ids)) == [0, 2]
        assert list(unpack_ints(drawn.tokens)) == [4, 6]
        assert drawn.errors == {1: "the model's logits are not numbers"}
        assert drawn.logprobs == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_leaves_no_token_fails_alone(temperature: float) -> None:
    everything = greedy(
        temperature=temperature, min_tokens=8, stop_token_ids=tuple(range(VOCAB)), logprobs=1
    )
    overflowing = greedy(temperature=temperature, repetition_penalty=1e-39)
    bench = Bench(greedy(), everything, overflowing, greedy())
    for _ in range(2):
        drawn = bench.step(peaked(4, 5, PROMPT[0], 6), [[0, 1], [2, 3]])
        assert list(unpack_ints(drawn.seq_ids)) == [0, 3]
        assert list(unpack_ints(drawn.tokens)) == [4, 6]
        assert sorted(drawn.refused) == [1, 2]
        assert all("leave no token to choose" in reason for reason in drawn.refused.values())
        assert not drawn.errors
        assert drawn.logprobs == {}


def test_positions_key_the_draws() -> None:
    """The same seed draws differently at each position, and equally for equal positions."""
    params = greedy(temperature=1.0, seed=77)
    first, second = Bench(params), Bench(params, greedy(temperature=1.0, seed=78))
    flat = torch.zeros(1, VOCAB)
    alone = [unpack_ints(first.step(flat, [[0]]).tokens)[0] for _ in range(8)]
    beside = [unpack_ints(second.step(flat.expand(2, -1), [[1], [0]]).tokens) for _ in range(8)]
    assert [tokens[1] for tokens in beside] == alone
    assert [tokens[0] for tokens in beside] != alone
    assert len(set(alone)) > 1
