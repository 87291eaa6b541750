"""A submitted request: its choices, and the engine call that feeds them.

Owns a request from submission to its last token: growth of the choices, measurements, usage,
and the abort in the engine when the client has gone. Knows no JSON and no connection;
server.gateway.handler drives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.types import Receive

from server.gateway.answers.generation import Delta
from server.gateway.answers.prompts import Prompt
from server.gateway.answers.replies.base import Choice
from server.gateway.answers.streaming import watch_client
from server.gateway.answers.wire import CompletionTokensDetails, PromptTokensDetails, Usage
from server.gateway.engine_client import Arrival, Call, ClientGone
from server.gateway.http.exchange import Exchange
from server.gateway.operations.metrics import First, GatewayMetrics
from topspin.errors import ProtocolError


class Run:
    """The choices of one HTTP request while they are generated.

    Invariant: after `close` nothing of the run is left in the engine, and `queued` and `next` close
    the run themselves when they raise.
    """

    def __init__(
        self,
        call: Call,
        *,
        choices: list[Choice],
        prompts: Sequence[Prompt],
        metrics: GatewayMetrics,
        exchange: Exchange,
    ) -> None:
        self._call = call
        self._prompts = prompts
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

    async def next(self) -> list[tuple[Choice, Delta]]:
        """Wait for outputs; returns the additions to the choices, at least one, in order.

        Raises ClientGone, or the error by which the request failed.
        """
        try:
            grown: list[tuple[Choice, Delta]] = []
            while not grown:
                for arrival in await self._call.next():
                    grown += self._take(arrival)
            if not self._started:
                self._started = True
                self._metrics.prompt_tokens.inc(self._num_prompt_tokens())
            return grown
        except BaseException as error:
            self._close_after(error)
            raise

    def _close_after(self, error: BaseException) -> None:
        is_gone = isinstance(error, ClientGone) or not isinstance(error, Exception)
        self.close("abort" if is_gone else "error")

    def _take(self, arrival: Arrival) -> list[tuple[Choice, Delta]]:
        """Return what can be shown now that `arrival` is there.

        A prompt's log-probabilities come with its first choice; the others' outputs wait for them.
        """
        choice, output = self.choices[arrival.choice_idx], arrival.output
        prompt = choice.prompt
        prompt.add_scores(output.prompt_logprobs)
        if not prompt.is_scored and not choice.is_first:
            prompt.waiting.append(arrival)
            return []
        ready = [arrival] if output.token_ids or output.finish_reason is not None else []
        if prompt.is_scored and prompt.waiting:
            ready += (each._replace(at_s=arrival.at_s) for each in prompt.waiting)
            prompt.waiting = []
        return [grown for each in ready if (grown := self._grow(each)) is not None]

    def _grow(self, arrival: Arrival) -> tuple[Choice, Delta] | None:
        choice = self.choices[arrival.choice_idx]
        if choice.finish_reason is not None:
            return None  # these tokens come after a stop string
        delta = choice.text.push(arrival.output)
        if not choice.prompt.is_scored:
            raise ProtocolError("tokens came before all log-probabilities of their prompt")
        if delta.stopped_here:
            self._call.stop_choice(arrival.choice_idx)
        if delta.is_first:
            output = arrival.output
            choice.first = First(output.queue_s, output.prefill_s, arrival.at_s)
            choice.num_cached_tokens = arrival.output.num_cached_tokens
        self._measure(choice, delta, arrival.at_s)
        choice.num_tokens += len(delta.token_ids)
        choice.last_output_at_s = arrival.at_s
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            self._num_unfinished -= 1
        return choice, delta

    def _measure(self, choice: Choice, delta: Delta, at_s: float) -> None:
        metrics = self._metrics
        num_tokens = len(delta.token_ids)
        if choice.last_output_at_s is None:
            self._exchange.ttft_s = self._exchange.ttft_s or at_s - self._arrived_at_s
            metrics.time_to_first_token.observe(at_s - self._arrived_at_s)
        elif num_tokens:
            metrics.inter_token_latency.observe((at_s - choice.last_output_at_s) / num_tokens)
        metrics.generation_tokens.inc(num_tokens)
        if delta.finish_reason is not None:
            metrics.finished[delta.finish_reason].inc()
            metrics.e2e_latency.observe(at_s - self._arrived_at_s)
            assert choice.first is not None, "set with its first output"
            metrics.observe_finished(
                choice.first,
                last_at_s=at_s,
                num_prompt=len(choice.prompt.ids),
                num_output=choice.num_tokens + num_tokens,
            )

    def usage(self) -> Usage:
        """Return the token counts; cached tokens are those of each prompt's first choice."""
        num_prompt_tokens = self._num_prompt_tokens()
        num_output_tokens = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(each.num_cached_tokens for each in self.choices if each.is_first)
            ),
            completion_tokens_details=self._output_details(),
        )

    def _output_details(self) -> CompletionTokensDetails | UnsetType:
        messages = [each.message for each in self.choices if each.text.message is not None]
        if not any(message.options.reasons for message in messages):
            return UNSET
        return CompletionTokensDetails(
            reasoning_tokens=sum(message.num_reasoning_tokens for message in messages)
        )

    def _num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self._prompts)

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
        self._exchange.num_output_tokens = sum(choice.num_tokens for choice in self.choices)
