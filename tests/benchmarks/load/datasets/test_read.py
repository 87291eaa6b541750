"""Datasets read from files: the requests of each format, and errors that name a bad line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from benchmarks.load import datasets
from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets import DatasetSettings
from models.text.tokenizer import Tokenizer
from tests.benchmarks.load.words import SENTENCES, write_byte_level
from topspin.errors import ConfigError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def _load(
    tokenizer: Tokenizer | None, path: Path, *, seed: int = 0, **settings: Any
) -> list[BenchRequest]:
    asked = DatasetSettings(path=path, **settings)
    return datasets.load(asked, tokenizer, np.random.default_rng(seed))


def _write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def _write_lines(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values))
    return path


def _talk(*texts: str) -> dict[str, Any]:
    speakers = ("human", "gpt")
    turns = [{"from": speakers[idx % 2], "value": text} for idx, text in enumerate(texts)]
    return {"id": texts[0][:8], "conversations": turns}


def test_sharegpt_takes_the_first_question_and_the_answers_length(
    tmp_path: Path, tokenizer: Tokenizer, oracle: tokenizers.Tokenizer
) -> None:
    talks = [
        _talk(SENTENCES[0], SENTENCES[1], SENTENCES[2], "and more"),
        _talk("alone"),
        _talk(SENTENCES[2], "no"),
        _talk(" ".join(SENTENCES * 20), SENTENCES[3]),
        _talk(SENTENCES[3], SENTENCES[0]),
    ]
    talks[0]["conversations"].append({"from": "tool", "value": None})
    path = _write_json(tmp_path / "s.json", talks)
    requests = _load(tokenizer, path, name="sharegpt", in_order=True, max_prompt_len=50)
    assert [r.prompt for r in requests] == [SENTENCES[0], SENTENCES[3]]
    for request, reply in zip(requests, (SENTENCES[1], SENTENCES[0]), strict=True):
        assert request.prompt_tokens == len(oracle.encode(str(request.prompt)).ids)
        assert request.max_tokens == len(oracle.encode(reply).ids)
    fixed = _load(tokenizer, path, name="sharegpt", sharegpt_output_len=3, max_prompt_len=50)
    assert {r.prompt for r in fixed} == {SENTENCES[0], SENTENCES[2], SENTENCES[3]}
    assert {r.max_tokens for r in fixed} == {3}


def test_files_are_mixed_by_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write_json(
        tmp_path / "s.json", [_talk(f"{s} {i}", s) for i in range(9) for s in SENTENCES]
    )
    first = _load(tokenizer, path, name="sharegpt", num_prompts=5, seed=1)
    assert first == _load(tokenizer, path, name="sharegpt", num_prompts=5, seed=1)
    assert first != _load(tokenizer, path, name="sharegpt", num_prompts=5, seed=2)
    assert len(first) == 5


_CUSTOM = [
    {"prompt": "the ball", "output_tokens": 5},
    {"prompt_token_ids": [5, 6, 7], "output_tokens": 2},
]


def test_custom_lines_are_text_or_ids(
    tmp_path: Path, tokenizer: Tokenizer, oracle: tokenizers.Tokenizer
) -> None:
    path = _write_lines(tmp_path / "c.jsonl", [_CUSTOM[0], "", _CUSTOM[1]])
    text, ids = _load(tokenizer, path, name="custom", in_order=True)
    assert (text.prompt, text.max_tokens) == ("the ball", 5)
    assert text.prompt_tokens == len(oracle.encode("the ball").ids)
    assert (ids.prompt, ids.prompt_tokens, ids.max_tokens) == ([5, 6, 7], 3, 2)
    assert {r.max_tokens for r in _load(None, path, name="custom", custom_output_len=9)} == {9}


def test_custom_messages_and_timestamps(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    lines = [
        {"prompt": "late", "output_tokens": 1, "timestamp": 12.5},
        {"messages": turns, "output_tokens": 2, "timestamp": 10},
    ]
    path = _write_lines(tmp_path / "c.jsonl", lines)
    requests = _load(None, path, name="custom", chat=True)
    assert [(r.arrival_s, r.messages, r.prompt) for r in requests] == [
        (0.0, turns, None),
        (2.5, None, "late"),
    ]


_BURST = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,2.5,ChatGPT,3,18,21,Conversation log
45,,1.0,GPT-4,40,2,42,API log
50,,1.0,GPT-4,7,0,7,API log
40,,1.0,ChatGPT,6,1,7,API log
"""


