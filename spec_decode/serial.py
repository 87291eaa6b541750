"""Drafts by a draft model while the target waits: the serial runner of the token trees.

Owns the passes of one draft: as many as are worth it, all sequences together, before the target
goes on. Knows no tensors and no messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_decode.draft import NO_DRAFT, Draft, DraftRequest, DraftText
from spec_decode.forest import CachedModel, Forest, Growth


class SerialDrafter:
    """Drafts with a draft model; satisfies spec_decode.draft.Drafter.

    A sequence that the model has no room for is not drafted; those that were drafted longest ago
    make room. The draft is the best one by the model's probabilities that `growth` finds; there is
    none of a text, as a long prompt, of which the model has not seen more than a pass feeds.
    """

    def __init__(
        self, model: CachedModel, growth: Growth, *, max_length: int, reuses_trees: bool = True
    ) -> None:
        """`max_length` is the most positions that the model computes; Forest has `reuses_trees`."""
        self._forest = Forest(model, growth, reuses_trees=reuses_trees)
        self._growth = growth
        self._max_length = max_length

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        forest = self._forest
        fitting = {each.text.seq_id: each for each in requests if self._fits(each)}
        self._advance([each.text for each in fitting.values()])
        passes = dict.fromkeys(fitting, self._growth.passes)
        going = list(fitting)
        while going:
            # What follows the last of the best nodes is no better than that one.
            reach = {key: fitting[key].at_most - 1 for key in going if passes[key]}
            grown = forest.grow(reach, busy=fitting.keys())
            for key, has_grown in grown.items():
                passes[key] -= has_grown
            # The rest of a long prompt is fed with the next drafts: others do not wait for it.
            going = [seq_id for seq_id in grown if not forest.lag(seq_id)]
        return [self._draft(each) for each in requests]

    def feed(self, texts: Sequence[DraftText]) -> None:
        """Let the model compute all tokens of `texts`, as far as it has room for them."""
        fitting = {each.seq_id: 0 for each in texts if len(each.tokens) <= self._max_length}
        self._advance([each for each in texts if each.seq_id in fitting])
        going = [seq_id for seq_id in fitting if self._forest.lag(seq_id)]
        while going:
            grown = self._forest.grow(dict.fromkeys(going, 0), busy=fitting)
            going = [seq_id for seq_id in grown if self._forest.lag(seq_id)]

    def _advance(self, texts: Sequence[DraftText]) -> None:
        """Let the forest know all tokens of `texts`."""
        new = {}
        for each in texts:
            tokens = each.tokens[self._forest.known(each.seq_id) :].tolist()
            new[each.seq_id] = (tokens, each.num_prompt)
        self._forest.advance(new)

    def end(self, text: DraftText) -> None:
        self._forest.drop([text.seq_id])

    def close(self) -> None:
        """Do nothing: the model ends with its process."""

    def _fits(self, request: DraftRequest) -> bool:
        return len(request.text.tokens) + request.at_most <= self._max_length

    def _draft(self, request: DraftRequest) -> Draft:
        seq_id, count = request.text.seq_id, len(request.text.tokens)
        if self._forest.known(seq_id) != count:
            return NO_DRAFT
        return self._forest.draft(seq_id, request.at_most)
