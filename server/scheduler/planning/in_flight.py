"""The steps in flight: their slices per node, and the answers received.

Owns the order of steps and the check that an answer fits its plan. Knows no
blocks and no queue. Called by policy.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from server.scheduler.micro_batching.cost import StepLoad
from server.scheduler.planning import sequence
from topspin.errors import ProtocolError
from topspin.messages import StepResult, StepTicket, unpack_ints

# Step k+1 is planned while step k runs; a third would be two tokens ahead of the known ones.
MAX_STEPS_IN_FLIGHT = 2


@dataclass(slots=True)
class NodePart:
    """One node's slices in plan order, as parallel lists, and the packed ids of sampled ones.

    `counts` are the positions fed for certain, `drafts` the most tokens of a draft behind them;
    `scored` has, by sequence id, the first position of each slice with SCORE. Once the node has
    answered, `tokens` has each slice's sampled tokens (None: not sampled, or failed), and `drafted`
    how many tokens its draft had (empty: there was none in the step).
    """

    seqs: list[sequence.Sequence]
    counts: list[int]
    drafts: list[int]
    scored: dict[int, int]
    sampled_ids: bytes
    result: StepResult | None = None
    tokens: Sequence[tuple[int, ...] | None] = ()
    drafted: Sequence[int] = ()


class StepUnderWay(NamedTuple):
    """The oldest step in flight, since when it is the oldest, and the nodes yet to answer."""

    step: int
    since_s: float
    unanswered: list[int]


@dataclass(slots=True)
class RunningStep:
    """A step that was sent; `took_s` is set when it is done.

    `after_idle`: there was no request before it, so the nodes' wait for its plan is no gap.
    """

    ticket: StepTicket
    sent_s: float
    parts: dict[int, NodePart]
    loads: dict[int, StepLoad] = field(default_factory=dict)
    after_idle: bool = False
    took_s: float = 0.0

    def is_of(self, step: int, generation: int) -> bool:
        """Say whether this is step `step` of `generation`."""
        return self.ticket.step == step and self.ticket.generation == generation

    def unanswered(self) -> list[int]:
        """Return the attention nodes that have not answered, ascending."""
        return sorted(index for index, part in self.parts.items() if part.result is None)


class StepsInFlight:
    """At most two steps, oldest first; done in order, even if answers come out of order."""

    def __init__(self) -> None:
        self._steps: deque[RunningStep] = deque()
        self._head_since_s = 0.0
        self._progress_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Say whether no step may be planned now."""
        return len(self._steps) >= MAX_STEPS_IN_FLIGHT

    @property
    def head(self) -> RunningStep | None:
        """Return the step that the nodes work on."""
        return self._steps[0] if self._steps else None

    @property
    def progress_s(self) -> float:
        """Return when a node last reported progress of the head, or when the head began."""
        return max(self._head_since_s, self._progress_s)

    def under_way(self) -> StepUnderWay | None:
        """Return the step that the nodes work on, for the watermark."""
        if not self._steps:
            return None
        head = self._steps[0]
        return StepUnderWay(head.ticket.step, self._head_since_s, head.unanswered())

    def progressed(self, *, step: int, generation: int, now: float) -> None:
        """Note a node's progress in a step; ignored unless that step is the head."""
        if self._steps and self._steps[0].is_of(step, generation):
            self._progress_s = now

    def clear(self) -> None:
        """Forget all steps: their generation is over."""
        self._steps.clear()

    def push(self, step: RunningStep) -> None:
        """Append a step that is being sent."""
        if not self._steps:
            self._head_since_s = step.sent_s
        self._steps.append(step)

    def accept(self, result: StepResult) -> None:
        """Record a node's answer.

        Raises ProtocolError, and changes nothing, if no such answer was outstanding or if
        it does not name exactly the sequences that the plan sampled.
        """
        running = next((s for s in self._steps if s.is_of(result.step, result.generation)), None)
        if running is None:
            raise ProtocolError(
                f"attention {result.index}: result of step {result.step} (generation "
                f"{result.generation}), which is not running"
            )
        part = running.parts.get(result.index)
        if part is None or part.result is not None:
            raise ProtocolError(
                f"attention {result.index}: a result of step {result.step} was not awaited"
            )
        drafted = _drafted_of(part, result)
        tokens = _tokens_of(part, result, drafted)
        _check_scores(part, result)
        part.tokens = tokens
        part.drafted = drafted
        part.result = result

    def finished(self, now: float) -> Iterator[RunningStep]:
        """Remove and yield, in order, the steps that all their nodes have answered."""
        while self._steps and not self._steps[0].unanswered():
            step = self._steps.popleft()
            step.took_s = now - self._head_since_s
            self._head_since_s = now
            yield step


