"""Datasets of the load tester: the requests to a server, from a seed or a file.

Owns the choice by name. `add_arguments` puts the flags on a command line, DatasetSettings.of
reads them, `load` makes the requests. Knows no server: the same settings, tokenizer and seed
give the same requests for every target.
"""

from __future__ import annotations

import numpy as np

from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets import conversations, synthetic, traces
from benchmarks.load.datasets.prompts import PromptMaker
from benchmarks.load.datasets.settings import NAMES, DatasetSettings, add_arguments
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError

__all__ = ["NAMES", "DatasetSettings", "add_arguments", "load"]


def load(
    settings: DatasetSettings, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return the requests of `settings`, in sending order.

    Raises ConfigError, naming file, line and reason, if a file is bad or gives no request,
    and if a needed tokenizer or chat endpoint is missing.
    """
    if settings.name == "multi-turn" and not settings.chat:
        raise ConfigError("dataset multi-turn needs a chat endpoint: --backend openai-chat")
    requests = _load(settings, tokenizer, rng)
    if not requests:
        raise ConfigError(
            f"dataset {settings.name}: {settings.path} holds no request within the given limits"
        )
    return requests


def _load(
    settings: DatasetSettings, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    if settings.name == "sharegpt":
        return conversations.sharegpt_requests(settings, tokenizer, rng)
    if settings.name == "custom":
        return conversations.custom_requests(settings, tokenizer, rng)
    if settings.name == "multi-turn" and settings.path is not None:
        return conversations.session_requests(settings, tokenizer, rng)
    as_text = settings.chat or settings.text
    maker = PromptMaker(tokenizer, vocab_size=settings.vocab_size, as_text=as_text)
    if settings.name == "random":
        return synthetic.random_requests(settings, maker, rng)
    if settings.name == "prefix-repetition":
        return synthetic.prefix_repetition_requests(settings, maker, rng)
    if settings.name == "multi-turn":
        return synthetic.made_sessions(settings, maker, rng)
    return traces.trace_requests(settings, maker, rng)
