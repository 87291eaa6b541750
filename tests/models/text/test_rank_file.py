"""Tokenizers made of tiktoken's files against tiktoken itself, with a small vocabulary."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text.rank_file import NUM_RESERVED, PATTERNS
from models.text.tokenizer import IncrementalDetokenizer, Tokenizer
from models.text.tokenizer_files import effective_tokenizer
from models.text.tokenizer_names import RANK_FILE
from topspin.errors import ConfigError

FAMILY = "kimi_k2"
TEXTS = (
    "The quick brown fox doesn't jump; it's the LAZY dog's turn, they've said, and we'll see.",
    "def add(a, b):\n    return a + b  # the sum\n\n\nclass Sum2024:\n\tpass\r\n",
    "模型在推理时把注意力和专家分开。模型 Kimi-K2 有 1000B 参数、第 12345 次。",
    "naïve façade, Ünïcödé ÄÖÜ, Ελληνικά, русский ЯЗЫК, 한국어, العربية, emoji 👩‍👩‍👧😀",
    "  two   spaces\n \n\t tab 3.14159 1,000,000 CamelCaseWord HTTPServer x_1 __init__",
)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 7: "<|tool_call_begin|>"}
PIECES = st.sampled_from(
    [
        "the",
        " The",
        "'s",
        "'LL",
        "模型",
        "Kimi",
        "12345",
        "\n",
        "\r\n",
        "  ",
        "é",
        "Ü",
        "ǅ",
        "ʰ",
        "़",
    ]
)
ANY_TEXT = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


def trained(num_merges: int = 400) -> dict[bytes, int]:
    """Return ranks of all bytes and of pairs that are frequent in TEXTS, as byte-pair training."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for text in TEXTS for word in text.split()]
    words += [[bytes([byte]) for byte in text.encode()] for text in TEXTS]
    for _ in range(num_merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks.setdefault(left + right, len(ranks))
        for word in words:
            idx = 0
            while idx < len(word) - 1:
                if (word[idx], word[idx + 1]) == (left, right):
                    word[idx : idx + 2] = [left + right]
                idx += 1
    return ranks


RANKS = trained()
SPECIAL = {
    NAMED.get(idx, f"<|reserved_token_{len(RANKS) + idx}|>"): len(RANKS) + idx
    for idx in range(NUM_RESERVED)
}
ORACLE = tiktoken.Encoding(
    "test", pat_str=PATTERNS[FAMILY], mergeable_ranks=RANKS, special_tokens=SPECIAL
)


def write(path: Path, ranks: dict[bytes, int] = RANKS, *, family: str = FAMILY) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (path / RANK_FILE).write_bytes(b"\n".join(lines) + b"\n")
    listed = {str(len(RANKS) + idx): {"content": name} for idx, name in NAMED.items()}
    fields = {"added_tokens_decoder": listed, "eos_token": "[EOS]"}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(write(tmp_path_factory.mktemp("ranks")))


def test_there_are_as_many_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == ORACLE.n_vocab == len(RANKS) + NUM_RESERVED
    for name, idx in SPECIAL.items():
        assert tokenizer.token_id(name) == idx


@settings(max_examples=50)
@given(text=ANY_TEXT)
def test_texts_have_the_tokens_of_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    found = tokenizer.encode(text, add_special_tokens=False)
    assert list(found) == ORACLE.encode(text, allowed_special="all")


@pytest.mark.parametrize("text", [*TEXTS, "a[EOS]b<|im_end|>", "<|tool_call_begin|>f<|reserved_"])
def test_and_so_have_longer_ones(tokenizer: Tokenizer, text: str) -> None:
    found = tokenizer.encode(text, add_special_tokens=False)
    assert list(found) == ORACLE.encode(text, allowed_special="all")
    streamed = IncrementalDetokenizer(tokenizer, prompt_ids=(), skip_special_tokens=False)
    shown = "".join(streamed.push([each]) for each in found) + streamed.flush()
    assert shown == text


def test_every_token_stands_for_its_bytes(tokenizer: Tokenizer) -> None:
    for token, rank in RANKS.items():
        assert tokenizer.token_bytes(rank) == token


def test_a_text_has_no_fewer_tokens_than_its_bound(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert 0 < tokenizer.fewest_tokens(text) <= len(ORACLE.encode(text))


def test_its_description_is_that_of_a_tokenizer_file(tmp_path: Path) -> None:
    ranks, other = tmp_path / "ranks", tmp_path / "json"
    for directory in (ranks, other):
        directory.mkdir()
    effective_tokenizer(write(ranks)).save(str(other / "tokenizer.json"))
    text = "".join(TEXTS)
    again = effective_tokenizer(other).encode(text, add_special_tokens=False)
    assert again.ids == ORACLE.encode(text)


@pytest.mark.parametrize(
    ("ranks", "family", "error"),
    [
        (RANKS, "deepseek_v3", "ranks are read of the model_type kimi_k2, not of deepseek_v3"),
        ({b"a": 0}, FAMILY, "not every byte is a token"),
        ({**RANKS, b"zzzz": 9999}, FAMILY, "ranks are not 0, 1"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, ranks: dict[bytes, int], family: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        effective_tokenizer(write(tmp_path, ranks, family=family))
    (tmp_path / RANK_FILE).write_bytes(b"no rank\n")
    with pytest.raises(ConfigError, match=r"line 1 is no token|not of deepseek_v3"):
        effective_tokenizer(tmp_path)
