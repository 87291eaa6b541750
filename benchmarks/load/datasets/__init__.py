"""Datasets of the load tester: the requests to a server, from a seed or a file.

Owns the choice by name. DatasetSettings has the flags, `load` makes the requests. Knows no server:
the same settings, tokenizer and seed give the same requests for every target.
"""

from __future__ import annotations

import numpy as np

from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets import synthetic, texts, traces
from benchmarks.load.datasets.prompts import PromptMaker
from benchmarks.load.datasets.settings import NAMES, DatasetSettings
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError

__all__ = ["NAMES", "DatasetSettings", "load"]

_READ = {"sharegpt": texts.sharegpt_requests, "custom": texts.custom_requests}
_MADE = {
    "random": synthetic.random_requests,
    "prefix-repetition": synthetic.prefix_repetition_requests,
    "burstgpt": traces.trace_requests,
}


def load(
    settings: DatasetSettings, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return the requests of `settings`, in sending order.

    Raises ConfigError, naming file, line and reason, if a file is bad or gives no request,
    and if a needed tokenizer or chat endpoint is missing.
    """
    if settings.name in _READ:
        requests = _READ[settings.name](settings, tokenizer, rng)
    else:
        as_text = settings.chat or settings.prompt_format == "text"
        maker = PromptMaker(tokenizer, vocab_size=settings.vocab_size, as_text=as_text)
        requests = _MADE[settings.name](settings, maker, rng)
    if not requests:
        raise ConfigError(
            f"dataset {settings.name}: {settings.path} holds no request within the given limits"
        )
    return requests