def fed(load: StepLoad, part: NodePart) -> StepLoad:
    """Return the load of a step whose drafts were perhaps shorter than planned.

    Call before the step's tokens are applied.
    """
    if not any(part.drafts):
        return load
    unused, num_pairs = 0, 0.0
    lengths = part.drafted or [0] * len(part.seqs)
    for seq, most, length in zip(part.seqs, part.drafts, lengths, strict=True):
        unused += most - length
        num_pairs += (most - length) * (seq.num_committed + 0.5 * (most + length + 3))
    return load._replace(
        num_tokens=load.num_tokens - unused, num_pairs=max(0.0, load.num_pairs - num_pairs)
    )


def _drafted_of(part: NodePart, result: StepResult) -> Sequence[int]:
    """Return how long the draft of each slice was; raises ProtocolError as accept() says."""
    if not result.drafted:
        return ()
    seq_ids, lengths = unpack_ints(result.seq_ids), unpack_ints(result.drafted)
    if len(seq_ids) != len(lengths):
        raise ProtocolError(
            f"attention {result.index}: step {result.step}: {len(lengths)} drafts for "
            f"{len(seq_ids)} sequences"
        )
    length_of = dict(zip(seq_ids, lengths, strict=True))
    drafted = [length_of.get(seq.seq_id, 0) for seq in part.seqs]
    for seq, most, length in zip(part.seqs, part.drafts, drafted, strict=True):
        if not 0 <= length <= most:
            raise ProtocolError(
                f"attention {result.index}: step {result.step}: {length} tokens in the draft of "
                f"sequence {seq.seq_id}, where {most} were planned"
            )
    return drafted


def _tokens_of(
    part: NodePart, result: StepResult, drafted: Sequence[int]
) -> Sequence[tuple[int, ...] | None]:
    """Return the tokens of each slice of `part`; raises ProtocolError as accept() says."""
    tokens = unpack_ints(result.tokens)
    num_slices = len(part.seqs)
    all_sampled = len(part.sampled_ids) == 4 * num_slices == len(result.tokens)
    is_plain = not (result.counts or result.errors or result.refused)
    if all_sampled and is_plain and result.seq_ids == part.sampled_ids:
        return list(zip(tokens, strict=True))  # the common decode step, without a dict
    seq_ids = unpack_ints(result.seq_ids)
    counts = unpack_ints(result.counts) if result.counts else [1] * len(seq_ids)
    ends = [0, *accumulate(counts)]
    is_whole = len(seq_ids) == len(counts) and ends[-1] == len(tokens)
    if not is_whole or len(set(seq_ids)) != len(seq_ids) or min(counts, default=0) < 0:
        raise ProtocolError(
            f"attention {result.index}: step {result.step}: {len(tokens)} tokens for "
            f"{len(seq_ids)} sequences"
        )
    tokens_of = {
        seq_id: tuple(tokens[begin:end])
        for seq_id, (begin, end) in zip(seq_ids, pairwise(ends), strict=True)
    }
    sampled = set(unpack_ints(part.sampled_ids))
    planned = {seq.seq_id for seq in part.seqs}
    failed = result.errors.keys() | result.refused.keys()
    if (
        not tokens_of.keys() <= sampled
        or not failed <= planned
        or sampled - failed - set(tokens_of)
    ):
        raise ProtocolError(
            f"attention {result.index}: step {result.step}: the answer does not name the "
            "sequences that were sampled"
        )
    answers = [tokens_of.get(seq.seq_id) for seq in part.seqs]
    for seq, draft, answer in zip(part.seqs, drafted or [0] * len(answers), answers, strict=True):
        # None only where drafts of the step before may have completed the sequence.
        least = 0 if seq.num_planned >= seq.position_limit else 1
        if answer is not None and not least <= len(answer) <= 1 + draft:
            raise ProtocolError(
                f"attention {result.index}: step {result.step}: {len(answer)} tokens for sequence "
                f"{seq.seq_id}, where {least} to {1 + draft} are possible"
            )
    return answers


def _check_scores(part: NodePart, result: StepResult) -> None:
    """Raise ProtocolError unless every slice with SCORE has its log-probabilities, or failed."""
    if not part.scored and not result.prompt_logprobs:
        return
    expected = {}
    for seq, count in zip(part.seqs, part.counts, strict=True):
        start = part.scored.get(seq.seq_id)
        if start is not None and seq.seq_id not in result.errors | result.refused:
            expected[seq.seq_id] = min(count, seq.request.num_to_score - start)
    found = {seq_id: len(each) for seq_id, each in result.prompt_logprobs.items()}
    if found != expected:
        raise ProtocolError(
            f"attention {result.index}: step {result.step}: log-probabilities of prompt tokens "
            f"by sequence: {found}, where {expected} were wanted"
        )
