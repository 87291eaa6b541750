"""Does a server that retrieves still find what it was told thousands of tokens ago?

Owns the texts with facts in them, their questions, and the counts of right answers: needles are a
few sentences in a long text, look-ups are lines of a table that fills it. A question repeats two
answered ones, so that the answer begins with words of the question: a prompt's tokens attend to
everything, and only what is generated retrieves. Questions about a text share its prefix. Servers
are started one after the other. Called by benchmarks.retrieval.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.started_server import StartedServer
from benchmarks.peers import free_port
from models.tokenizer import Tokenizer
from topspin.errors import EngineUnavailable, TopspinError

NUM_EXAMPLES: Final = 2
DENSE: Final = "dense"
SHARES: Final = {"1/5": 1 / 5, "1/10": 1 / 10}
_ANSWER_TOKENS: Final = 32
# Of the longest sequence, for questions and answers behind a text.
_SPARE_TOKENS: Final = 256
_TIMEOUT_S: Final = 300.0
_METRIC: Final = "topspin_kv_retrieval_selected_rows_total"
_COLOURS: Final = (
    *("amber", "black", "blue", "brown", "crimson", "golden", "green", "grey", "ivory", "orange"),
    *("pink", "purple", "red", "silver", "white", "yellow"),
)
_THINGS: Final = (
    *("anchor", "barrel", "basket", "bell", "boat", "bottle", "bridge", "bucket", "button"),
    *("candle", "carpet", "castle", "chair", "clock", "cloud", "coat", "compass", "curtain"),
    *("door", "drum", "feather", "fence", "flag", "garden", "gate", "glove", "hammer", "harp"),
    *("hat", "kettle", "key", "kite", "ladder", "lamp", "lantern", "mirror", "needle", "oven"),
    *("paddle", "piano", "pillow", "ribbon", "ring", "rope", "saddle", "shelf", "ship", "shoe"),
    *("spoon", "stone", "table", "tent", "tower", "train", "violin", "wagon", "wheel", "window"),
)

Say = Callable[[str], None]


class NothingSelected(TopspinError):
    """Retrieval was asked for, and no layer selected keys."""

    code = "nothing_selected"


class Question(NamedTuple):
    """A prompt, and the number that its answer must hold."""

    prompt: str
    number: str


def questions_of(
    kind: str, text: str, *, tokenizer: Tokenizer, num_tokens: int, count: int, seed: int
) -> list[Question]:
    """Return `count` questions about one text of nearly `num_tokens` tokens, whose facts `seed`
    draws. `kind` is a key of KINDS; needles are hidden in `text`.
    """
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    names = [f"{colour} {thing}" for colour, thing in product(_COLOURS, _THINGS)]
    numbers = rng.choice(np.arange(10_000, 100_000), len(names), replace=False)
    facts = [
        (names[idx], str(number))
        for idx, number in zip(rng.permutation(len(names)), numbers, strict=True)
    ]
    document, facts = KINDS[kind](facts, count, text, tokenizer, num_tokens - _SPARE_TOKENS)
    examples = facts[:NUM_EXAMPLES]
    shown = "".join(f"{_ask(name)} {_fact(name, number)}\n" for name, number in examples)
    return [
        Question(f"{document}\n\n{shown}{_ask(name)}", number)
        for name, number in facts[NUM_EXAMPLES:]
    ]


def _fact(name: str, number: str) -> str:
    return f"The number of the {name} is {number}."


def _ask(name: str) -> str:
    return f"Question: What is the number of the {name}?\nAnswer:"


Facts = Sequence[tuple[str, str]]


def _needles(
    facts: Facts, count: int, text: str, tokenizer: Tokenizer, num_tokens: int
) -> tuple[str, Facts]:
    """Hide the examples' facts and `count` others in `text`, at equal distances."""
    hidden = facts[: count + NUM_EXAMPLES]
    sentences = [f"\n\n{_fact(*fact)}\n\n" for fact in hidden]
    ids = tokenizer.encode(text, add_special_tokens=False)
    left = num_tokens - sum(_length(each, tokenizer) for each in sentences)
    cuts = np.linspace(0, min(left, len(ids)), len(hidden) + 2).astype(int).tolist()
    pieces = [
        tokenizer.decode(ids[begin:end], skip_special_tokens=True) for begin, end in pairwise(cuts)
    ]
    document = pieces[0] + "".join(map(str.__add__, sentences, pieces[1:]))
    # The first facts of the text are asked about, too: examples are spread like the others.
    order = np.random.default_rng(len(hidden)).permutation(len(hidden)).tolist()
    return document, [hidden[idx] for idx in order]


