"""An engine under a steady load: from the times of its steps to rates, TTFT and TPOT.

Owns the queueing. Knows steps as a function of their rows only (StepModel), no device and no
model. Pure. Called by deploy.placement.search.rating; its figures are means of a long run, and
what is approximate is said where it is.

The scheduler decodes every running sequence in every step and fills the rest of the token budget
with prompts. So a step either decodes only (time t_d) or has prompt chunks too (t(n), n chunks);
a sequence gets one token in both. This scores both phases of one placement together: with
prompts at rate q, decoding has what they leave of the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from deploy.placement.workload import Z95, Workload


class Chunks(NamedTuple):
    """Prompt chunks of a step, over all attention nodes: `replicas` of these have `tokens` each.

    `slices` is the number of prompts that the tokens of one node are of: what can be split into
    micro-batches. `start`: the mean position of a chunk's first token.
    """

    replicas: int
    tokens: float
    slices: float
    start: float


class StepModel(Protocol):
    """The seconds of a step of one engine."""

    def step_s(self, running: float, chunks: Chunks | None) -> float:
        """Return the time of a step in which `running` sequences (of the engine) decode."""


class EngineShape(NamedTuple):
    """What of an engine the queueing depends on: M, and tokens per step of an attention node."""

    num_attention: int
    batched_tokens: int


class Point(NamedTuple):
    """An engine at a load of `rate` requests per second with `running` decoding sequences.

    `users`: requests in the engine on average, waiting ones too. `decode_s` and `mixed_s`: its
    two kinds of steps.
    """

    rate: float
    running: float
    users: float
    ttft_s: float
    tpot_s: float
    decode_s: float
    mixed_s: float


def chunks_of(
    workload: Workload, shape: EngineShape, running: float
) -> tuple[Chunks, Chunks] | None:
    """Return the least and the largest chunks of a step beside `running` sequences.

    The least is one prompt's on one node, the largest fills every node's budget. None: decoding
    leaves no room for prompts.
    """
    room = shape.batched_tokens - running / shape.num_attention
    if room < 1:
        return None
    prompt = workload.prompt.average
    one = min(prompt, room)
    start = (prompt - one) / 2
    slices = max(1.0, room / prompt)
    return Chunks(1, one, 1.0, start), Chunks(shape.num_attention, room, slices, start)


def point(steps: StepModel, workload: Workload, shape: EngineShape, running: float) -> Point | None:
    """Return the engine's state with `running` decoding sequences; None: prompts would queue up.

    `running` sequences leave as fast as they come at rate q: running = q (o - 1) TPOT. With c
    chunks per prompt, running c / (o - 1) of them come per step. Below one, steps with a chunk
    take t(1) instead of t_d, and TPOT = t_d / (1 - q c (t(1) - t_d)). Above, all steps have n of
    them, and TPOT = t(n), between the times of a step with one and of a full one.
    """
    chunks = chunks_of(workload, shape, running)
    if chunks is None:
        return None
    least, largest = chunks
    prompt, decoded = workload.prompt.average, workload.output.average - 1
    per_prompt = prompt / least.tokens
    capacity = largest.replicas * largest.tokens
    most = max(1.0, capacity / least.tokens)
    # As many prompts begin per token of each sequence as end: so many chunks does a step bring.
    in_step = running * per_prompt / decoded
    if in_step > most:
        return None
    decode_s = steps.step_s(running, None)
    one_s, full_s = steps.step_s(running, least), steps.step_s(running, largest)
    if in_step <= 1:
        mixed_s = one_s
        rate = running / (decoded * decode_s + running * per_prompt * max(0.0, one_s - decode_s))
    else:
        mixed_s = one_s + (in_step - 1) / (most - 1) * (full_s - one_s)
        rate = running / (decoded * mixed_s)
    tpot_s = running / (rate * decoded)
    busy = rate * prompt * full_s / capacity
    if busy >= 1:
        return None
    mean_s, ttft_s = _ttfts_s(
        workload,
        busy,
        full_prompt_s=prompt * full_s / capacity,
        decode_s=decode_s,
        chunk_s=mixed_s,
        chunk_tokens=least.tokens,
    )
    users = rate * (mean_s + decoded * tpot_s)
    return Point(rate, running, users, ttft_s, tpot_s, decode_s, mixed_s)


def _ttfts_s(
    workload: Workload,
    busy: float,
    *,
    full_prompt_s: float,
    decode_s: float,
    chunk_s: float,
    chunk_tokens: float,
) -> tuple[float, float]:
    """Return the mean TTFT and the targets': a step's rest, the queue, and the prompt's own steps.

    The queue is that of M/G/1 for prompts that take `full_prompt_s` when steps are full of them
    (Pollaczek-Khinchine), `busy` of the time; its tail is taken as exponential.
    """
    prompt = workload.prompt
    wait_s = busy * full_prompt_s * prompt.squared / (2 * (1 - busy))
    mean_s = decode_s / 2 + wait_s + _own_s(prompt.average, decode_s, chunk_s, chunk_tokens)
    if workload.targets.percentile == "p50":
        return mean_s, mean_s
    late_s = wait_s / busy * max(0.0, math.log(busy / 0.05)) if busy > 0 else 0.0
    own_s = _own_s(prompt.high, decode_s, chunk_s, chunk_tokens)
    return mean_s, decode_s + max(wait_s, late_s) + own_s


def _own_s(tokens: float, decode_s: float, chunk_s: float, chunk_tokens: float) -> float:
    """Return the time of a prompt's steps; a part of a chunk takes a part of its time."""
    whole, rest = divmod(tokens / chunk_tokens, 1.0)
    part_s = decode_s + rest * (chunk_s - decode_s) if rest > 1e-9 else 0.0
    return whole * chunk_s + part_s


def high_running(workload: Workload, found: Point) -> float:
    """Return the p95 of the number of running sequences.

    With Poisson arrivals it is a Poisson number (the engine as M/G/infinity); users are no more
    than they are.
    """
    high = found.running + Z95 * math.sqrt(found.running)
    return high if workload.users is None else min(high, max(found.users, found.running))
