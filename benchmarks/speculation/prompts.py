"""The prompts of `topspin bench spec`, by kind, and the requests made of them.

Owns short texts of our own (texts/), from those whose answers repeat much of the prompt (edits,
summaries that quote) to those that share nothing with it (random token ids). Knows no server and no
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.load.contracts import Backend, BenchRequest
from benchmarks.load.datasets.prompts import PromptMaker
from models.text.tokenizer import Tokenizer

RANDOM: Final = "random ids"
RANDOM_TOKENS: Final = 128
PROMPTS_PER_KIND: Final = 4

_FOLDER: Final = Path(__file__).with_name("texts")
_BETWEEN: Final = "\n=====\n"


def _read(kind: str) -> tuple[str, ...]:
    text = (_FOLDER / f"{kind.replace(' ', '_')}.txt").read_text(encoding="utf-8")
    return tuple(text.removesuffix("\n").split(_BETWEEN))


TEXTS: Final = {each: _read(each) for each in ("chat", "code edit", "summary", "json", "tool call")}
KINDS: Final = (*TEXTS, RANDOM)


def backend_of(kind: str, *, has_chat_template: bool) -> Backend:
    """Return the endpoint of a kind: token ids and base models have completions only."""
    return "openai-chat" if has_chat_template and kind != RANDOM else "openai"


def requests_of(
    kind: str,
    count: int,
    *,
    output_len: int,
    tokenizer: Tokenizer,
    salt: str,
    seed: Sequence[int],
) -> list[BenchRequest]:
    """Return `count` greedy requests of a kind, the same ones for the same arguments.

    Texts repeat after the last one. Each repetition has a `cache_salt` of its own, made from
    `salt`: a drafter that has seen an answer would otherwise foresee all of the next one.
    `tokenizer` and `seed` serve the random token ids.
    """
    prompts: list[str | list[int]] = []
    if kind == RANDOM:
        maker = PromptMaker(tokenizer, vocab_size=None, as_text=False)
        rng = np.random.default_rng(seed)
        prompts += [maker.draw(rng, RANDOM_TOKENS) for _ in range(count)]
    else:
        prompts += islice(cycle(TEXTS[kind]), count)
    return [
        BenchRequest(
            prompt=prompt,
            max_tokens=output_len,
            extra_body={"temperature": 0.0, "cache_salt": f"{salt}/{idx // PROMPTS_PER_KIND}"},
        )
        for idx, prompt in enumerate(prompts)
    ]
