"""The loss of a decoded token that attends to few of its keys: real queries and keys, many ways.

Owns the reading of queries, keys and values of every layer from a model that computes a text, and
the figures of each of benchmarks.retrieval.methods on them: the error of the attention's output
relative to attention to all keys, and which of the best keys were found. Called by
benchmarks.retrieval.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from attention_nodes.step.kv_cache import KvCache
from benchmarks.local_model import BLOCK_SIZE, LocalModel, Node
from benchmarks.retrieval import methods
from benchmarks.retrieval.flags import RetrievalFlags
from kernels.contracts import SEGMENT_KEYS, AttentionMeta
from kernels.dispatch import Ops
from topspin.errors import ConfigError
from topspin.plan.retrieval import RetrievalPolicy, policy_of

SHARES: Final = {"1/20": 1 / 20, "1/10": 1 / 10, "1/5": 1 / 5}
"""Of all tokens of the text."""
EXACT, OURS, PRUNED, ONE_BOOK = "exact", "PQ, segments", "PQ behind pages", "PQ, one codebook"
BOUNDS, SPREAD, SNAPKV, RANDOM = "page bounds (Quest)", "page mean + deviation", "SnapKV", "random"
METHODS: Final = (EXACT, OURS, PRUNED, ONE_BOOK, BOUNDS, SPREAD, SNAPKV, RANDOM)
# Queries of the prompt's end by which SnapKV chooses.
WINDOW_ROWS: Final = 32
# Pages that hold so many times the budget are searched by codes.
PRUNING: Final = 4
GENERATION_TOKENS: Final = 512
TEMPERATURE: Final = 1.0
_ITERATIONS: Final = RetrievalPolicy(num_tokens=GENERATION_TOKENS).num_iterations

Say = Callable[[str], None]


def measure(flags: RetrievalFlags) -> dict[str, Any]:
    """Return the figures of all methods on the text, and behind its beginning."""
    model = LocalModel(flags.path, num_blocks=len(flags.tokens) // BLOCK_SIZE)
    prompt = flags.tokens[: len(flags.tokens) // 4]
    num_generated = len(flags.tokens) - len(prompt)
    return {
        "text": measure_budgets(model, flags),
        "generation": measure_generation(model, prompt, num_generated, flags),
    }


class Watched:
    """Ops that keep the queries of some rows of each layer; all else is that of `ops`."""

    def __init__(self, ops: Ops, kv: KvCache) -> None:
        self._ops = ops
        self._layer_of = {keys.data_ptr(): layer for layer, keys in enumerate(kv.keys)}
        self.rows: list[int] = []
        """Of the step that is computed."""
        self.found: dict[int, list[Tensor]] = defaultdict(list)
        """By layer, of each step that had such rows, [rows, N, D]."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMeta, **settings: Any
    ) -> Tensor:
        """Attend as `ops` does."""
        if self.rows:
            self.found[self._layer_of[k_cache.data_ptr()]].append(q[self.rows].clone())
        return self._ops.paged_attention(q, k_cache, v_cache, meta, **settings)


class Captured(NamedTuple):
    """Queries, keys and values of a text of L tokens, in fp32."""

    positions: list[int]
    """Ascending."""
    queries: list[Tensor]
    """By layer, [positions, N, D]."""
    keys: list[Tensor]
    """By layer, [G, L, D], rotated."""
    values: list[Tensor]


