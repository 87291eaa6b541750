"""Does a server that retrieves still find what it was told thousands of tokens ago?

Owns the texts with facts in them, their questions, and the counts of right answers. Before a
question stand two answered ones, which show that an answer repeats the name asked for: a prompt's
tokens attend to everything, so that only what is generated behind the name retrieves. Questions
about a text share its prefix. Servers are started one after the other. Called by
benchmarks.retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.load.contracts import BenchRequest, Target
from benchmarks.retrieval.flags import DENSE, MOST_QUESTIONS, NothingSelected, RetrievalFlags
from benchmarks.servers.topspin import TopspinServer, ask_at_once
from models.text.tokenizer import Tokenizer
from topspin.errors import TopspinError

NUM_EXAMPLES: Final = 2
SHARES: Final = {"1/5": 1 / 5, "1/10": 1 / 10}
_ANSWER_TOKENS: Final = 32
# Of the longest sequence, for questions and answers behind a text.
_SPARE_TOKENS: Final = 256
_ANSWER: Final[dict[str, Any]] = {"temperature": 0.0, "stop": "\n"}
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

assert len(_THINGS) == NUM_EXAMPLES + MOST_QUESTIONS

NEEDLES: Final = "needles"
KINDS: Final = (NEEDLES, "look-ups")


class Question(NamedTuple):
    """A prompt, and the number that its answer must hold."""

    prompt: str
    number: str


def questions_of(
    kind: str, text: str, *, tokenizer: Tokenizer, num_tokens: int, count: int, seed: int
) -> list[Question]:
    """Return `count` questions, at most MOST_QUESTIONS, about one document that `seed` draws.

    It is `text`, cut to nearly `num_tokens` tokens, with facts in it: needles, each twice, at equal
    distances, or look-ups, a table in the middle.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    colours = rng.choice(_COLOURS, len(_THINGS))
    numbers = rng.choice(np.arange(10_000, 100_000), len(_THINGS), replace=False)
    things = rng.permutation(_THINGS)
    names = [f"{colour} {thing}" for colour, thing in zip(colours, things, strict=True)]
    facts = [f"{name} = {number}" for name, number in zip(names, numbers, strict=True)]
    chosen = range(NUM_EXAMPLES + count)
    if kind == NEEDLES:
        hidden = [f"Remember: {facts[idx]}. Again: {facts[idx]}." for idx in chosen]
    else:
        hidden = ["\n".join(rng.permutation([f"{fact}." for fact in facts]))]
    document = _hide(rng.permutation(hidden).tolist(), text, tokenizer, num_tokens - _SPARE_TOKENS)
    asked = [f"Question: {names[idx]}?\nAnswer:" for idx in chosen]
    shown = "".join(f"{asked[idx]} {facts[idx]}.\n" for idx in range(NUM_EXAMPLES))
    return [
        Question(f"{document}\n\n{shown}{asked[idx]}", str(numbers[idx]))
        for idx in chosen[NUM_EXAMPLES:]
    ]


def _hide(hidden: Sequence[str], text: str, tokenizer: Tokenizer, num_tokens: int) -> str:
    """Return the beginning of `text` with paragraphs `hidden` at equal distances."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    hidden = [f"\n\n{each}\n\n" for each in hidden]
    left = num_tokens - len(tokenizer.encode("".join(hidden), add_special_tokens=False))
    cuts = np.linspace(0, min(left, len(ids)), len(hidden) + 2).astype(int).tolist()
    pieces = [
        tokenizer.decode(ids[begin:end], skip_special_tokens=True) for begin, end in pairwise(cuts)
    ]
    return pieces[0] + "".join(map(str.__add__, hidden, pieces[1:]))


def measure(flags: RetrievalFlags) -> dict[str, Any]:
    """Return, by kind, how many were asked, found with attention to all keys, and, of those, with
    each budget. Raises NothingSelected if a server with a budget selected no keys.
    """
    args, num_tokens = flags.args, len(flags.tokens)
    tokenizer = Tokenizer.from_directory(flags.path)
    asked = {
        kind: [
            question
            for number in range(args.texts)
            for question in questions_of(
                kind,
                flags.text,
                tokenizer=tokenizer,
                num_tokens=num_tokens,
                count=args.questions,
                seed=args.seed + number,
            )
        ]
        for kind in KINDS
    }
    budgets = {DENSE: None, **{name: round(share * num_tokens) for name, share in SHARES.items()}}
    right: dict[str, dict[str, list[bool]]] = {kind: {} for kind in KINDS}
    for name, budget in budgets.items():
        extra = [] if budget is None else ["--kv-retrieval-tokens", str(budget)]
        server = TopspinServer(
            [str(flags.path), *extra, *flags.flags],
            log=args.result_dir / f"retrieval-{name.replace('/', '-')}.log",
            ready_timeout_s=args.start_timeout,
        )
        with server:
            target = Target(server.url, server.model, extra_body=_ANSWER)
            try:
                for kind, questions in asked.items():
                    right[kind][name] = []
                    for number, question in enumerate(questions):
                        request = BenchRequest(prompt=question.prompt, max_tokens=_ANSWER_TOKENS)
                        (answer,) = ask_at_once(target, [request]).records
                        right[kind][name].append(question.number in answer.text)
                        flags.say(f"{kind}, {name}: {sum(right[kind][name])} of {number + 1} found")
                selected = server.metrics()[_METRIC]
            except TopspinError:
                server.check(patience_s=1.0)
                raise
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
