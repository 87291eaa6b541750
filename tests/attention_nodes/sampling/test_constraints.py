"""The vocabulary that grammars, allowed_token_ids and bad_words leave, row by row."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from attention_nodes.step.step_inputs import Drafted
from spec_decode.draft import ROOT, Draft
from tests.attention_nodes.constrained import VOCAB, Bench, Checkpoint, params
from tests.checkpoints import EOS_TOKEN_ID
from tests.pairwise import few

DIGITS = LLMatcher.grammar_from_regex("[0-9]{3}(-[a-f]+)?")
WORDS = 'start: (word " ")* word\nword: /[a-z]+/ | "(" start ")"'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("tokenizer"))


def masks_of(bench: Bench, seq_id: int, draft: Draft | None = None) -> dict[int, set[int]]:
    """Return the allowed tokens of a sequence's rows, by the index of the row."""
    table = bench.table
    (row,) = table.rows_of(np.array([seq_id])).tolist()
    num_rows = 1 if draft is None else 1 + len(draft.tokens)
    drafted = [] if draft is None else [Drafted(row, 0, 0, draft)]
    asked = [table.sampling(row)] * num_rows
    constraints = bench.sampler._constraints
    found = constraints.of([row] * num_rows, [seq_id] * num_rows, asked, drafted)
    assert found.refused == {}
    banned: dict[int, set[int]] = {}
    for place, token in found.banned:
        banned.setdefault(place, set()).add(token)
    everything = set(range(VOCAB))
    masks = {place: everything - banned.get(place, set()) for place in range(num_rows)}
    if found.allowed is not None:
        rows, bits = found.allowed
        flags = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")
        for place, own in zip(rows.tolist(), flags, strict=True):
            masks[place] &= set(np.flatnonzero(own).tolist())
    return masks


def can_follow(checkpoint: Checkpoint, grammar: str, output: list[int]) -> set[int]:
    """Return the tokens after `output`, each asked for alone."""
    matcher = checkpoint.matcher(grammar)
    assert matcher.consume_tokens(output) or not output
    return {token for token in range(VOCAB) if matcher.validate_tokens([token]) == 1}


def random_tree(rng: random.Random, tokens: list[int], size: int) -> Draft:
    parents = [rng.randrange(-1, idx) if idx else ROOT for idx in range(size)]
    return Draft(tuple(rng.choice(tokens) for _ in range(size)), tuple(parents))


@pytest.mark.parametrize("seed", few(range(12), 0, 1, 2))
def test_rows_of_a_tree_have_the_masks_of_their_paths(checkpoint: Checkpoint, seed: int) -> None:
    rng = random.Random(seed)
    asked = params(grammar=WORDS, bad_words=tuple(map(tuple, map(checkpoint.tokens, ("ab", "c")))))
    bench = Bench(checkpoint, asked)
    output = checkpoint.tokens("ba (a")
    bench.admit(1, asked, output)
    tokens = [*checkpoint.tokens("abc ()"), EOS_TOKEN_ID]
    a, b, c = (checkpoint.tokens(each)[0] for each in "abc")
    num_checked = 0
    for _ in range(8):
        draft = random_tree(rng, tokens, rng.randrange(1, 12))
        masks = masks_of(bench, 1, draft)
        for idx in range(ROOT, len(draft.tokens)):
            text = [*output, *draft.path(idx)]
            matcher = checkpoint.matcher(WORDS)
            if EOS_TOKEN_ID in text or matcher.try_consume_tokens(text) < len(text):
                continue  # nothing is accepted behind it
            wanted = can_follow(checkpoint, WORDS, text) - {c}
            if text[-1] == a:
                wanted -= {b}
            assert masks[1 + idx] == wanted, (draft, idx)
            num_checked += 1
        # The draft has left no trace.
        assert masks_of(bench, 1)[0] == can_follow(checkpoint, WORDS, output) - {b, c}
    assert num_checked > 16


def test_padding_of_the_vocabulary_is_never_allowed(checkpoint: Checkpoint) -> None:
    anything = LLMatcher.grammar_from_lark(r"start: /(.|\n)*/")
    bench = Bench(checkpoint, params(grammar=anything))
    (allowed,) = masks_of(bench, 0).values()
    assert max(allowed) < checkpoint.tokenizer.vocab_size < VOCAB
    assert EOS_TOKEN_ID in allowed


def test_constraints_are_joined(checkpoint: Checkpoint) -> None:
    one, two, three = checkpoint.tokens("123")
    bench = Bench(
        checkpoint,
        params(grammar=DIGITS, allowed_token_ids=(one, two, EOS_TOKEN_ID, VOCAB - 1)),
        params(allowed_token_ids=(three, VOCAB - 1)),
        params(),
    )
    assert masks_of(bench, 0)[0] == {one, two}
    masks = masks_of(bench, 1, Draft.chain([three, one]))
    assert list(masks.values()) == [{three, VOCAB - 1}] * 3
    bench.run([0])
    assert re.fullmatch("[12]{3}", bench.text(0))
    bench.step([1, 2], torch.zeros(2, VOCAB))
    assert bench.output(1)[0] in (three, VOCAB - 1)


def test_a_word_is_banned_where_it_would_be_completed(checkpoint: Checkpoint) -> None:
    a, b, c = checkpoint.tokens("abc")
    words = ((a, b, c), (b, b), (c,), tuple(checkpoint.tokens("a" * 20)))
    bench = Bench(checkpoint)
    for number, (output, banned) in enumerate(
        [
            ([], {c}),
            ([b, c], {c}),
            ([a], {c}),
            ([a, b], {c, b}),
            ([a] * 19, {c, a}),
            ([b, a], {c}),
        ]
    ):
        bench.admit(number, params(bad_words=words), output)
        assert set(range(VOCAB)) - masks_of(bench, number)[0] == banned, output
    # A word of prompt and output together is none: the prompt ends with token 8.
    bench.admit(99, params(bad_words=((8, a),)))
    assert masks_of(bench, 99)[0] == set(range(VOCAB))


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_goes_on_where_the_output_ended(checkpoint: Checkpoint, seed: int) -> None:
    """Equal to the output without it, from any point on."""
    asked = params(grammar=WORDS, seed=seed)
    bench = Bench(checkpoint, asked, asked)
    bench.run([0], seed=seed)
    whole = bench.output(0)
    assert whole[-1] == EOS_TOKEN_ID
    for cut in range(0, len(whole) - 1, 3):
        bench.forget(1)
        bench.admit(1, asked, whole[:cut])
        assert masks_of(bench, 1)[0] == can_follow(checkpoint, WORDS, whole[:cut])


def test_a_sequence_with_a_grammar_that_cannot_be_followed_fails_alone(
    checkpoint: Checkpoint,
) -> None:
    bench = Bench(
        checkpoint,
        params(grammar="start: nothing"),
        params(grammar=DIGITS),
        params(grammar=DIGITS, allowed_token_ids=(40,)),
    )
    bench.admit(3, params(grammar=DIGITS), checkpoint.tokens("x"))
    bench.run([0, 1, 2, 3])
    assert re.fullmatch("[0-9]{3}(-[a-f]+)?", bench.text(1))
    assert sorted(bench.refused) == [0, 2, 3]
    assert 'unknown name: "nothing"' in bench.refused[0]
    assert "leave no token" in bench.refused[2]
    assert "cannot be followed" in bench.refused[3]
