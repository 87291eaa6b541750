"""The outputs and failures of a step, grouped per gateway.

Owns what a node's answer changes in a Request and its output (the tokens up to the one that ends
it, the log-probabilities of prompts, once each), and the grouping: at most one Outputs message per
gateway and step, and one RequestQueued per gateway and turn. Knows no pool, no step and no sockets.
Filled by policy.py, sent by service.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from server.scheduler.planning.in_flight import NodePart
from server.scheduler.planning.sequence import Request, Sequence
from server.scheduler.planning.telemetry import Counters
from server.scheduler.waiting.tenants import TenantState
from topspin.errors import Overloaded, RequestError, TopspinError
from topspin.messages import (
    FinishReason,
    Outputs,
    RequestFailed,
    RequestOutput,
    RequestQueued,
    StepResult,
    TokenLogprobs,
)

Slice = tuple[Sequence, int, int, tuple[int, ...] | None]
"""A slice of a step that has been answered, as NodePart has it: its sequence, the positions fed,
the most draft tokens and the tokens sampled."""

# Proxies wait this long for the head of an answer, and many times that.
UNTOLD_S = 10.0


class Outbox:
    """Outputs, failures and queued requests; iterates over (gateway, message), in that order."""

    def __init__(self) -> None:
        self._outputs: dict[bytes, list[RequestOutput]] = {}
        self._failures: list[tuple[bytes, RequestFailed]] = []
        self._queued: dict[bytes, list[str]] = {}

    def __iter__(self) -> Iterator[tuple[bytes, Outputs | RequestFailed | RequestQueued]]:
        for peer, outputs in self._outputs.items():
            yield peer, Outputs(outputs=tuple(outputs))
        yield from self._failures
        for peer, request_ids in self._queued.items():
            yield peer, RequestQueued(request_ids=tuple(request_ids))

    def outputs_of(self, peer: bytes) -> list[RequestOutput]:
        """Return the list to which outputs for `peer` are appended."""
        return self._outputs.setdefault(peer, [])

    def accept_next(
        self, part: NodePart, counters: Counters, served: list[TenantState]
    ) -> Iterator[Slice]:
        """Accept one more token of each output that has begun and goes on; yield the others.

        Appends to `served` whose tokens they are. Does for the commonest step what accept() does
        for any, in less than half of the time: a step of 4,096 sequences spends most of it here.
        """
        outputs, peer, num_others = [], None, 0
        for each in zip(part.seqs, part.counts, part.drafts, part.tokens, strict=True):
            seq, count, _, sampled = each
            request = seq.request
            tokens = request.tokens
            length, num_committed = len(tokens), seq.num_committed + count
            if (
                not sampled
                or seq.closed
                or not request.has_begun
                or num_committed >= seq.publish_at
                or length == request.num_prompt_tokens
                or length + 1 >= request.max_length
                or sampled[0] in request.stop_ids
            ):
                num_others += 1
                yield each
                continue
            seq.num_in_flight -= 1
            seq.num_committed = num_committed
            tokens.append(sampled[0])
            request.num_replays = 0
            served.append(request.account)
            if request.peer != peer:
                peer = request.peer
                outputs = self.outputs_of(peer)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    index=length - request.num_prompt_tokens,
                    token_ids=sampled,
                    num_cached_tokens=request.num_cached_tokens or 0,
                )
            )
        counters.generation_tokens += len(part.seqs) - num_others

    def fail(self, request: Request, error: TopspinError) -> None:
        """Record that `request` has ended with `error`."""
        self._failures.append((request.peer, failure(request.request_id, error)))

    def queued(self, request: Request) -> None:
        """Record that `request` has its place in the queue."""
        self._queued.setdefault(request.peer, []).append(request.request_id)


class Arrivals:
    """The requests that have been taken, and whose gateways have not been told so.

    They are told at the first admission, or after UNTOLD_S: until then a request may still be
    refused with a proper status, for it may wait in vain.
    """

    def __init__(self) -> None:
        self._untold: list[Request] = []

    def add(self, request: Request) -> None:
        """Note a request that has just been queued."""
        self._untold.append(request)

    def take(self, is_compiling: Callable[[str], bool], now: float) -> Outbox:
        """Return what gateways are to be told; requests whose grammar `is_compiling` have time."""
        outbox = Outbox()
        untold, self._untold = self._untold, []
        for request in untold:
            if request.ended:
                continue
            has_room = request.sequence is not None or request.has_begun
            if has_room or (
                now - request.added_at >= UNTOLD_S and not is_compiling(request.grammar_key)
            ):
                outbox.queued(request)
            else:
                self._untold.append(request)
        return outbox


def failure(request_id: str, error: TopspinError) -> RequestFailed:
    """Return the message that ends a request with `error`."""
    param = error.param if isinstance(error, RequestError) else None
    failed = RequestFailed(
        request_id=request_id,
        code=error.code,
        status=error.status,
        message=str(error),
        param=param or "",
    )
    if isinstance(error, Overloaded):
        return msgspec.structs.replace(
            failed, retry_after_s=error.retry_after_s, wait_s=error.wait_s
        )
    return failed


def new_scores(seq: Sequence, part: NodePart, result: StepResult) -> tuple[TokenLogprobs, ...]:
    """Return the prompt's log-probabilities in `result` that were not delivered before."""
    start = part.scored.get(seq.seq_id)
    if start is None:
        return ()
    request = seq.request
    assert start <= request.num_scored, "a prompt token was skipped"
    scores = result.prompt_logprobs[seq.seq_id][request.num_scored - start :]
    request.num_scored += len(scores)
    return scores