def capture(
    model: LocalModel, tokens: Sequence[int], wanted: Sequence[int], *, num_generated: int = 0
) -> Captured:
    """Compute a text, and so many tokens behind it that the model draws; keep `wanted` queries.

    These are positions below the length of both. The model's first cache blocks are overwritten.
    """
    watched = Watched(model.decoder.ops, model.decoder.kv)
    node = model.node(recordings=False, ops=watched)
    positions = sorted(set(wanted))
    length = len(tokens) + num_generated
    blocks = range(-(-length // BLOCK_SIZE))
    seq_id = node.admit(tokens, blocks, temperature=TEMPERATURE)
    for begin, end in _steps(node, len(tokens), length):
        watched.rows = [each - begin for each in positions if begin <= each < end]
        node.step({seq_id: end - begin}, sample=end >= len(tokens))
    keys, values = (
        [cache.flatten(0, 1)[:length].transpose(0, 1).float() for cache in caches]
        for caches in (model.decoder.kv.keys, model.decoder.kv.values)
    )
    queries = [torch.cat(watched.found[layer]).float() for layer in range(len(keys))]
    return Captured(positions, queries, keys, values)


def _steps(node: Node, num_prompt: int, length: int) -> list[tuple[int, int]]:
    """Return the positions of each step: of the prompt as many as possible, then one by one."""
    prompt = [
        (begin, min(begin + node.chunk, num_prompt)) for begin in range(0, num_prompt, node.chunk)
    ]
    return prompt + [(position, position + 1) for position in range(num_prompt, length)]


class LayerQuery(NamedTuple):
    """A query of one layer [N, D] and the keys and values that it sees, [G, L, D]."""

    query: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class MethodFigures:
    """Errors and recalls of one method at one budget: by layer, of each position."""

    errors: list[list[float]] = field(default_factory=list)
    recalls: list[list[float]] = field(default_factory=list)

    def by_position(self) -> list[float]:
        """Return the errors at each position, means over layers."""
        return [statistics.fmean(each) for each in zip(*self.errors, strict=True)]

    def as_json(self, base: MethodFigures) -> dict[str, Any]:
        """Return means, by layer too.

        `error_noise` is the standard error, over positions, of the difference from `base`.
        """
        changes = [
            own - other for own, other in zip(self.by_position(), base.by_position(), strict=True)
        ]
        layers, recalls = (
            [statistics.fmean(each) for each in some] for some in (self.errors, self.recalls)
        )
        return {
            "error": round(statistics.fmean(layers), 5),
            "error_noise": round(statistics.stdev(changes) / len(changes) ** 0.5, 5),
            "recall": round(statistics.fmean(recalls), 4),
            "error_by_layer": [round(each, 5) for each in layers],
            "recall_by_layer": [round(each, 4) for each in recalls],
        }


def compare(
    asked: LayerQuery, scores: Mapping[str, Tensor], policy: RetrievalPolicy
) -> dict[str, tuple[float, float]]:
    """Return the relative error and the recall of each choice by f32[G, L] scores.

    All see the policy's first and last keys and the query's own beside what they choose.
    """
    query, keys, values = asked
    begin, end = policy.num_sinks, keys.shape[1] - 1 - policy.num_recent
    everything = torch.ones(keys.shape[:2], dtype=torch.bool)
    full = methods.attend(query, keys, values, everything)
    best = methods.choose(scores[EXACT], begin, end, policy.num_selected)
    found = {}
    for name, each in scores.items():
        seen = everything.clone()
        seen[:, begin:end] = False
        seen.scatter_(1, methods.choose(each, begin, end, policy.num_selected), True)
        error = (methods.attend(query, keys, values, seen) - full).norm() / full.norm()
        found[name] = float(error), methods.recall(seen, best)
    return found


Scorer = Callable[[Tensor, int], dict[str, Tensor]]
"""From a query [N, D] and its position, scores f32[G, position] by method."""


def _compare_all(
    captured: Captured,
    positions: Sequence[int],
    scorer_of: Callable[[Tensor, Tensor], Scorer],
    budgets: Mapping[str, int],
    say: Say,
) -> dict[str, dict[str, MethodFigures]]:
    """Return, by budget, the figures of each method at the last ones of what is captured.

    `scorer_of` prepares the methods for a layer's queries and keys.
    """
    policies = {name: _policy(num_tokens) for name, num_tokens in budgets.items()}
    figures: dict[str, dict[str, MethodFigures]] = {
        name: defaultdict(MethodFigures) for name in policies
    }
    for layer, (queries, keys, values) in enumerate(
        zip(captured.queries, captured.keys, captured.values, strict=True)
    ):
        say(f"methods, layer {layer}")
        scorer = scorer_of(queries, keys)
        for idx, position in enumerate(positions):
            query = queries[idx - len(positions)]
            scores = scorer(query, position)
            asked = LayerQuery(query, keys[:, : position + 1], values[:, : position + 1])
            for name, policy in policies.items():
                if SPREAD in scores:
                    span = policy.num_sinks, position - policy.num_recent
                    num_kept = min(PRUNING * policy.num_selected, span[1] - span[0])
                    scores[PRUNED] = methods.pruned(scores[OURS], scores[SPREAD], *span, num_kept)
                for method, (error, recall) in compare(asked, scores, policy).items():
                    each = figures[name][method]
                    if not idx:
                        each.errors.append([])
                        each.recalls.append([])
                    each.errors[layer].append(error)
                    each.recalls[layer].append(recall)
    return figures


def measure_budgets(model: LocalModel, flags: RetrievalFlags) -> dict[str, Any]:
    """Return the figures of all methods and SHARES, at positions of the text's last quarter.

    What is before it is the prompt, by whose last queries SnapKV chooses, and of whose keys the one
    codebook is learnt. Raises ConfigError for a text that is too short.
    """
    tokens, num_positions = flags.tokens, flags.args.positions
    length = len(tokens)
    if length < 4 * SEGMENT_KEYS:
        raise ConfigError(f"quality needs a text of {4 * SEGMENT_KEYS} tokens, not {length}")
    num_prompt = length * 3 // 4
    positions = [num_prompt + each for each in _spread(length - num_prompt, num_positions)]
    window = range(num_prompt - WINDOW_ROWS, num_prompt)
    captured = capture(model, tokens, [*window, *positions])
    rng = torch.Generator().manual_seed(flags.args.seed)

    def scorer_of(queries: Tensor, keys: Tensor) -> Scorer:
        coding = methods.SegmentCodes.of(keys, num_iterations=_ITERATIONS)
        one = methods.one_codebook(keys, num_prompt, num_iterations=_ITERATIONS)
        pages = methods.Pages.of(keys[:, : length // methods.PAGE_KEYS * methods.PAGE_KEYS])
        kept = methods.prompt_scores(queries[:WINDOW_ROWS], keys[:, :num_prompt], length)
        return lambda query, position: {
            EXACT: methods.exact_scores(query, keys[:, :position]),
            OURS: methods.coded_scores(query, coding.at(position), position),
            ONE_BOOK: methods.coded_scores(query, one, position),
            BOUNDS: methods.bounds_scores(query, pages, position),
            SPREAD: methods.spread_scores(query, pages, position),
            SNAPKV: kept[:, :position],
            RANDOM: methods.random_scores(len(keys), position, rng),
        }

    budgets = {name: round(share * length) for name, share in SHARES.items()}
    figures = _compare_all(captured, positions, scorer_of, budgets, flags.say)
    return {
        "tokens": length,
        "prompt": num_prompt,
        "positions": num_positions,
        "budgets": {
            name: {
                "tokens": budgets[name],
                "methods": {
                    method: figures[name][method].as_json(figures[name][OURS]) for method in METHODS
                },
            }
            for name in budgets
        },
    }


def measure_generation(
    model: LocalModel, prompt: Sequence[int], num_generated: int, flags: RetrievalFlags
) -> dict[str, Any]:
    """Return errors by the distance from a prompt's end, while the model goes on by itself.

    The one codebook is that of the first segment, which the prompt must fill.
    """
    distances = _spread(num_generated, flags.args.positions)
    positions = [len(prompt) + each for each in distances]
    flags.say(f"{num_generated} tokens are generated")
    captured = capture(model, prompt, positions, num_generated=num_generated)

    def scorer_of(queries: Tensor, keys: Tensor) -> Scorer:
        coding = methods.SegmentCodes.of(keys, num_iterations=_ITERATIONS)
        one = methods.one_codebook(keys, SEGMENT_KEYS, num_iterations=_ITERATIONS)
        return lambda query, position: {
            EXACT: methods.exact_scores(query, keys[:, :position]),
            OURS: methods.coded_scores(query, coding.at(position), position),
            ONE_BOOK: methods.coded_scores(query, one, position),
        }

    budgets = {"generation": GENERATION_TOKENS}
    (figures,) = _compare_all(captured, positions, scorer_of, budgets, flags.say).values()
    return {
        "prompt": len(prompt),
        "budget": GENERATION_TOKENS,
        "distances": distances,
        "errors": {
            name: [round(error, 5) for error in each.by_position()]
            for name, each in figures.items()
        },
    }


def _spread(length: int, count: int) -> list[int]:
    """Return `count` places below `length`, at equal distances, the last one at its end."""
    return [(idx + 1) * length // count - 1 for idx in range(count)]


def _policy(num_tokens: int) -> RetrievalPolicy:
    policy = policy_of(num_tokens)
    assert policy is not None
    return policy
