"""One request from its body to its answer.

Owns the course of a request, the same for all dialects: read, prepare, submit, and answer it whole
or as a stream. Knows no routes (server.gateway.app), no fields (server.gateway.dialects) and no
socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from models.text.tokenizer import IncrementalDetokenizer
from server.gateway.bodies.fields import BodyReader
from server.gateway.call import ClientGone
from server.gateway.dialects.dialect import (
    BackgroundReplies,
    Dialect,
    PreparedRequest,
    Replies,
    ReplyHead,
)
from server.gateway.engine_client import EngineClient
from server.gateway.generation.choice import Choice
from server.gateway.generation.params import RequestParams
from server.gateway.generation.resumption import RESUMPTION_HEADERS, Resumption
from server.gateway.generation.run import Run
from server.gateway.generation.served_model import ServedModel
from server.gateway.generation.streaming import EventStream
from server.gateway.generation.threads import PreparationThreads
from server.gateway.grammars.structured_outputs import GRAMMAR_FIELDS
from server.gateway.http.answer import json_response
from server.gateway.http.body import Bodies, announced_bytes
from server.gateway.http.exchange import Exchange, exchange_of
from server.gateway.operations.metrics import GatewayMetrics
from server.gateway.parsing.message import AnswerMessage
from topspin.messages import AddRequest, engine_id, pack_ints

# Larger bodies are prepared in a thread: a long prompt must not hold up all streams. So are those
# with a field that may mean a grammar to compile, or a stored conversation.
INLINE_BODY_BYTES = 16 * 1024
SLOW_FIELDS = (*GRAMMAR_FIELDS, b'"previous_response_id"', b'"report_prefix_cache"')
# Of bodies that are only converted.
INLINE_CONVERTED_BYTES = 4 * 1024
# So are answers with more log-probabilities than this, which takes some milliseconds.
INLINE_LOGPROBS = 2048
# Names the fields of the request that were accepted and have no effect.
IGNORED_HEADER = "x-topspin-ignored"
# The model's own chat template shows no tools: a generic prompt has them.
TOOLS_HEADER = "x-topspin-tools"

Prepare = Callable[..., PreparedRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handler:
    """Answers the requests of one gateway that have a body.

    Streams say that they live after `keep_alive_s` without an event; 0: never.
    """

    engine: EngineClient
    model: ServedModel
    metrics: GatewayMetrics
    keep_alive_s: float = 0.0
    threads: PreparationThreads = field(default_factory=PreparationThreads)
    bodies: Bodies = field(default_factory=Bodies)
    background: set[asyncio.Task[None]] = field(default_factory=set)

    async def generate(
        self, request: Request, *, dialect: Dialect, inline_bytes: int = INLINE_BODY_BYTES
    ) -> Response:
        """Answer a request that generates; longer bodies than `inline_bytes` go to a thread."""
        exchange = exchange_of(request.scope)
        if announced_bytes(request) <= INLINE_BODY_BYTES:
            # A long prompt may wait for longer.
            self.engine.check_wait(exchange.tenant.name, exchange.timeout_s)
        now_s = int(time.time())
        resumption: Resumption | None = None
        if any(name in request.headers for name in RESUMPTION_HEADERS):
            resumption = Resumption.of(request.headers, tenant=exchange.tenant.name, now_s=now_s)
        prepared = await self._prepared(request, dialect.prepare, inline_bytes)
        params = prepared.params
        exchange.name(params.request_id)
        if resumption is not None:
            num_choices = len(prepared.prompts) * params.num_choices
            resumption.check(num_choices=num_choices, stream=params.stream)
            exchange.name(resumption.request_id)
            if not params.has_seed:
                sampling = msgspec.structs.replace(params.sampling, seed=resumption.seed)
                params = dataclasses.replace(params, sampling=sampling)
                prepared = prepared._replace(params=params)
        head = ReplyHead(
            id=dialect.answer_id(exchange.request_id),
            created_at_s=now_s if resumption is None else resumption.created_at_s,
            params=params,
        )
        if resumption is not None and num_choices != 1:
            resumption = None  # its events have no ids
        run = self._submitted(prepared, exchange, resumption)
        if exchange.record is not None:
            exchange.record.submitted(params, response_id=head.id, choices=run.choices)
        replies = prepared.make_replies(head)
        if isinstance(replies, BackgroundReplies):
            await run.queued()
            response: Response = json_response(replies.begun(run.close))
            finishing = asyncio.create_task(self._finish(run, replies, params, exchange))
            self.background.add(finishing)
            finishing.add_done_callback(self.background.discard)
            return _with_ignored(response, prepared.ignored)
        run.watch(request.receive)
        if params.stream:
            # Waiting here gives a request that is refused a proper status. It waits for a place,
            # not for the first token: clients and proxies give up on a server that says nothing.
            await run.queued()
            blocks = self._event_blocks(run, replies, params, exchange, resumption)
            response = EventStream(
                blocks,
                close=run.close,
                keep_alive=replies.keep_alive,
                keep_alive_s=self.keep_alive_s,
            )
        else:
            response = json_response(await self._whole_answer(run, replies, params))
        if prepared.tools_as_text:
            response.headers[TOOLS_HEADER] = "generic"
        return _with_ignored(response, prepared.ignored)

    async def _finish(
        self, run: Run, replies: BackgroundReplies, params: RequestParams, exchange: Exchange
    ) -> None:
        """Complete an answer that nobody waits for; `replies` keep it, or its failure."""
        try:
            await self._whole_answer(run, replies, params)
        except ClientGone:
            return  # it was cancelled
        except Exception as error:
            exchange.failed(error)
            replies.failed(error)

    async def count(
        self, request: Request, *, prepare: Prepare, answer: Callable[..., msgspec.Struct]
    ) -> Response:
        """Answer a request that only asks how many tokens its prompt has."""
        prepared = await self._prepared(request, prepare)
        [prompt] = prepared.prompts
        body = msgspec.json.encode(answer(input_tokens=len(prompt.ids)))
        return _with_ignored(json_response(body), prepared.ignored)

    async def convert(
        self,
        request: Request,
        *,
        conversion: Callable[[bytes, BodyReader], msgspec.Struct],
        max_bytes: int,
    ) -> Response:
        """Answer a request with what its body of at most `max_bytes` is converted to.

        The engine is not asked, and need not be ready.
        """
        reader = self.model.reader()
        async with self.bodies.read_json(request, max_bytes=max_bytes) as data:

            def encoded() -> bytes:
                return msgspec.json.encode(conversion(data, reader))

            is_small = len(data) <= INLINE_CONVERTED_BYTES
            body = encoded() if is_small else await self.threads.run(encoded)
        return _with_ignored(json_response(body), reader.names)

    async def _prepared(
        self, request: Request, prepare: Prepare, inline_bytes: int = INLINE_BODY_BYTES
    ) -> PreparedRequest:
        """Read, decode, check and tokenise."""
        tenant = exchange_of(request.scope).tenant.name
        async with self.bodies.read_json(request) as data:
            self.engine.check_ready()
            limit = self.engine.state.max_request_tokens
            prepared = partial(prepare, data, max_tokens=limit, tenant=tenant)
            is_slow = len(data) > inline_bytes or any(each in data for each in SLOW_FIELDS)
            return await self.threads.run(prepared) if is_slow else prepared()

    def _submitted(
        self, prepared: PreparedRequest, exchange: Exchange, resumption: Resumption | None
    ) -> Run:
        """Check sizes, then make and send one engine request per choice."""
        params = prepared.params
        params.check_prompt_scores(sum(len(prompt.ids) for prompt in prepared.prompts))
        limit = self.engine.state.max_request_tokens
        budgets = [
            params.output_budget(len(prompt.ids), limit=limit, param=prepared.prompt_field)
            for prompt in prepared.prompts
        ]
        self.metrics.num_choices.observe(params.num_choices)
        requests: list[AddRequest] = []
        number = self.engine.next_number()
        choices: list[Choice] = []
        for prompt, budget in zip(prepared.prompts, budgets, strict=True):
            packed = pack_ints(prompt.ids)
            if params.sampling.prompt_logprobs is not None:
                prompt.num_scores = len(prompt.ids) - 1
            for nth in range(params.num_choices):
                self.metrics.max_tokens.observe(budget)
                index = len(choices)
                requests.append(
                    AddRequest(
                        request_id=engine_id(exchange.request_id, number, index),
                        prompt=packed,
                        sampling=params.sampling_of(nth, max_tokens=budget),
                        cache_salt=exchange.salted(params.cache_salt),
                        priority=params.priority,
                        tenant=exchange.tenant,
                        timeout_s=exchange.left_s(),
                    )
                )
                detokenizer = IncrementalDetokenizer(
                    self.model.tokenizer,
                    # Without output nothing completes a character that the prompt begins.
                    prompt_ids=prompt.ids if budget else (),
                    skip_special_tokens=params.text.skip_special_tokens,
                    shown_tokens=prepared.message.markers if prepared.message else (),
                )
                choices.append(
                    Choice(
                        index=index,
                        prompt=prompt,
                        is_first=nth == 0,
                        options=params.text,
                        detokenizer=detokenizer,
                        message=AnswerMessage(prepared.message) if prepared.message else None,
                    )
                )
        call = self.engine.submit(requests, grammar_field=params.grammar_field)
        return Run(
            call,
            choices=choices,
            metrics=self.metrics,
            exchange=exchange,
            resumption=resumption,
        )

    async def _whole_answer(self, run: Run, replies: Replies, params: RequestParams) -> bytes:
        """Return the answer once all choices have finished."""
        while not run.done:
            for _ in await run.next():
                pass
        run.close()
        num_scored = sum(each.prompt.num_scores + len(each.logprobs) for each in run.choices)
        encode = partial(replies.whole, run.choices, run.usage())
        if num_scored * params.num_candidates > INLINE_LOGPROBS:
            return await self.threads.run(encode)
        return encode()

    async def _event_blocks(
        self,
        run: Run,
        replies: Replies,
        params: RequestParams,
        exchange: Exchange,
        resumption: Resumption | None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events, in blocks of all that can be sent at once.

        A failure becomes an error event, as the status has already been sent.
        """
        events: list[bytes] = []
        try:
            while not run.done:
                for choice in await run.next():
                    num_scored = 0 if choice.has_begun else choice.prompt.num_scores
                    if num_scored * params.num_candidates > INLINE_LOGPROBS:
                        block = await self.threads.run(partial(replies.events, choice))
                    else:
                        block = replies.events(choice)
                    if resumption is not None:
                        block = resumption.events(block)
                    events.append(block)
                    choice.clear()
                if not run.done and (block := b"".join(events)):
                    events = []
                    yield block
        except ClientGone:
            return
        except Exception as error:
            exchange.failed(error)
            events.append(replies.failed(error))
        else:
            events.append(replies.end(run.choices, run.usage()))
        yield b"".join(events)


def _with_ignored(response: Response, ignored: Sequence[str]) -> Response:
    if ignored:
        response.headers[IGNORED_HEADER] = ", ".join(ignored)
    return response
