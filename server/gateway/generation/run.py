"""A submitted request: its choices, and the engine call that feeds them.

Owns a request from submission to its last token: growth of the choices, measurements, usage,
and the abort in the engine when the client has gone. Knows no JSON and no connection;
server.gateway.handler drives it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.types import Receive

from server.gateway.call import Call, ClientGone
from server.gateway.generation.choice import Choice
from server.gateway.generation.resumption import Resumption
from server.gateway.generation.streaming import watch_client
from server.gateway.generation.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from server.gateway.http.exchange import Exchange
from server.gateway.operations.metrics import First, GatewayMetrics
from topspin.errors import ProtocolError
from topspin.messages import RequestOutput


class Run:
    """The choices of one HTTP request while they are generated.

    Invariant: after `close` nothing of the run is left in the engine, and `queued`, `next` and what
    that returns close the run themselves when they raise.
    """

    def __init__(
        self,
        call: Call,
        *,
        choices: Sequence[Choice],
        metrics: GatewayMetrics,
        exchange: Exchange,
        resumption: Resumption | None = None,
    ) -> None:
        """`resumption` is told what the one choice of a stream gets."""
        self._call = call
        self._resumption = resumption
        self._choice_of = dict(zip(call.request_ids, choices, strict=True))
        self._metrics = metrics
        self._exchange = exchange
        self._arrived_at_s = exchange.started_s
        self._watcher: asyncio.Task[None] | None = None
        self._started = False
        self._closed = False
        self._num_unfinished = len(choices)
        self.choices = choices

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return self._num_unfinished == 0

    def watch(self, receive: Receive) -> None:
        """Cancel the call as soon as the client disconnects."""
        self._watcher = asyncio.create_task(watch_client(receive, self._call.cancel))

    async def queued(self) -> None:
        """Wait until all choices are queued, so that only the engine can fail; raises as `next`."""
        try:
            await self._call.queued()
        except BaseException as error:
            self._close_after(error)
            raise

    async def next(self) -> Iterator[Choice]:
        """Wait for outputs; returns the choices that they add to, each when it has grown by one.

        It, and the iterator, raise ClientGone or the error by which the request failed.
        """
        try:
            outputs = await self._call.next()
        except BaseException as error:
            self._close_after(error)
            raise
        return self._grow(outputs)

    def _close_after(self, error: BaseException) -> None:
        is_gone = isinstance(error, ClientGone) or not isinstance(error, Exception)
        self.close("abort" if is_gone else "error")

    def _grow(self, outputs: Sequence[RequestOutput]) -> Iterator[Choice]:
        try:
            for output in outputs:
                for ready in self._scored(output):
                    choice = self._choice_of[ready.request_id]
                    for part in self._pieces(ready):
                        # Tokens behind a stop string are not wanted.
                        if choice.finish_reason is None:
                            self._add(choice, part, time.monotonic())
                            yield choice
        except Exception as error:
            self._close_after(error)
            raise

    def _pieces(self, output: RequestOutput) -> Iterable[RequestOutput]:
        return (output,) if self._resumption is None else self._resumption.pieces(output)

    def _scored(self, output: RequestOutput) -> list[RequestOutput]:
        """Return the outputs that can be shown now that `output` is there.

        A prompt's log-probabilities come with its first choice; the others' outputs wait for them.
        """
        choice = self._choice_of[output.request_id]
        prompt = choice.prompt
        prompt.add_scores(output.prompt_logprobs)
        if not prompt.is_scored and not choice.is_first:
            prompt.waiting.append(output)
            return []
        ready = [output] if output.token_ids or output.finish_reason is not None else []
        if prompt.is_scored and prompt.waiting:
            ready += prompt.waiting
            prompt.waiting = []
        return ready

    def _add(self, choice: Choice, output: RequestOutput, at_s: float) -> None:
        num_before = choice.num_tokens
        choice.push(output)
        if self._resumption is not None:
            self._resumption.added(output)
        if not choice.prompt.is_scored:
            raise ProtocolError("tokens came before all log-probabilities of their prompt")
        if not self._started:
            self._started = True
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens())
        if choice.finish_reason is not None and output.finish_reason is None:
            self._call.stop(output.request_id)
        if choice.first is None:
            choice.first = First(output.queue_s, output.prefill_s, at_s)
            choice.num_cached_tokens = output.num_cached_tokens
        self._measure(choice, choice.num_tokens - num_before, at_s)
        choice.last_output_at_s = at_s
        if choice.finish_reason is not None:
            self._num_unfinished -= 1

    def _measure(self, choice: Choice, num_tokens: int, at_s: float) -> None:
        metrics = self._metrics
        if choice.last_output_at_s is None:
            self._exchange.ttft_s = self._exchange.ttft_s or at_s - self._arrived_at_s
            metrics.time_to_first_token.observe(at_s - self._arrived_at_s)
        elif num_tokens:
            metrics.inter_token_latency.observe((at_s - choice.last_output_at_s) / num_tokens)
        metrics.generation_tokens.inc(num_tokens)
        if choice.finish_reason is not None:
            metrics.finished[choice.finish_reason].inc()
            metrics.e2e_latency.observe(at_s - self._arrived_at_s)
            assert choice.first is not None, "set with its first output"
            metrics.observe_finished(
                choice.first,
                last_at_s=at_s,
                num_prompt=len(choice.prompt.ids),
                num_output=choice.num_tokens,
            )

    def usage(self) -> Usage:
        """Return the token counts; cached tokens are those of each prompt's first choice."""
        num_prompt_tokens, num_output_tokens = self._num_prompt_tokens(), self._num_output_tokens()
        messages = [each.message for each in self.choices if each.has_message]
        reasoning: CompletionTokensDetails | UnsetType = UNSET
        if any(message.options.reasons for message in messages):
            reasoning = CompletionTokensDetails(
                reasoning_tokens=sum(message.num_reasoning_tokens for message in messages)
            )
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(each.num_cached_tokens for each in self.choices if each.is_first)
            ),
            completion_tokens_details=reasoning,
        )

    def _num_prompt_tokens(self) -> int:
        return sum(len(each.prompt.ids) for each in self.choices if each.is_first)

    def _num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def close(self, reason: Literal["abort", "error"] = "abort") -> None:
        """Free the request in the engine; only the first call has an effect."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._metrics.finished[reason].inc(self._num_unfinished)
        self._call.cancel()
        self._exchange.num_prompt_tokens = self._num_prompt_tokens()
        self._exchange.num_output_tokens = self._num_output_tokens()