def test_burstgpt_gives_lengths_and_distances_in_time(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(_BURST)
    requests = _load(None, path, name="burstgpt", vocab_size=100)
    assert [(r.arrival_s, r.prompt_tokens, r.max_tokens) for r in requests] == [
        (0.0, 3, 18),
        (35.0, 6, 1),
        (40.0, 40, 2),
    ]
    assert all(len(r.prompt or ()) == r.prompt_tokens for r in requests)
    only = _load(None, path, name="burstgpt", vocab_size=100, burstgpt_model="GPT-4")
    assert [(r.arrival_s, r.prompt_tokens) for r in only] == [(0.0, 40)]
    older = path.with_name("older.csv")
    older.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,3,4,7,x\n"
    )
    assert _load(None, older, name="burstgpt", vocab_size=9)[0].max_tokens == 4


def test_a_window_of_a_trace_begins_at_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(_BURST)
    window = {"trace_start_s": 10.0, "trace_duration_s": 30.0}
    requests = _load(None, path, name="burstgpt", vocab_size=9, **window)
    assert [(r.arrival_s, r.prompt_tokens) for r in requests] == [(0.0, 6)]
    short = _load(None, path, name="burstgpt", vocab_size=9, max_total_len=20)
    assert [r.prompt_tokens for r in short] == [6]
    with pytest.raises(ConfigError, match="holds no request"):
        _load(None, path, name="burstgpt", vocab_size=9, trace_start_s=100.0)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("sharegpt", '[\n{"a": 1},\n]', "line 3: is not JSON"),
        ("sharegpt", '{"a": 1}', "must hold a JSON list, not a dict"),
        ("sharegpt", "[3]", "entry 1: must be a JSON object"),
        ("sharegpt", '[{"conversations": [{"from": "x", "value": ""}]}]', "entry 1: message 1 is"),
        ("sharegpt", '[{"conversations": [{"from": "human"}]}]', "message 1 has no text"),
        ("sharegpt", '[{"other": 1}]', "conversations must be a list"),
        ("sharegpt", "[]", "holds no request"),
        ("custom", '{"prompt": "x", "output_tokens": 1}\n{', "line 2: is not JSON"),
        ("custom", '{"output_tokens": 1}', "line 1: needs exactly one of"),
        ("custom", '{"prompt": "x"}', "line 1: has no output_tokens"),
        ("custom", '{"prompt": "", "output_tokens": 1}', "prompt must be a text"),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens must be a number of at"),
        ("custom", '{"prompt": "x", "output_tokens": 1.5}', "must be a whole number, not 1.5"),
        ("custom", '{"prompt": "x", "output_tokens": true}', "not True"),
        ("custom", '{"prompt_token_ids": [1], "output_tokens": 1}', "--backend openai$"),
        (
            "custom",
            '{"prompt": "x", "output_tokens": 1, "timestamp": 1}\n\n'
            '{"prompt": "x", "output_tokens": 1}',
            "line 3: has no timestamp",
        ),
        ("burstgpt", "Timestamp,Model\n", "line 1: has no column Request tokens, Response tok"),
        (
            "burstgpt",
            "Timestamp,Model,Request tokens,Response tokens\n1,a,2,3\nx,a,2,3\n",
            "line 3: Timestamp must be a number, not 'x'",
        ),
    ],
)
def test_bad_files_are_refused_with_place_and_reason(
    tmp_path: Path, tokenizer: Tokenizer, name: str, text: str, reason: str
) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        _load(tokenizer, path, name=name, chat=name == "custom")
    assert str(path) in str(caught.value)


def test_messages_need_a_chat_endpoint(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    path = _write_lines(tmp_path / "c.jsonl", [{"messages": turns, "output_tokens": 1}])
    with pytest.raises(ConfigError, match="--backend openai-chat"):
        _load(None, path, name="custom")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        _load(None, tmp_path / "nowhere", name="custom")
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="latin: cannot be read"):
        _load(None, tmp_path / "latin", name="custom")
