"""Synthetic datasets: random, prefix-repetition.

Pure: settings, a PromptMaker and a generator in, requests out. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets.prompts import PromptMaker
from benchmarks.load.datasets.settings import DEFAULT_NUM_PROMPTS, DatasetSettings


def completion(
    maker: PromptMaker, passages: Sequence[Sequence[int]], output_len: int, *, chat: bool
) -> BenchRequest:
    """Return one request whose prompt is the passages one after the other.

    The template of a chat adds an unknown number of tokens, so prompt_tokens is None.
    """
    return BenchRequest(
        prompt=maker.prompt(passages),
        prompt_tokens=None if chat else sum(map(len, passages)),
        max_tokens=output_len,
    )


def random_requests(
    settings: DatasetSettings, maker: PromptMaker, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return prompts of random tokens; lengths are uniform within the range ratio, ends included.

    The lengths are drawn before the tokens, so that they do not depend on the vocabulary.
    """
    count = settings.num_prompts or DEFAULT_NUM_PROMPTS
    ratio = settings.random_range_ratio
    input_lens = _lengths(rng, settings.random_input_len, ratio.input, count, least=0)
    output_lens = _lengths(rng, settings.random_output_len, ratio.output, count, least=1)
    prefix = maker.draw(rng, settings.random_prefix_len)
    return [
        completion(maker, [prefix, maker.draw(rng, input_len)], output_len, chat=settings.chat)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def _lengths(
    rng: np.random.Generator, middle: int, ratio: float, count: int, *, least: int
) -> list[int]:
    low = max(least, int(np.floor(middle * (1 - ratio))))
    high = max(low, int(np.ceil(middle * (1 + ratio))))
    lengths: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return lengths


def prefix_repetition_requests(
    settings: DatasetSettings, maker: PromptMaker, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return prompts that share a few long prefixes, each prefix equally often, in mixed order.

    If num_prefixes does not divide num_prompts, the first prefixes get one prompt more.
    """
    count = settings.num_prompts or DEFAULT_NUM_PROMPTS
    prefixes = [maker.draw(rng, settings.prefix_len) for _ in range(settings.num_prefixes)]
    requests = [
        completion(
            maker,
            [prefixes[idx % len(prefixes)], maker.draw(rng, settings.suffix_len)],
            settings.prefix_output_len,
            chat=settings.chat,
        )
        for idx in range(count)
    ]
    if not settings.in_order:
        requests = [requests[idx] for idx in rng.permutation(count)]
    return requests
