"""A draft model that is a table, with the rules of a cache."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from spec_decode.draft import ROOT, DraftRequest, DraftText
from spec_decode.forest import Kept, PassRows

VOCAB = 5


def request(seq_id: int, tokens: Sequence[int], at_most: int = 4) -> DraftRequest:
    return DraftRequest(DraftText(seq_id, np.array(tokens, dtype=np.int32), num_prompt=1), at_most)


def logps_after(path: Sequence[int]) -> dict[int, float]:
    """Return the table's row for a text: random, but the same each time."""
    rng = random.Random(repr(list(path)[-6:]))
    weights = [rng.random() ** 3 + 1e-3 for _ in range(VOCAB)]
    return {token: math.log(each / sum(weights)) for token, each in enumerate(weights)}


class Table:
    """A CachedModel with the rules of a cache: rows follow rows that are there."""

    vocab_size = VOCAB

    def __init__(self, room: int = 10_000) -> None:
        self.room = room
        self.verified: dict[int, list[int]] = {}
        self.live: dict[int, list[tuple[int, int]]] = {}
        self.num_rows = 0
        self.num_passes = 0

    def open(self, seq_id: int, *, num_prompt: int) -> None:
        assert seq_id not in self.verified
        self.verified[seq_id], self.live[seq_id] = [], []

    def used(self) -> int:
        return sum(map(len, self.verified.values())) + sum(map(len, self.live.values()))

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        return self.used() + num_rows <= self.room

    def path(self, seq_id: int, place: int) -> list[int]:
        tokens: list[int] = []
        while place != ROOT:
            token, place = self.live[seq_id][place]
            tokens.insert(0, token)
        return self.verified[seq_id] + tokens

    def forward(self, rows: Sequence[PassRows], *, num_top: int) -> list[list[dict[int, float]]]:
        assert len({each.seq_id for each in rows}) == len(rows)
        self.num_passes += 1
        found = []
        for each in rows:
            live = self.live[each.seq_id]
            self.num_rows += len(each.tokens)
            for token, parent in zip(each.tokens, each.parents, strict=True):
                assert ROOT <= parent < len(live)
                assert 0 <= token < VOCAB
                live.append((token, parent))
            wanted = range(len(live) - each.num_wanted, len(live))
            rows_of = [logps_after(self.path(each.seq_id, place)) for place in wanted]
            found.append(
                [dict(sorted(row.items(), key=lambda kv: -kv[1])[:num_top]) for row in rows_of]
            )
        assert self.used() <= self.room
        return found

    def keep(self, kept: Sequence[Kept]) -> None:
        for each in kept:
            live = self.live[each.seq_id]
            at = ROOT
            for place in each.verified:
                assert live[place][1] == at
                self.verified[each.seq_id].append(live[place][0])
                at = place
            new = {place: idx for idx, place in enumerate(each.kept)} | {at: ROOT}
            self.live[each.seq_id] = [(live[p][0], new[live[p][1]]) for p in each.kept]

    def drop(self, seq_id: int) -> None:
        del self.verified[seq_id], self.live[seq_id]
