"""The suffix drafter against a naive search for substrings."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_decode import suffix
from spec_decode.draft import NO_DRAFT, ROOT, Draft, DraftRequest, DraftText
from spec_decode.suffix import SuffixDrafter, SuffixIndex, SuffixLimits, drafter_of, limits_of
from topspin.plan.speculation import Speculation

FREE = SuffixLimits(min_match=1, factor=None, min_share=0.0)


def text(tokens: list[int], *, seq_id: int = 1, num_prompt: int = 1, salt: str = "") -> DraftText:
    return DraftText(seq_id, np.array(tokens, dtype=np.int32), num_prompt, salt)


def draft_of(drafter: SuffixDrafter, tokens: list[int], at_most: int, **kwargs: object) -> Draft:
    (draft,) = drafter.draft([DraftRequest(text(tokens, **kwargs), at_most)])  # type: ignore[arg-type]
    return draft


def naive_match(
    tokens: list[int], wanted: list[int], limits: SuffixLimits
) -> tuple[int, list[int]]:
    """Return the longest length and the places in `tokens` behind an occurrence that is no end."""
    for length in range(min(limits.max_match, len(wanted)), limits.min_match - 1, -1):
        ends = [
            end
            for end in range(length, len(tokens))
            if tokens[end - length : end] == wanted[-length:]
        ]
        if ends:
            return length, ends
    return 0, []


def naive_rows(tokens: list[int], limits: SuffixLimits, at_most: int) -> list[list[int]]:
    """Return what followed each place of the longest match, as if the text repeated itself."""
    length, ends = naive_match(tokens, tokens, limits)
    if limits.factor is not None:
        at_most = min(at_most, int(limits.factor * length))
    rows = []
    for end in ends:
        grown = list(tokens)
        while len(grown) < end + at_most:
            grown.append(grown[len(grown) - (len(tokens) - end)])
        rows.append(grown[end : end + at_most])
    return rows


def path_shares(rows: list[list[int]], draft: Draft) -> list[float]:
    """Return the share of `rows` that begin with each token's path."""
    paths = [list(draft.path(idx)) for idx in range(len(draft.tokens))]
    return [sum(row[: len(path)] == path for row in rows) / len(rows) for path in paths]


tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(tokens=tokens_of, at_most=st.integers(1, 6), max_match=st.integers(1, 5))
def test_a_chain_follows_the_most_frequent_continuation(
    tokens: list[int], at_most: int, max_match: int
) -> None:
    limits = FREE._replace(max_match=max_match)
    draft = draft_of(SuffixDrafter(limits), tokens, at_most)
    rows = naive_rows(tokens, limits, at_most)
    if not rows:
        assert draft == NO_DRAFT
        return
    assert draft.is_chain
    assert len(draft.tokens) == at_most
    for depth, token in enumerate(draft.tokens):
        counts = Counter(row[depth] for row in rows)
        assert counts[token] == max(counts.values())
        rows = [row for row in rows if row[depth] == token]


@given(tokens=tokens_of, at_most=st.integers(1, 6))
def test_a_tree_has_the_most_frequent_continuations(tokens: list[int], at_most: int) -> None:
    limits = FREE._replace(branches=True)
    draft = draft_of(SuffixDrafter(limits), tokens, at_most)
    rows = naive_rows(tokens, limits, at_most)
    if not rows:
        assert draft == NO_DRAFT
        return
    prefixes = Counter(tuple(row[:length]) for row in rows for length in range(1, at_most + 1))
    best = sorted(prefixes.values(), reverse=True)[:at_most]
    found = sorted(path_shares(rows, draft), reverse=True)
    assert found == pytest.approx([count / len(rows) for count in best])
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft.tokens)


@given(tokens=tokens_of, sizes=st.lists(st.integers(1, 9)), min_match=st.integers(1, 3))
def test_an_index_that_grew_finds_what_a_new_one_finds(
    tokens: list[int], sizes: list[int], min_match: int
) -> None:
    limits = SuffixLimits(min_match=min_match)
    grown = SuffixDrafter(limits)
    end = 0
    for size in [*sizes, len(tokens)]:
        end = min(end + size, len(tokens))
        assert draft_of(grown, tokens[:end], 4) == draft_of(SuffixDrafter(limits), tokens[:end], 4)


@given(outputs=st.lists(tokens_of, max_size=4), tokens=tokens_of)
def test_others_outputs_are_searched_each_by_itself(
    outputs: list[list[int]], tokens: list[int]
) -> None:
    index = SuffixIndex(max_match=4)
    for output in outputs:
        index.append(np.array(output, dtype=np.int32))
        index.end_text()
    limits = SuffixLimits(min_match=1, max_match=4)
    matches = [naive_match([*output, -1], tokens, limits) for output in outputs]
    longest = max((length for length, _ in matches), default=0)
    found = index.longest_match(np.array(tokens[-4:], dtype=np.int32), at_least=1, is_own=False)
    assert found.length == longest
    rows = index.after(found.ends, 3, is_own=False) if longest else []
    assert rows == [
        output[end : end + 3]
        for output, (length, ends) in zip(outputs, matches, strict=True)
        if length == longest and length
        for end in ends
    ]


