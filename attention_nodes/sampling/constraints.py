"""The tokens that requests leave to be chosen: by grammars, allowed_token_ids and bad_words.

Owns, per sequence with one of these, the matcher that is told what the sequence has emitted (after
a replay or preemption: all of it again), and the mask of its allowed tokens. Makes a step's masks
and bans; knows no logits, and no grammar's text but to ask for its matcher. Called by sampler.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention_nodes.grammars.processes import (
    COMPILE_WAIT_S,
    Grammars,
    MaskAnswer,
    Matcher,
    MatcherStep,
)
from attention_nodes.step.sequences import SequenceTable
from attention_nodes.step.step_inputs import Drafted
from kernels.sampling import AllowedTokens
from spec_decode.draft import Draft
from topspin.errors import EngineUnavailable, InvalidRequest
from topspin.messages import SamplingParams

Words = npt.NDArray[np.int32]


class Constrained(NamedTuple):
    """What constrains R rows: masks, (row, token) pairs that are banned, and, by sequence id, why
    some sequences cannot go on: by what they ask for, or (`failed`) by what else the node does.
    """

    allowed: AllowedTokens | None
    banned: list[tuple[int, int]]
    refused: dict[int, str]
    failed: dict[int, str]


@dataclass(slots=True, eq=False)
class _State:
    """`num_seen` tokens of the sequence, prompt included, are consumed by the matcher or known
    to need none; `allowed` [words] is the mask by ids. `refusal`: why it cannot go on.
    """

    num_seen: int
    matcher: Matcher | None = None
    allowed: Words | None = None
    refusal: MaskAnswer | None = None


class _Masks:
    """The masks of a step: `rows`, and of each its mask in `bits` i32[most rows, words]."""

    def __init__(self, most: int, num_words: int) -> None:
        self._rows: list[int] = []
        self._bits: Words = np.empty((most, num_words), dtype=np.int32)

    def add(self, row: int, mask: Words, allowed: Words | None) -> None:
        """Add the mask of a row, which may have more words than the logits; or less."""
        own = self._bits[len(self._rows)]
        num_words = min(len(own), len(mask))
        own[:num_words] = mask[:num_words]
        own[num_words:] = 0
        if allowed is not None:
            own &= allowed
        self._rows.append(row)

    def allowed(self) -> AllowedTokens | None:
        """Return the masks."""
        if not self._rows:
            return None
        return AllowedTokens(
            torch.tensor(self._rows), torch.from_numpy(self._bits[: len(self._rows)])
        )


UNCONSTRAINED: Final = Constrained(None, [], {}, {})


class Constraints:
    """The constraints of one table's sequences; `states` has those that have been asked of()."""

    def __init__(self, table: SequenceTable, grammars: Grammars | None) -> None:
        """`grammars` None: sequences with a grammar are refused."""
        self._table = table
        self._grammars = grammars
        self._num_words = -(-table.limits.vocab_size // 32)
        self.states: dict[int, _State] = {}

    def end(self, seq_id: int) -> None:
        """Forget a sequence of `states`."""
        state = self.states.pop(seq_id)
        if state.matcher is not None:
            assert self._grammars is not None, "it gave the matcher"
            self._grammars.end(state.matcher)

    def of(
        self,
        rows: Sequence[int],
        seq_ids: Sequence[int],
        params: Sequence[SamplingParams],
        drafted: Sequence[Drafted],
    ) -> Constrained:
        """Return the constraints of sampled rows, of which those of drafts follow their root's.

        No token of a constrained sequence may be PENDING.
        """
        constrained = [idx for idx, each in enumerate(params) if each.is_constrained]
        drafts = {each.first: each.draft for each in drafted}
        masks = _Masks(len(constrained), self._num_words)
        banned: list[tuple[int, int]] = []
        followed: list[tuple[int, _State, MatcherStep]] = []
        states: dict[int, _State] = {}
        deadline_s = time.monotonic() + COMPILE_WAIT_S
        end_of_draft = 0
        for idx in constrained:
            if idx < end_of_draft:
                continue  # its root has dealt with it
            draft = drafts.get(idx)
            end_of_draft = idx + 1 + (0 if draft is None else len(draft.tokens))
            row, seq_id, own = rows[idx], seq_ids[idx], params[idx]
            banned += self._bad_words(row, idx, own, draft)
            state = self.states.get(seq_id)
            if state is None:
                state = self.states[seq_id] = self._begin(row, own, deadline_s)
            states[seq_id] = state
            new = self._new_tokens(row, state)
            if state.refusal is not None:
                continue
            if state.matcher is not None:
                followed.append((idx, state, MatcherStep(state.matcher, new, draft)))
            elif state.allowed is not None:
                for each in range(idx, end_of_draft):
                    masks.add(each, state.allowed, None)
        self._follow(followed, masks)
        ends = {seq_id: each.refusal for seq_id, each in states.items() if each.refusal is not None}
        return Constrained(
            masks.allowed(),
            banned,
            refused={seq_id: end.refusal for seq_id, end in ends.items() if not end.may_retry},
            failed={seq_id: end.refusal for seq_id, end in ends.items() if end.may_retry},
        )

    def _follow(self, followed: Sequence[tuple[int, _State, MatcherStep]], masks: _Masks) -> None:
        """Add the masks of sequences with grammars, or note why they cannot go on."""
        if not followed:
            return
        assert self._grammars is not None, "it gave the matchers"
        answers = self._grammars.follow([step for _, _, step in followed])
        for (idx, state, _), answer in zip(followed, answers, strict=True):
            if answer.refusal:
                state.refusal = answer
            elif answer.masks is not None:
                for row, mask in zip(answer.rows, answer.masks, strict=True):
                    masks.add(idx + row, mask, state.allowed)

    def _begin(self, row: int, params: SamplingParams, deadline_s: float) -> _State:
        state = _State(int(self._table.num_prompt[row]))
        if params.allowed_token_ids:
            flags = np.zeros(32 * self._num_words, dtype=np.uint8)
            flags[list(params.allowed_token_ids)] = 1
            state.allowed = np.packbits(flags, bitorder="little").view("<i4")
        if params.grammar:
            try:
                if self._grammars is None:
                    raise InvalidRequest("this node serves no grammars")
                state.matcher = self._grammars.matcher(params.grammar, deadline_s)
            except InvalidRequest as error:
                state.refusal = MaskAnswer(str(error))
            except EngineUnavailable as error:
                state.refusal = MaskAnswer(str(error), may_retry=True)
        return state

    def _new_tokens(self, row: int, state: _State) -> list[int]:
        """Return what the sequence has emitted since the last call."""
        begin, state.num_seen = state.num_seen, int(self._table.num_known[row])
        tokens: list[int] = self._table.tokens[row, begin : state.num_seen].tolist()
        return tokens

    def _bad_words(
        self, row: int, idx: int, params: SamplingParams, draft: Draft | None
    ) -> list[tuple[int, int]]:
        """Return the tokens that would complete a word, for row `idx` and those of its draft."""
        if not params.bad_words:
            return []
        table = self._table
        longest = max(map(len, params.bad_words))
        end = int(table.num_known[row])
        begin = max(int(table.num_prompt[row]), end - longest)
        text = tuple(table.tokens[row, begin:end].tolist())
        texts = [text]
        if draft is not None:
            texts += [text + draft.path(each) for each in range(len(draft.tokens))]
        return [
            (idx + nth, word[-1])
            for nth, each in enumerate(texts)
            for word in params.bad_words
            if len(word) == 1 or each[1 - len(word) :] == word[:-1]
        ]
