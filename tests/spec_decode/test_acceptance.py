"""Acceptance is lossless: by enumeration of all draws, in exact fractions."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

import pytest

from spec_decode.draft import MAX_SHAPED_ROWS, ROOT, Draft, accepted, row_step, trim
from tests.pairwise import few

VOCAB = 3
LENGTH = 3
Path = tuple[int, ...]
Law = dict[Path, Fraction]


class Target:
    """Random probabilities of the next token after each path, some of them 0."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._laws: dict[Path, list[Fraction]] = {}
        for length in range(LENGTH):
            for path in product(range(VOCAB), repeat=length):
                weights = [rng.choice((0, 1, 2, 5)) for _ in range(VOCAB)]
                weights[rng.randrange(VOCAB)] += 1
                self._laws[path] = [Fraction(each, sum(weights)) for each in weights]

    def law(self, path: Path) -> list[Fraction]:
        return self._laws[path]

    def token(self, path: Path, uniform: Fraction) -> int:
        """Return the token that inversion of the CDF gives."""
        total = Fraction(0)
        for token, share in enumerate(self.law(path)):
            total += share
            if uniform < total:
                return token
        raise AssertionError(uniform)

    def plain(self) -> Law:
        law: Law = {}
        for path in product(range(VOCAB), repeat=LENGTH):
            share = Fraction(1)
            for idx, token in enumerate(path):
                share *= self.law(path[:idx])[token]
            if share:
                law[path] = share
        return law


def some_draft(rng: random.Random) -> Draft:
    """Return a draft of depth < LENGTH, no token twice behind the same one."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(rng.randint(0, 5)):
        parent = rng.randint(ROOT, len(tokens) - 1)
        depth = 1 if parent == ROOT else depths[parent] + 1
        token = rng.randrange(VOCAB)
        if depth < LENGTH and (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
    return Draft(tuple(tokens), tuple(parents))


def draws(target: Target, rows: Sequence[Path]) -> Iterator[tuple[list[int], Fraction]]:
    """Yield all tokens that the rows after `rows` may sample, and their probabilities."""
    for tokens in product(range(VOCAB), repeat=len(rows)):
        share = Fraction(1)
        for path, token in zip(rows, tokens, strict=True):
            share *= target.law(path)[token]
        if share:
            yield list(tokens), share


def emitted(draft: Draft, sampled: Sequence[int]) -> Path:
    path = accepted(draft, sampled, [True] * len(sampled))
    return tuple(sampled[0:1]) + tuple(sampled[1 + each] for each in path)


def generated(target: Target, seed: int) -> Law:
    """Return the law of LENGTH tokens, generated with random drafts in every step."""
    law: Law = defaultdict(Fraction)

    def go_on(known: Path, share: Fraction) -> None:
        if len(known) >= LENGTH:
            law[known[:LENGTH]] += share
            return
        # The draft may depend on what is known, never on the draws.
        draft = some_draft(random.Random(f"{seed} {known}"))
        rows = [known, *((known + draft.path(idx)) for idx in range(len(draft.tokens)))]
        rows = [row if len(row) < LENGTH else row[: LENGTH - 1] for row in rows]
        for sampled, chance in draws(target, rows):
            go_on(known + emitted(draft, sampled), share * chance)

    go_on((), Fraction(1))
    return dict(law)


@pytest.mark.parametrize("seed", few(range(12), *range(8)))
def test_any_drafts_leave_the_targets_law(seed: int) -> None:
    target = Target(seed)
    plain = target.plain()
    assert sum(plain.values()) == 1
    assert generated(target, seed) == plain


@pytest.mark.parametrize("seed", few(range(6), 0, 1))
def test_draws_by_position_give_the_tokens_of_plain_decoding(seed: int) -> None:
    """All rows of a position share its uniform number; of these a grid finer than all laws."""
    target = Target(seed)
    grid = [Fraction(2 * each + 1, 26) for each in range(13)]
    num_accepted = 0
    for uniforms in product(grid, repeat=LENGTH):
        plain: Path = ()
        for uniform in uniforms:
            plain += (target.token(plain, uniform),)
        known: Path = ()
        while len(known) < LENGTH:
            draft = some_draft(random.Random(f"{seed} {known}"))
            rows = [known, *((known + draft.path(idx)) for idx in range(len(draft.tokens)))]
            sampled = [
                target.token(row, uniforms[len(row)]) if len(row) < LENGTH else 0 for row in rows
            ]
            new = emitted(draft, sampled)
            num_accepted += len(new) - 1
            known += new
        assert known[:LENGTH] == plain
    assert num_accepted > 0


def test_nothing_is_accepted_behind_a_row_without_numbers() -> None:
    draft = Draft((7, 8, 7, 9), (ROOT, ROOT, 1, 2))
    assert accepted(draft, [8, 0, 7, 9, 5], [True] * 5) == [1, 2, 3]
    assert accepted(draft, [8, 0, 7, 9, 5], [True, True, True, False, True]) == [1, 2]
    assert accepted(draft, [8, 0, 7, 9, 5], [False, True, True, True, True]) == []


@pytest.mark.parametrize(
    ("num_rows", "lengths", "left"),
    [
        (1, [7], [7]),
        (3, [5, 7], [5, 7]),
        (4, [7, 6], [6, 6]),
        (12, [1, 4], [1, 3]),
        (30, [1, 1, 1, 2], [1, 1]),
        (33, [1], []),
        (33, [4, 3], [4, 3]),
        (500, [7, 2], [7, 2]),
    ],
)
def test_drafts_are_trimmed_to_few_numbers_of_rows(
    num_rows: int, lengths: list[int], left: list[int]
) -> None:
    drafts = {key: Draft.chain(range(length), [0.0] * length) for key, length in enumerate(lengths)}
    kept = trim(drafts, num_rows)
    assert sorted(len(each.tokens) for each in kept.values()) == sorted(left)
    total = num_rows + sum(left)
    assert total % row_step(total) == 0 or not left or total > MAX_SHAPED_ROWS
    for key, each in kept.items():
        count = len(each.tokens)
        assert each == Draft(*(part[:count] for part in drafts[key]))
