"""The time of a step's layers, given the times of one layer and micro-batch.

Owns MegaScale-Infer's pipeline formula (arXiv 2504.02263, section 4), corrected for links that are
not hidden and for cores that both sides share. Pure arithmetic. Called by the scheduler, which
chooses the number of micro-batches of every step, and by the planner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class HopTimes(NamedTuple):
    """Seconds of one (layer, micro-batch): attention node, expert node, one way.

    `t_w` of `t_c` a card is busy with the rows, so that those of the next micro-batch wait for it;
    each way has a card's time of its own.
    """

    t_a: float
    t_e: float
    t_c: float
    t_w: float = 0.0


def pipeline_s(
    times: HopTimes, *, num_micro_batches: int, num_layers: int, shares_cores: bool
) -> float:
    """Return how long `num_layers` layers of equal micro-batches take, exactly.

    Under full overlap it is the paper's T_total = (T_a + T_e + 2 T_c) + T_f (m L - 1);
    otherwise every layer waits for a round trip. On shared cores both sides' times add up
    (T_f = T_a + T_e) and only the link can be hidden; with m > 1 and a link that is approximate.
    """
    t_f = _busy_s(times, shares_cores)
    pace = max(num_micro_batches * t_f, _trip_s(times))
    return _trip_s(times) + (num_layers - 1) * pace + (num_micro_batches - 1) * t_f


def layers_s(layers: Sequence[HopTimes], *, num_micro_batches: int, shares_cores: bool) -> float:
    """Return how long layers that differ take; pipeline_s() for equal ones.

    A layer without a hop (dense, or its experts beside the attention) has t_e = t_c = 0. Exact
    where no cores are shared; where they are, each layer is counted at its own pace.
    """
    if not layers:
        return 0.0
    runs = [(times, len(list(run))) for times, run in itertools.groupby(layers)]
    if len(runs) == 1:
        return pipeline_s(
            layers[0],
            num_micro_batches=num_micro_batches,
            num_layers=len(layers),
            shares_cores=shares_cores,
        )
    m = num_micro_batches
    if shares_cores:
        paces = (max(m * _busy_s(each, True), _trip_s(each)) for each in layers[1:])
        return _trip_s(layers[0]) + sum(paces) + (m - 1) * _busy_s(layers[-1], True)
    # When the way there, the experts, the way back and attention are free; the answers.
    state = [0.0] * (4 + m)
    for times, left in runs:
        moving = 0 if times.t_e or times.t_c else 3
        while left:
            before = state
            state = _after(times, before)
            left -= 1
            passed_s = state[3] - before[3]
            pairs = zip(before[moving:], state[moving:], strict=True)
            if all(math.isclose(new, old + passed_s) for old, new in pairs):
                # So does every further layer of the run: all there is are sums and maxima.
                state[moving:] = [each + left * passed_s for each in state[moving:]]
                break
    return max(state[4:])


def _after(times: HopTimes, state: Sequence[float]) -> list[float]:
    """Return the state after one more layer: all serve (layer, micro-batch) in this order."""
    there_s, experts_s, back_s, attention_s, *answers = state
    t_a, t_e, t_c, t_w = times
    for micro_batch, answer_s in enumerate(answers):
        attention_s = max(attention_s, answer_s) + t_a
        if t_e == 0.0 and t_c == 0.0:
            answers[micro_batch] = attention_s
            continue
        there_s = max(there_s, attention_s) + t_w
        experts_s = max(experts_s, there_s + (t_c - t_w)) + t_e
        back_s = max(back_s, experts_s) + t_w
        answers[micro_batch] = back_s + (t_c - t_w)
    return [there_s, experts_s, back_s, attention_s, *answers]


def _busy_s(times: HopTimes, shares_cores: bool) -> float:
    """Return T_f, the least time between two micro-batches of a layer."""
    sides_s = times.t_a + times.t_e if shares_cores else max(times.t_a, times.t_e)
    return max(sides_s, times.t_w)


def _trip_s(times: HopTimes) -> float:
    return times.t_a + times.t_e + 2 * times.t_c
