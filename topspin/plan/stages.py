"""Stages: the layers of an attention node, cut over several processes.

Owns which process sends expert nodes the rows of an attention node in a layer (LLM-PQ's partition,
arXiv 2403.01136). An attention node computes the first layers of its model; its stages follow, by
index, each where the one before ends. Pure: knows no net and no weights. Called by
topspin.plan.spec, both ends of M2N and the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """The layers first, ..., end - 1 of attention node `of`."""

    of: int
    first: int
    end: int


def sender(stages: Sequence[Stage], *, num_attention: int, of: int, layer: int) -> int:
    """Return who sends the rows of attention node `of` in a decoder layer.

    Senders are numbered: attention nodes first, then stages.
    """
    for index, stage in enumerate(stages):
        if stage.of == of and stage.first <= layer < stage.end:
            return num_attention + index
    return of


def senders(
    stages: Sequence[Stage], *, num_attention: int, layers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return, by each of the decoder `layers`, the sender of each attention node's rows."""
    return tuple(
        tuple(
            sender(stages, num_attention=num_attention, of=each, layer=layer)
            for each in range(num_attention)
        )
        for layer in layers
    )
