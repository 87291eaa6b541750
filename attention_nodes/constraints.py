"""The tokens that requests leave to be chosen: by grammars, allowed_token_ids and bad_words.

Owns, per sequence with one of these, a matcher that has consumed what the sequence has emitted
(after a replay or preemption: all of it again), and the mask of its allowed tokens. Makes a
step's masks and bans; knows no logits. Called by sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention_nodes.grammars import Grammars
from attention_nodes.sequences import SequenceTable
from attention_nodes.step_inputs import Drafted
from kernels.sampling import AllowedTokens
from spec_decode.draft import ROOT, Draft
from topspin.errors import InvalidRequest
from topspin.grammars import reason_of
from topspin.messages import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.int32]


class Constrained(NamedTuple):
    """What constrains R rows: masks, (row, token) pairs that are banned, and, by sequence id, why
    some sequences cannot go on.
    """

    allowed: AllowedTokens | None
    banned: list[tuple[int, int]]
    refused: dict[int, str]


@dataclass(slots=True, eq=False)
class _State:
    """`num_seen` tokens of the sequence, prompt included, are consumed by the matcher or known
    to need none; `allowed` [words] is the mask by ids. `refusal`: why it cannot go on.
    """

    num_seen: int
    matcher: LLMatcher | None = None
    allowed: Words | None = None
    refusal: str = ""


class _Masks:
    """The masks of a step: `rows`, and of each its mask in `bits` i32[most rows, words].

    `address` is that of the bits, all of which are 0 before: numpy takes longer to tell each row's
    than a mask takes to be computed.
    """

    def __init__(self, most: int, num_words: int) -> None:
        self.rows: list[int] = []
        self.bits: Words = np.zeros((most, num_words), dtype=np.int32)
        self.row_bytes = self.bits.strides[0]
        self._address = torch.from_numpy(self.bits).data_ptr()

    def add(self, row: int) -> int:
        """Add a row and return the address of its mask."""
        self.rows.append(row)
        return self._address + self.row_bytes * (len(self.rows) - 1)

    def allowed(self, num_words: int) -> AllowedTokens | None:
        """Return the masks, without what a tokenizer has beyond `num_words`."""
        if not self.rows:
            return None
        bits = torch.from_numpy(self.bits[: len(self.rows), :num_words])
        return AllowedTokens(torch.tensor(self.rows), bits)


def is_constrained(params: SamplingParams) -> bool:
    """Return whether a sequence with these parameters may not choose every token."""
    return bool(params.grammar or params.allowed_token_ids or params.bad_words)


class Constraints:
    """The constraints of one table's sequences."""

    def __init__(self, table: SequenceTable, grammars: Grammars | None) -> None:
        """`grammars` None: sequences with a grammar are refused."""
        self._table = table
        self._grammars = grammars
        self._num_words = -(-table.limits.vocab_size // 32)
        self._states: dict[int, _State] = {}

    def end(self, seq_id: int) -> None:
        """Forget a sequence, constrained or not."""
        self._states.pop(seq_id, None)

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
        constrained = [idx for idx, each in enumerate(params) if is_constrained(each)]
        if not constrained:
            return Constrained(None, [], {})
        drafts = {each.first: each.draft for each in drafted}
        masks = _Masks(len(constrained), self._mask_words(params))
        banned: list[tuple[int, int]] = []
        refused: dict[int, str] = {}
        end_of_draft = 0
        for idx in constrained:
            if idx < end_of_draft:
                continue  # its root has dealt with it
            draft = drafts.get(idx)
            end_of_draft = idx + 1 + (0 if draft is None else len(draft.tokens))
            row, seq_id, own = rows[idx], seq_ids[idx], params[idx]
            banned += self._bad_words(row, idx, own, draft)
            state = self._states.get(seq_id)
            if state is None:
                state = self._states[seq_id] = self._begin(row, own)
            self._follow(row, state)
            self._mask(idx, state, draft, masks)
            if state.refusal:
                refused[seq_id] = state.refusal
        return Constrained(masks.allowed(self._num_words), banned, refused)

    def _mask_words(self, params: Sequence[SamplingParams]) -> int:
        """Return how many words a matcher writes, of which there may be more than logits need."""
        grammars = self._grammars
        if grammars is None or not any(each.grammar for each in params):
            return self._num_words
        return max(self._num_words, grammars.num_words)

    def _begin(self, row: int, params: SamplingParams) -> _State:
        state = _State(int(self._table.num_prompt[row]))
        if params.allowed_token_ids:
            flags = np.zeros(32 * self._num_words, dtype=np.uint8)
            flags[list(params.allowed_token_ids)] = 1
            state.allowed = np.packbits(flags, bitorder="little").view("<i4")
        if params.grammar:
            try:
                if self._grammars is None:
                    raise InvalidRequest("this node serves no grammars")
                state.matcher = self._grammars.matcher(params.grammar)
            except InvalidRequest as error:
                state.refusal = str(error)
        return state

    def _follow(self, row: int, state: _State) -> None:
        """Consume what the sequence has emitted since the last call."""
        end = int(self._table.num_known[row])
        if state.matcher is not None and not state.refusal:
            new = self._table.tokens[row, state.num_seen : end].tolist()
            if new and not state.matcher.consume_tokens(new):
                state.refusal = _refusal(state.matcher)
        state.num_seen = end

    def _mask(self, idx: int, state: _State, draft: Draft | None, masks: _Masks) -> None:
        """Add the masks of row `idx` and of the rows of a draft behind it.

        A token of a draft that is not allowed cannot be sampled before it, so that nothing behind
        it is accepted: these rows need no mask.
        """
        if state.refusal:
            return
        matcher = state.matcher
        if matcher is None:
            if state.allowed is not None:
                for row in range(idx, idx + 1 + (0 if draft is None else len(draft.tokens))):
                    masks.add(row)
                    masks.bits[len(masks.rows) - 1, : self._num_words] = state.allowed
            return
        self._add(idx, matcher, state, masks)
        if draft is None:
            return
        path, allowed = [ROOT], {ROOT}
        for token_idx in _depth_first(draft):
            parent = draft.parents[token_idx]
            if parent not in allowed:
                continue
            while path[-1] != parent:
                path.pop()
                matcher.rollback(1)
            if matcher.try_consume_tokens([draft.tokens[token_idx]]):
                allowed.add(token_idx)
                path.append(token_idx)
                self._add(idx + 1 + token_idx, matcher, state, masks)
        matcher.rollback(len(path) - 1)

    def _add(self, idx: int, matcher: LLMatcher, state: _State, masks: _Masks) -> None:
        """Add the mask of the matcher's state for row `idx`."""
        matcher.unsafe_compute_mask_ptr(masks.add(idx), masks.row_bytes)
        if matcher.is_error():
            state.refusal = _refusal(matcher)
        elif state.allowed is not None:
            masks.bits[len(masks.rows) - 1, : self._num_words] &= state.allowed

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


def _depth_first(draft: Draft) -> list[int]:
    """Return the indices of a draft's tokens so that what follows a token comes behind it."""
    if draft.is_chain:
        return list(range(len(draft.tokens)))
    children: dict[int, list[int]] = {}
    for idx, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(idx)
    order: list[int] = []
    waiting = children.get(ROOT, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    return order


def _refusal(matcher: LLMatcher) -> str:
    return f"the grammar cannot be followed: {reason_of(matcher.get_error())}"