def _look_ups(
    facts: Facts, count: int, text: str, tokenizer: Tokenizer, num_tokens: int
) -> tuple[str, Facts]:
    """Fill the text with facts; the examples and `count` others, at equal distances, are asked."""
    lines: list[str] = []
    left = num_tokens
    for fact in facts:
        left -= _length(f"{_fact(*fact)}\n", tokenizer)
        if left < 0:
            break
        lines.append(_fact(*fact))
    places = np.linspace(0, len(lines) - 1, count + NUM_EXAMPLES).astype(int)
    order = np.random.default_rng(len(lines)).permutation(places).tolist()
    return "\n".join(lines), [facts[idx] for idx in order]


def _length(text: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


KINDS: Final = {"needles": _needles, "look-ups": _look_ups}


def measure(
    path: Path,
    text: str,
    *,
    num_tokens: int,
    num_texts: int,
    num_questions: int,
    flags: Sequence[str],
    seed: int,
    folder: Path,
    start_timeout_s: float,
    say: Say,
) -> dict[str, Any]:
    """Return, by kind, how many were asked, found with attention to all keys, and, of those, with
    each budget. Raises NothingSelected if a server with a budget selected no keys.
    """
    tokenizer = Tokenizer.from_directory(path)
    asked = {
        kind: [
            question
            for number in range(num_texts)
            for question in questions_of(
                kind,
                text,
                tokenizer=tokenizer,
                num_tokens=num_tokens,
                count=num_questions,
                seed=seed + number,
            )
        ]
        for kind in KINDS
    }
    budgets = {DENSE: None, **{name: round(share * num_tokens) for name, share in SHARES.items()}}
    right: dict[str, dict[str, list[bool]]] = {kind: {} for kind in KINDS}
    for name, budget in budgets.items():
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        extra = [] if budget is None else ["--kv-retrieval-tokens", str(budget)]
        command = [sys.executable, "-m", "topspin", "serve", str(path), "--port", str(port)]
        server = StartedServer(
            shlex.join([*command, *extra, *flags]),
            url=url,
            log=folder / f"retrieval-{name.replace('/', '-')}.log",
            ready_timeout_s=start_timeout_s,
        )
        with server:
            try:
                for kind, questions in asked.items():
                    right[kind][name] = []
                    for number, question in enumerate(questions):
                        right[kind][name].append(question.number in _answer(url, question.prompt))
                        say(f"{kind}, {name}: {sum(right[kind][name])} of {number + 1} found")
                selected = selected_rows(httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S).text)
            except httpx.HTTPError as error:
                server.check(patience_s=1.0)
                raise EngineUnavailable(f"{url}: {error}") from error
        if budget is not None and not selected:
            raise NothingSelected(f"the server with {budget} tokens attended to all keys")
    return {
        kind: {
            "asked": len(asked[kind]),
            "found": {name: sum(each) for name, each in by_server.items()},
            "found_of_dense": {
                name: sum(both for both, dense in zip(each, by_server[DENSE], strict=True) if dense)
                for name, each in by_server.items()
            },
        }
        for kind, by_server in right.items()
    }


def _answer(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0.0, "stop": "\n"}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=_TIMEOUT_S)
    text: str = response.raise_for_status().json()["choices"][0]["text"]
    return text


def selected_rows(metrics: str) -> int:
    """Return how many rows selected keys, of /metrics' text; EngineUnavailable if it lacks them."""
    counts = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == _METRIC
    ]
    if not counts:
        raise EngineUnavailable(f"/metrics has no {_METRIC}")
    return int(sum(counts))
