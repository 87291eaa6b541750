"""Steps that measure an engine at its start: prompts, then decoding, as its plan expects them.

Owns sequences of random tokens on every attention node, their plans, and the medians of what the
nodes report. Pure: service.py sends the steps, one at a time, and passes the results in, before
there is a policy; the policy's steps come after `last_step`. Prompts are computed first, since the
sequences that decode read the keys that these leave; their own tokens are too few to fill a context
in time. At last the nodes forget all sequences.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count, cycle, islice
from random import Random
from statistics import median
from typing import Final, NamedTuple

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.micro_batching.split import row_bucket
from server.scheduler.nodes.formation import Formation
from server.scheduler.planning.plans import Step
from topspin.messages import (
    SAMPLE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTicket,
    StepTimings,
    pack_ints,
)
from topspin.plan.expected import Expected, ExpectedStep
from topspin.plan.spec import EnginePlan

PROMPTS_S: Final = 1.0
"""No step with prompts begins later than this; the first one warms up, unless it takes so long."""
BUDGET_S: Final = 2.2
"""No step begins later than this."""
MAX_STEPS: Final = 24
NUM_WARM_UP: Final = 4
# Beside the ids of requests' sequences.
_FIRST_ID: Final = 2**30

Timings = dict[int, StepTimings]
"""Of one step, by attention node."""


class Measured(NamedTuple):
    """Medians over steps, in seconds: the whole step, each node's computing, one way of the link.

    `attention_s` and `experts_s` are of all layers; `experts_s` is empty, and `link_s` None, if
    that was not measured.
    """

    step_s: float
    attention_s: dict[int, float]
    experts_s: dict[int, float]
    link_s: float | None

    @classmethod
    def of(cls, steps: Sequence[Timings]) -> Measured:
        """Return what `steps`, one or more with the same nodes, have measured."""
        nodes = steps[0].keys()
        experts = range(max(len(each.experts_s) for step in steps for each in step.values()))
        links = [t.link_s for step in steps for t in step.values() if t.link_s is not None]
        return cls(
            step_s=median(max(each.total_s for each in step.values()) for step in steps),
            attention_s={n: median(step[n].attention_s for step in steps) for n in nodes},
            experts_s={
                expert: median(
                    max(each.experts_s[expert] for each in step.values()) for step in steps
                )
                for expert in experts
            },
            link_s=median(links) if links else None,
        )


class _Seat(NamedTuple):
    """A sequence on an attention node, and how many tokens it feeds in a step."""

    node: int
    seq_id: int
    num_tokens: int


def obstacle(plan: EnginePlan) -> str | None:
    """Return why an engine cannot be measured so; None: it can."""
    if any(node.place.is_device for node in (*plan.attention, *plan.experts)):
        return "only nodes on the CPU are measured"
    if any(node.optional for node in plan.nodes):
        return "its optional nodes are not there yet"
    if plan.kv_cache.retrieval is not None:
        return "keys would be retrieved of which there are no codes"
    return None


class Rehearsal:
    """The measurement of one engine. `found` has, by phase, what has been measured so far."""

    def __init__(
        self,
        plan: EnginePlan,
        expected: Expected,
        facts: EngineFacts,
        formation: Formation,
        num_blocks: Sequence[int],
    ) -> None:
        self.found: dict[str, Measured] = {}
        self.last_step = 0
        self._plan = plan
        self._facts = facts
        self._formation = formation
        self._num_blocks = num_blocks
        self._rng = Random(0)
        self._ids = count(_FIRST_ID)
        self._began_s: float | None = None
        self._now_s = 0.0
        # By attention node, the blocks with keys of prompts, and the next block without.
        self._written: list[list[int]] = [[] for _ in num_blocks]
        self._next_block = [0] * len(num_blocks)
        self._open: list[_Seat] = []
        self._awaited: dict[int, StepTimings | None] = {}
        self._script = self._run(expected)
        self.is_done = False

    def next_step(self, now_s: float) -> Step | None:
        """Return the step to send now; None: one is under way, or `is_done`."""
        if self._began_s is None:
            self._began_s = now_s
        self._now_s = now_s - self._began_s
        if any(each is None for each in self._awaited.values()):
            return None
        results = {n: each for n, each in self._awaited.items() if each is not None}
        try:
            step = self._script.send(results) if results else next(self._script)
        except StopIteration:
            self.is_done = True
            return None
        self._awaited = dict.fromkeys(step.plans)
        return step

    def take(self, result: StepResult) -> None:
        """Take a node's result."""
        if result.step == self.last_step and result.index in self._awaited:
            self._awaited[result.index] = result.timings

    def _run(self, expected: Expected) -> Generator[Step, Timings, None]:
        prompts = yield from self._prompts(expected.prefill)
        if prompts:
            self.found["prefill"] = Measured.of(prompts)
        decoded = yield from self._decode(expected.decode)
        if decoded:
            self.found["decode"] = Measured.of(decoded)
        if self._open:
            yield self._step((), (), num_micro_batches=1)

    def _prompts(self, asked: ExpectedStep) -> Generator[Step, Timings, list[Timings]]:
        found: list[Timings] = []
        while not found or (self._now_s < PROMPTS_S and len(found) < MAX_STEPS):
            seats: list[_Seat] = []
            new: list[tuple[int, NewSequence]] = []
            longest = max(1, round(2 * asked.context) - 1)
            limits = [node.max_num_batched_tokens for node in self._plan.attention]
            for node, rows in enumerate(_shares(asked.rows, limits)):
                for rows_of_one in _shares(rows, [rows] * asked.micro_batches):
                    while rows_of_one > 0:
                        num = min(rows_of_one, longest, self._plan.model.max_model_len - 1)
                        start = max(0, round(asked.context - (num + 1) / 2))
                        rows_of_one -= num
                        sequence = self._sequence(node, start=start, num_tokens=num)
                        if sequence is None:  # the cache is full
                            break
                        new.append((node, sequence))
                        seats.append(_Seat(node, sequence.seq_id, num))
            if sum(seat.num_tokens for seat in seats) < asked.rows:
                break
            found.append((yield self._step(seats, new, num_micro_batches=asked.micro_batches)))
        return found[1:] or found

    def _decode(self, asked: ExpectedStep) -> Generator[Step, Timings, list[Timings]]:
        seats: list[_Seat] = []
        new: list[tuple[int, NewSequence]] = []
        start = min(round(asked.context), self._plan.model.max_model_len - MAX_STEPS - 2)
        limits = [node.max_num_seqs for node in self._plan.attention]
        for node, rows in enumerate(_shares(asked.rows, limits)):
            for _ in range(rows):
                sequence = self._sequence(node, start=start, num_tokens=1, decodes=True)
                if sequence is None:
                    return []
                new.append((node, sequence))
                seats.append(_Seat(node, sequence.seq_id, 1))
        if len(seats) < asked.rows:
            return []
        found: list[Timings] = []
        while len(found) < MAX_STEPS and (
            self._now_s < BUDGET_S or (len(found) <= NUM_WARM_UP and self._now_s < 1.5 * BUDGET_S)
        ):
            m = asked.micro_batches
            found.append((yield self._step(seats, () if found else new, num_micro_batches=m)))
        return found[NUM_WARM_UP:]

    def _sequence(
        self, node: int, *, start: int, num_tokens: int, decodes: bool = False
    ) -> NewSequence | None:
        """Return a sequence that has `start` tokens in the cache; None: it has no room.

        One that `decodes` reads the keys of prompts, as far as there are, and writes its own.
        """
        size = self._plan.kv_cache.block_size
        extra = MAX_STEPS + 1 if decodes else 1
        num_needed = -(-(start + num_tokens + extra) // size)
        shared = list(islice(cycle(self._written[node]), start // size if decodes else 0))
        first = self._next_block[node]
        own = range(first, first + num_needed - len(shared))
        if start < 0 or own.stop > self._num_blocks[node]:
            return None
        self._next_block[node] = own.stop
        if not decodes:
            self._written[node] += own[start // size : (start + num_tokens) // size]
        tokens = [self._rng.randrange(self._facts.vocab_size) for _ in range(start + num_tokens)]
        seq_id = next(self._ids)
        return NewSequence(
            seq_id=seq_id,
            tokens=pack_ints(tokens),
            num_prompt_tokens=len(tokens),
            num_computed=start,
            blocks=pack_ints([*shared, *own]),
            max_length=len(tokens) + extra,
            sampling=SamplingParams(max_tokens=extra, seed=seq_id),
        )

    def _step(
        self,
        seats: Sequence[_Seat],
        new: Sequence[tuple[int, NewSequence]],
        *,
        num_micro_batches: int,
    ) -> Step:
        """Return a step of `seats`; sequences that are neither there nor `new` are forgotten."""
        m = num_micro_batches
        kept = {seat.seq_id for seat in seats}
        gone = [seat for seat in self._open if seat.seq_id not in kept]
        nodes = sorted({seat.node for seat in (*seats, *gone)})
        parts = {
            node: [[seat for seat in seats if seat.node == node][mb::m] for mb in range(m)]
            for node in nodes
        }
        self._open = list(seats)
        ticket = StepTicket(
            step=self.last_step + 1,
            previous=self.last_step,
            generation=self._formation.generation,
            table_version=self._formation.table.version,
            num_micro_batches=m,
            participants=tuple(nodes),
            row_buckets=tuple(
                row_bucket(max(sum(s.num_tokens for s in parts[n][mb]) for n in nodes))
                for mb in range(m)
            ),
        )
        self.last_step += 1
        plans = {
            node: StepPlan(
                ticket=ticket,
                finished=pack_ints(seat.seq_id for seat in gone if seat.node == node),
                new=tuple(each for at, each in new if at == node),
                micro_batches=tuple(_packed(part) for part in parts[node]),
            )
            for node in nodes
        }
        return Step(ticket, plans)


def _packed(seats: Sequence[_Seat]) -> MicroBatch:
    return MicroBatch(
        seq_ids=pack_ints(seat.seq_id for seat in seats),
        num_tokens=pack_ints(seat.num_tokens for seat in seats),
        wanted=bytes([SAMPLE] * len(seats)),
        block_counts=pack_ints([0] * len(seats)),
        block_ids=b"",
    )


def _shares(total: int, limits: Sequence[int]) -> list[int]:
    """Return how much of `total` each gets, in proportion to the limits."""
    shares, left, weight = [], total, sum(limits)
    for limit in limits:
        share = min(limit, round(left * limit / weight) if weight else 0)
        shares.append(share)
        left, weight = left - share, weight - limit
    return shares