def test_a_short_match_makes_a_short_draft() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert draft_of(SuffixDrafter(), tokens, 8).tokens == (4, 5, 6)
    assert draft_of(SuffixDrafter(SuffixLimits(factor=2.0)), tokens, 8).tokens == (4, 5, 6, 7, 8, 9)
    assert draft_of(SuffixDrafter(SuffixLimits(min_match=4)), tokens, 8) == NO_DRAFT
    assert draft_of(SuffixDrafter(SuffixLimits(max_match=2)), tokens, 8).tokens == (4, 5)


def test_a_repetition_goes_on() -> None:
    assert draft_of(SuffixDrafter(FREE), [7, 7, 7, 7], 6).tokens == (7,) * 6
    assert draft_of(SuffixDrafter(FREE), [1, 2, 1, 2, 1], 5).tokens == (2, 1, 2, 1, 2)


def test_rare_continuations_are_not_drafted() -> None:
    tokens = [1, 2, 9, 1, 3, 9, 1, 4, 9, 1, 5, 9, 1]
    for branches in (False, True):
        limits = SuffixLimits(
            branches=branches, min_share=0.3, factor=None, min_match=1, max_match=1
        )
        assert draft_of(SuffixDrafter(limits), tokens, 4) == NO_DRAFT
    limits = SuffixLimits(branches=True, min_share=0.2, factor=None, min_match=1, max_match=1)
    draft = draft_of(SuffixDrafter(limits), tokens, 4)
    assert sorted(draft.tokens) == [2, 3, 4, 5]
    assert draft.parents == (ROOT,) * 4


def test_outputs_are_shared_within_a_salt_only() -> None:
    drafter = SuffixDrafter()
    output = [*range(10, 30)]
    drafter.end(text([1, 2, 3, *output], seq_id=1, num_prompt=3, salt="a"))
    asked = [99, 10, 11, 12]
    assert draft_of(drafter, asked, 8, seq_id=2, salt="a").tokens == (13, 14, 15)
    assert draft_of(drafter, asked, 8, seq_id=3, salt="b") == NO_DRAFT
    assert draft_of(drafter, [99, 1, 2], 8, seq_id=4, salt="a") == NO_DRAFT, "a prompt was shared"
    alone = SuffixDrafter(SuffixLimits(shares=False))
    alone.end(text([1, 2, 3, *output], seq_id=1, num_prompt=3, salt="a"))
    assert draft_of(alone, asked, 8, seq_id=2, salt="a") == NO_DRAFT


def test_the_longer_match_wins_and_ones_own_if_equal() -> None:
    drafter = SuffixDrafter()
    drafter.end(text([0, 5, 6, 7, 8, 8], seq_id=1))
    assert draft_of(drafter, [6, 7, 1, 2, 6, 7], 8, seq_id=2).tokens == (1, 2)
    assert draft_of(drafter, [6, 7, 1, 2, 5, 6, 7], 8, seq_id=2 + 1).tokens == (8, 8)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_TENANT_TOKENS", 64)
    monkeypatch.setattr(suffix, "MAX_SHARED_TOKENS", 200)
    monkeypatch.setattr(suffix, "MAX_OWN_TOKENS", 50)
    rng = random.Random(1)
    drafter = SuffixDrafter()
    for seq_id in range(200):
        salt = str(rng.randrange(12))
        tokens = [rng.randrange(9) for _ in range(rng.randint(1, 120))]
        draft_of(drafter, tokens, 4, seq_id=seq_id, salt=salt)
        assert len(drafter._own[seq_id].index) <= 50
        drafter.end(text(tokens, seq_id=seq_id, salt=salt))
        sizes = [len(tenant) for tenant in drafter._tenants.values()]
        assert sum(sizes) == drafter._num_shared <= 200
        assert max(sizes, default=0) <= 64
    assert not drafter._own
    # The last output of a tenant that fits is there.
    drafter.end(text([0, 101, 102, 103, 104], salt="new"))
    assert draft_of(drafter, [9, 101, 102], 4, salt="new").tokens == (103, 104)


def test_a_text_of_one_token_is_searched_in_bounded_time() -> None:
    """Every place matches: only the last ones are compared."""
    index = SuffixIndex(max_match=32)
    index.append(np.zeros(20_000, dtype=np.int32))
    match = index.longest_match(np.zeros(32, dtype=np.int32), at_least=1, is_own=True)
    assert match.length == 32
    assert len(match.ends) == suffix.MAX_PLACES
    assert match.ends[-1] == 32 + 20_000 - 1


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({"method": "suffix"}, SuffixLimits()),
        (
            {
                "method": "suffix",
                "branches": True,
                "prompt_lookup_min": 40,
                "suffix_decoding_max_spec_factor": 2.5,
                "suffix_decoding_min_token_prob": 0.0,
            },
            SuffixLimits(min_match=40, max_match=40, factor=2.5, min_share=0.0, branches=True),
        ),
        (
            {"method": "suffix", "prompt_lookup_max": 1},
            SuffixLimits(min_match=1, max_match=1),
        ),
        ({"method": "ngram"}, SuffixLimits(5, 5, None, 0.0, shares=False)),
        ({"method": "ngram", "prompt_lookup_max": 4}, SuffixLimits(4, 4, None, 0.0, shares=False)),
        (
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3},
            SuffixLimits(2, 3, None, 0.0, shares=False),
        ),
    ],
)
def test_settings_become_limits(settings: dict[str, Any], limits: SuffixLimits) -> None:
    assert limits_of(Speculation(**settings)) == limits


def test_nothing_drafts_unless_asked() -> None:
    assert drafter_of(None) is None