def accept(
    seq: Sequence,
    sampled: tuple[int, ...],
    scores: tuple[TokenLogprobs, ...],
    result: StepResult,
    outbox: Outbox,
    counters: Counters,
    now: float,
) -> FinishReason | None:
    """Append sampled tokens to the output, up to the one that ends it, and emit them."""
    request = seq.request
    tokens = request.tokens
    index = len(tokens) - request.num_prompt_tokens
    tokens.append(sampled[0])
    finish = request.finish_reason()
    num_tokens = 1
    while finish is None and num_tokens < len(sampled):
        tokens.append(sampled[num_tokens])
        finish = request.finish_reason()
        num_tokens += 1
    request.num_replays = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    if result.logprobs and request.sampling.logprobs is not None:
        logprobs = result.logprobs.get(seq.seq_id, ())[:num_tokens]
    queue_s = prefill_s = 0.0
    if index == 0:
        queue_s, prefill_s = request.queue_s, now - request.added_at - request.queue_s
        counters.prompt_tokens += request.num_prompt_tokens
    counters.generation_tokens += num_tokens
    sampled = sampled[:num_tokens]  # what follows was fed in vain
    outbox.outputs_of(request.peer).append(
        RequestOutput(
            request_id=request.request_id,
            index=index,
            token_ids=sampled,
            logprobs=logprobs,
            finish_reason=finish,
            stop_token_id=sampled[-1] if finish == "stop" else None,
            num_cached_tokens=request.num_cached_tokens or 0,
            prompt_logprobs=scores,
            queue_s=queue_s,
            prefill_s=prefill_s,
        )
    )
    return finish


def accept_prompt(
    seq: Sequence,
    scores: tuple[TokenLogprobs, ...],
    outbox: Outbox,
    counters: Counters,
    now: float,
) -> FinishReason | None:
    """Emit log-probabilities of the prompt, and the end of a request without output."""
    request = seq.request
    is_done = not request.samples and seq.num_committed == request.position_limit
    finish: FinishReason | None = "length" if is_done else None
    if is_done:
        counters.prompt_tokens += request.num_prompt_tokens
    if scores or is_done:
        request.num_replays = 0
        outbox.outputs_of(request.peer).append(
            RequestOutput(
                request_id=request.request_id,
                index=request.num_output_tokens,
                token_ids=(),
                finish_reason=finish,
                num_cached_tokens=request.num_cached_tokens or 0,
                prompt_logprobs=scores,
                queue_s=request.queue_s if is_done else 0.0,
                prefill_s=now - request.added_at - request.queue_s if is_done else 0.0,
            )
        )
    return finish
