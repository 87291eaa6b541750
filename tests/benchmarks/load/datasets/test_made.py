"""Made datasets: exact lengths by the tokenizers library, shared prefixes, seeds."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from benchmarks.load import datasets
from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets import DatasetSettings
from benchmarks.load.flags import add_flags
from models.text.tokenizer import Tokenizer
from tests.benchmarks.load.words import write_byte_level, write_pieces
from topspin.errors import ConfigError

Make = Callable[..., list[BenchRequest]]


@pytest.fixture(scope="module", params=[write_byte_level, write_pieces])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = request.param(tmp_path_factory.mktemp("tokenizer"))
    return path


@pytest.fixture(scope="module")
def encode(directory: Path) -> Callable[[str], list[int]]:
    oracle = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: list(oracle.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def make(directory: Path) -> Make:
    tokenizer = Tokenizer.from_directory(directory)

    def load(*, seed: int = 0, **settings: object) -> list[BenchRequest]:
        return datasets.load(
            DatasetSettings(**settings),  # type: ignore[arg-type]
            tokenizer,
            np.random.default_rng(seed),
        )

    return load


def test_random_ids_have_the_exact_lengths_and_no_special_token(
    make: Make, directory: Path
) -> None:
    requests = make(num_prompts=40, random_input_len=31, random_output_len=7)
    special = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(
        "<|eos|>"
    )
    assert len(requests) == 40
    for request in requests:
        assert isinstance(request.prompt, list)
        assert len(request.prompt) == request.prompt_tokens == 31
        assert request.max_tokens == 7
        assert special not in request.prompt
    assert len({tuple(r.prompt or ()) for r in requests}) == 40


def test_ids_without_a_tokenizer_come_from_the_vocabulary_size() -> None:
    settings = DatasetSettings(num_prompts=50, random_input_len=100, vocab_size=5)
    requests = datasets.load(settings, None, np.random.default_rng(0))
    assert {idx for r in requests for idx in r.prompt or ()} == {0, 1, 2, 3, 4}


def test_one_seed_gives_one_dataset(make: Make) -> None:
    for name in ("random", "prefix-repetition"):
        assert make(name=name, num_prompts=5, seed=3) == make(name=name, num_prompts=5, seed=3)
        assert make(name=name, num_prompts=5, seed=3) != make(name=name, num_prompts=5, seed=4)


@pytest.mark.parametrize("length", [1, 2, 33])
def test_text_encodes_to_exactly_the_length(
    make: Make, encode: Callable[[str], list[int]], length: int
) -> None:
    for request in make(num_prompts=30, random_input_len=length, prompt_format="text"):
        assert isinstance(request.prompt, str)
        assert len(encode(request.prompt)) == length == request.prompt_tokens
        assert request.prompt == request.prompt.strip()


def test_chat_text_encodes_to_exactly_the_length(
    make: Make, encode: Callable[[str], list[int]]
) -> None:
    for request in make(num_prompts=10, random_input_len=12, random_prefix_len=5, chat=True):
        assert isinstance(request.prompt, str)
        assert len(encode(request.prompt)) == 17
        assert request.prompt_tokens is None


def test_random_lengths_fill_their_range_ends_included(make: Make) -> None:
    ratio = datasets.settings.RangeRatio(input=0.3, output=0.5)
    requests = make(
        num_prompts=600, random_input_len=10, random_output_len=4, random_range_ratio=ratio
    )
    assert {r.prompt_tokens for r in requests} == set(range(7, 14))
    assert {r.max_tokens for r in requests} == {2, 3, 4, 5, 6}


def test_the_random_prefix_is_shared_by_all(make: Make) -> None:
    requests = make(num_prompts=20, random_input_len=6, random_prefix_len=9)
    assert len({tuple(r.prompt[:9]) for r in requests if isinstance(r.prompt, list)}) == 1
    assert len({tuple(r.prompt[9:]) for r in requests if isinstance(r.prompt, list)}) == 20


@pytest.mark.parametrize("text", [False, True])
def test_prefixes_repeat_equally_often_and_are_equal_tokens(
    make: Make, encode: Callable[[str], list[int]], text: bool
) -> None:
    requests = make(
        name="prefix-repetition",
        num_prompts=12,
        num_prefixes=4,
        prefix_len=8,
        suffix_len=3,
        prompt_format="text" if text else "ids",
    )
    ids = [encode(r.prompt) if isinstance(r.prompt, str) else r.prompt for r in requests]
    assert {len(prompt or ()) for prompt in ids} == {11}
    prefixes = [tuple((prompt or [])[:8]) for prompt in ids]
    assert sorted(Counter(prefixes).values()) == [3, 3, 3, 3]
    assert len({tuple(prompt or ()) for prompt in ids}) == 12
    # Mixed, not the prefixes in a fixed order.
    assert prefixes != prefixes[:4] * 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "sharegpt"}, "give --dataset-path"),
        ({"name": "random", "path": Path("x")}, "leave out --dataset-path"),
        ({"num_prompts": 0}, "--num-prompts is 0; it must be 1 or more"),
        ({"random_output_len": 0}, "--random-output-len is 0"),
        ({"random_input_len": 0}, "prompts need at least 1 token"),
        ({"trace_duration_s": -1.0}, "--trace-duration is -1.0"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DatasetSettings(**settings)  # type: ignore[arg-type]


def test_what_cannot_be_made_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="--tokenizer DIRECTORY, or --vocab-size"):
        datasets.load(DatasetSettings(), None, rng)
    with pytest.raises(ConfigError, match="text of an exact number of tokens needs"):
        datasets.load(DatasetSettings(vocab_size=9, prompt_format="text"), None, rng)


def _settings(*flags: str, chat: bool = False) -> DatasetSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, DatasetSettings)
    return DatasetSettings.of(parser.parse_args(flags), chat=chat)


def test_flags_become_settings_and_the_rest_keeps_its_defaults() -> None:
    assert _settings() == DatasetSettings()
    found = _settings(
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "3"),
        *("--prompt-format", "text", "--disable-shuffle"),
    )
    expected = DatasetSettings(
        name="prefix-repetition", num_prefixes=3, prompt_format="text", in_order=True
    )
    assert found == expected
    ratio = _settings("--random-range-ratio", '{"input": 0.5}').random_range_ratio
    assert (ratio.input, ratio.output) == (0.5, 0.0)
    ratio = _settings("--random-range-ratio", "0.25").random_range_ratio
    assert (ratio.input, ratio.output) == (0.25, 0.25)


@pytest.mark.parametrize("text", ["1", "-0.1", "x", "[]", '{"in": 0.1}', "NaN"])
def test_a_bad_range_ratio_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="ratio"):
        _settings("--random-range-ratio", text)


def test_another_datasets_flag_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError, match="--prefix-repetition-prefix-len is for"):
        _settings("--prefix-repetition-prefix-len", "5")
    with pytest.raises(ConfigError, match="burstgpt, not random"):
        _settings("--trace-start", "5")
