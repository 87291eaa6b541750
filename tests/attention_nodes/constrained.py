"""Sequences with constraints, sampled from random logits step by step, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from attention_nodes.grammars.processes import CompiledGrammar, Grammars
from attention_nodes.sampling.sampler import Sampled, Sampler
from attention_nodes.step.sequences import SequenceTable, TableLimits
from kernels.cpu import sampling as ops
from models.text.tokenizer import Tokenizer
from tests.attention_nodes.plans import new_sequence
from tests.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, write_tokenizer
from topspin.grammars import grammar_key, limits
from topspin.messages import SamplingParams

PROMPT = [BOS_TOKEN_ID, 7, 8]
MAX_LEN = 700
# More than the tokenizer has, and no multiple of 32: as a model's, padded.
VOCAB = 301
TIMEOUT_S = 60.0


class Checkpoint:
    """The tokenizer of tiny checkpoints, for gateways and for grammars."""

    def __init__(self, directory: Path) -> None:
        write_tokenizer(directory)
        self.tokenizer = Tokenizer.from_directory(directory)
        self.grammars = Grammars(directory, vocab_size=VOCAB, eos_token_ids=(EOS_TOKEN_ID,))
        file = str(directory / "tokenizer.json")
        self._library = LLTokenizer(file, n_vocab=VOCAB, eos_token=[EOS_TOKEN_ID])

    def compile(self, *grammars: str) -> dict[str, str]:
        """Have the node compile grammars and keep them; return the reasons against some."""
        for each in grammars:
            self.grammars.start(grammar_key(each), each)
        return {key: error for key, error, _ in wait_for_compiled(self.grammars) if error}

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher of this process, made by the library alone."""
        return LLMatcher(self._library, grammar, log_level=0, limits=limits())

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an output, whose eos token shows if it is not at the end."""
        end = len(tokens) - (tokens[-1:] == [EOS_TOKEN_ID])
        return self.tokenizer.decode(tokens[:end], skip_special_tokens=False)


def wait_for_compiled(grammars: Grammars) -> list[CompiledGrammar]:
    """Wait for what is under way; return it."""
    ended: list[CompiledGrammar] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while grammars.is_compiling:
        ended += grammars.take_compiled()
        assert time.monotonic() < deadline_s, "a grammar is compiled for ever"
    return ended


def params(**changes: Any) -> SamplingParams:
    fields = {"max_tokens": 600, "seed": 1, "eos_token_ids": (EOS_TOKEN_ID,), **changes}
    return SamplingParams(**fields)


class Bench:
    """A table with sequences whose prompts are computed, and their sampler."""

    def __init__(self, checkpoint: Checkpoint, *asked: SamplingParams) -> None:
        self.checkpoint = checkpoint
        self.table = SequenceTable(TableLimits(MAX_LEN, 4, 1, VOCAB))
        self.sampler = Sampler(self.table, ops, checkpoint.grammars)  # type: ignore[arg-type]
        self.refused: dict[int, str] = {}
        # As the scheduler does before a sequence comes.
        checkpoint.compile(*{each.grammar for each in asked if each.grammar})
        for seq_id, each in enumerate(asked):
            self.admit(seq_id, each)

    def admit(self, seq_id: int, asked: SamplingParams, output: Sequence[int] = ()) -> None:
        """Add a sequence that has `output` already."""
        self.table.admit(
            new_sequence(
                seq_id,
                [*PROMPT, *output],
                num_prompt_tokens=len(PROMPT),
                max_length=MAX_LEN,
                sampling=asked,
            )
        )
        row = self.table.rows_of(np.array([seq_id]))
        self.table.commit(row, np.array([len(PROMPT) + len(output)]))

    def forget(self, seq_id: int) -> None:
        self.table.forget(seq_id)
        self.sampler.end(seq_id)

    def output(self, seq_id: int) -> list[int]:
        """Return what a sequence has generated."""
        (row,) = self.table.rows_of(np.array([seq_id]))
        output: list[int] = self.table.tokens[row, len(PROMPT) : self.table.num_known[row]].tolist()
        return output

    def step(self, seq_ids: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Sample a token for each sequence from its row; return the sequences that failed."""
        ids = np.array(seq_ids)
        rows = self.table.rows_of(ids)
        asked = self.sampler.ask(Sampled(rows, ids))
        drawn = [each.numpy() for each in self.sampler.draw(logits, asked)]
        self.table.fill(self.table.reserve(rows), drawn[0])
        self.table.commit(rows, np.ones(len(rows), dtype=np.int64))
        answer = self.sampler.answer(asked, drawn, self.sampler.judge(asked, drawn))
        assert not answer.errors
        self.refused |= answer.refused
        return list(answer.refused)

    def run(self, seq_ids: Sequence[int], *, seed: int = 0, closing: float = 4.0) -> None:
        """Sample until every sequence has ended or failed.

        `closing` is added to the logits of what ends strings, numbers, lists and objects (twice for
        a string's quote): else random texts have no end.
        """
        likely = [EOS_TOKEN_ID, *self.checkpoint.tokens('"}]by')]
        quote = self.checkpoint.tokens('"')
        running = list(seq_ids)
        step = 0
        while running:
            rng = torch.Generator().manual_seed(seed * 1000 + step)
            logits = torch.randn(len(running), VOCAB, generator=rng) * 1.5
            logits[:, likely] += closing
            logits[:, quote] += closing
            failed = self.step(running, logits)
            left = [each for each in running if each not in failed]
            running = [each for each in left if self.output(each)[-1] != EOS_TOKEN_ID]
            step += 1
            assert step < MAX_LEN - len(PROMPT), [self.text(each) for each in running]

    def text(self, seq_id: int) -> str:
        return self.checkpoint.text(self.output(seq_id))
