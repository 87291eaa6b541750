"""One generation request from its body to its answer.

Owns the order: read, decode, check, tokenise, submit, then write the choices' text as one
answer or as a stream. Knows no routes (server.gateway.app) and no socket.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from models.text.chat_template import ChatTemplate
from models.text.tokenizer import IncrementalDetokenizer, Tokenizer
from server.gateway.answers.generation import ChoiceText, Delta
from server.gateway.answers.prompts import Prompt
from server.gateway.answers.replies.anthropic import MessagesReplies, TokenCount
from server.gateway.answers.replies.base import Choice, Replies, ReplyHead
from server.gateway.answers.replies.chat import ChatReplies
from server.gateway.answers.replies.completions import CompletionReplies
from server.gateway.answers.replies.responses import ResponseDeleted, ResponsesReplies
from server.gateway.answers.response_store import ResponseStore
from server.gateway.answers.run import Run
from server.gateway.answers.streaming import EventStream, KeepAlive
from server.gateway.engine_client import ClientGone, EngineClient
from server.gateway.http.body import Bodies
from server.gateway.http.exchange import Exchange, exchange_of
from server.gateway.operations.metrics import GatewayMetrics
from server.gateway.parsing.message import Message, MessageOptions
from server.gateway.parsing.reasoning import begins_inside, is_over
from server.gateway.requests.anthropic import decode_count, decode_messages
from server.gateway.requests.grammars import GRAMMAR_FIELDS, check_end
from server.gateway.requests.params import (
    RequestParams,
    ServedModel,
    chat_params,
    completion_params,
)
from server.gateway.requests.preparation import PreparationThreads
from server.gateway.requests.prompts import (
    ChatPrompt,
    bad_word_tokens,
    chat_prompt,
    completion_prompts,
    echoes,
    given_prompts,
    reasoning_variables,
)
from server.gateway.requests.responses import decode_response, following
from server.gateway.requests.schema import ChatMessage, DecodedChat, decode_chat, decode_completion
from server.gateway.requests.tool_grammars import constrained, marker_terminal
from server.gateway.requests.tools import MessageFormats, tool_use
from topspin.errors import InvalidRequest
from topspin.messages import AddRequest, engine_id, pack_ints

# Larger bodies are prepared in a thread: a long prompt must not hold up all streams. So are those
# with a field that may mean a grammar to compile, or a stored conversation.
INLINE_BODY_BYTES = 16 * 1024
SLOW_FIELDS = (*GRAMMAR_FIELDS, b'"previous_response_id"', b'"report_prefix_cache"')
# So are answers with more log-probabilities than this, which takes some milliseconds.
INLINE_LOGPROBS = 2048
# Names the fields of the request that were accepted and have no effect.
IGNORED_HEADER = "x-topspin-ignored"


MakeReplies = Callable[[ReplyHead], Replies]


class Prepared(NamedTuple):
    """A checked request: its parameters, its prompts, and the field that held them.

    `ignored` names the fields that were given and have no effect. `make_replies` gives the
    encoder of the answer. `message`: how the answers' text is read; None: it is shown as it is.
    """

    params: RequestParams
    prompts: list[Prompt]
    prompt_field: str
    ignored: Sequence[str]
    make_replies: MakeReplies
    message: MessageOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationHandler:
    """Serves the endpoints of one gateway that generate, or count what they would be given.

    `template` None: the checkpoint has no chat template, and chat is refused. `formats` is what can
    be read in the model's text. Streams say that they live after `keep_alive_s` without an event;
    0: never.
    """

    engine: EngineClient
    model: ServedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    metrics: GatewayMetrics
    formats: MessageFormats
    keep_alive_s: float = 0.0
    responses: defaultdict[str, ResponseStore] = field(
        default_factory=lambda: defaultdict(ResponseStore)
    )
    threads: PreparationThreads = field(default_factory=PreparationThreads)
    bodies: Bodies = field(default_factory=Bodies)

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._answer(request, self._prepare_chat, id_prefix="chatcmpl-")

    async def completion(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        return await self._answer(request, self._prepare_completion, id_prefix="cmpl-")

    async def messages(self, request: Request) -> Response:
        """Answer POST /v1/messages."""
        return await self._answer(request, self._prepare_messages, id_prefix="msg_")

    async def respond(self, request: Request) -> Response:
        """Answer POST /v1/responses."""
        prepare = partial(self._prepare_response, self._responses_of(request))
        return await self._answer(request, prepare, id_prefix="resp_", is_kept=True)

    async def stored_response(self, request: Request) -> Response:
        """Answer GET and DELETE /v1/responses/{id}."""
        response_id, responses = request.path_params["response_id"], self._responses_of(request)
        if request.method == "DELETE":
            responses.remove(response_id)
            gone = msgspec.json.encode(ResponseDeleted(id=response_id))
            return Response(gone, media_type="application/json")
        body = responses.get(response_id).body
        return Response(body, media_type="application/json")

    def _responses_of(self, request: Request) -> ResponseStore:
        """Return the stored responses of the request's tenant."""
        return self.responses[exchange_of(request.scope).tenant]

    async def count_tokens(self, request: Request) -> Response:
        """Answer POST /v1/messages/count_tokens: the prompt's tokens, without generating any."""
        prepared = await self._prepared(request, self._prepare_count)
        [prompt] = prepared.prompts
        body = msgspec.json.encode(TokenCount(input_tokens=len(prompt.ids)))
        return _with_ignored(Response(body, media_type="application/json"), prepared)

    def _prepare_chat(self, data: bytes) -> Prepared:
        def replies(prompt: ChatPrompt, _: RequestParams) -> MakeReplies:
            return partial(ChatReplies, tokenizer=self.tokenizer, places=prompt.map)

        return self._prepared_chat(decode_chat(data), replies)

    def _prepare_messages(self, data: bytes) -> Prepared:
        return self._prepared_chat(decode_messages(data), _to_messages)

    def _prepare_count(self, data: bytes) -> Prepared:
        return self._prepared_chat(decode_count(data), _to_messages, is_counted=True)

    def _prepare_response(self, responses: ResponseStore, data: bytes) -> Prepared:
        request, chat = decode_response(data)
        messages, num_bytes = chat.messages, len(data)
        if request.previous_response_id is not None:
            previous = responses.get(request.previous_response_id, param="previous_response_id")
            messages = following(previous.messages, messages)
            num_bytes += previous.num_bytes
        keep = None
        if request.store is not False:
            keep = partial(responses.keep, messages=messages, num_bytes=num_bytes)

        def replies(_: ChatPrompt, params: RequestParams) -> MakeReplies:
            return partial(
                ResponsesReplies,
                tokenizer=self.tokenizer,
                request=request,
                sampling=params.sampling,
                keep=keep,
            )

        if request.instructions:
            messages = [ChatMessage(role="system", content=request.instructions), *messages]
        return self._prepared_chat(chat._replace(messages=messages), replies, scores_text=True)

    def _prepared_chat(
        self,
        decoded: DecodedChat,
        replies_to: Callable[[ChatPrompt, RequestParams], MakeReplies],
        *,
        is_counted: bool = False,
        scores_text: bool = False,
    ) -> Prepared:
        """Return a chat ready to be generated; one that is only counted may have any length.

        `scores_text`: log-probabilities are those of the answer's text, not of its reasoning.
        """
        body, messages, ignored = decoded
        words = bad_word_tokens(body.bad_words, self.tokenizer)
        params = chat_params(body, self.model, bad_words=words)
        if self.template is None:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions", param="messages"
            )
        formats = self.formats
        if body.tools and body.tool_choice == "none" and not self.template.mentions("tools"):
            # Agents send them with every request, to any model.
            body, ignored = msgspec.structs.replace(body, tools=None), ("tools", *ignored)
        tools = tool_use(body, template=self.template, formats=formats)
        prompt = chat_prompt(
            body,
            messages,
            template=self.template,
            tokenizer=self.tokenizer,
            check_fewest=_any_length if is_counted else self._check_fewest(params, "messages"),
            tools=tools.for_template(),
            call_id_chars=formats.calls.id_chars if formats.calls else None,
        )
        if body.reasoning_effort and not reasoning_variables(body, self.template):
            ignored = ("reasoning_effort", *ignored)
        names = body.chat_template_kwargs or ()
        unread = [name for name in names if name not in self.template.options]
        ignored = (*ignored, *(f"chat_template_kwargs.{name}" for name in unread))
        is_inside = formats.reasons and begins_inside(prompt.text, prompt.continued)
        is_behind = prompt.is_reasoning_off or is_over(prompt.text, prompt.continued)
        grammar = constrained(
            params.sampling.grammar,
            tools,
            calls=formats.calls,
            terminal=marker_terminal(self.tokenizer.token_id, self.tokenizer.special_ids),
            reasons=formats.reasons,
            is_inside_reasoning=is_inside,
            is_behind_reasoning=is_behind and not is_inside,
        )
        if grammar:
            check_end(body, "tools")
            params = params.with_grammar(grammar, field="tools")
        options = MessageOptions(
            calls=formats.calls if tools.may_call else None,
            tool_names=tools.names,
            only_one_call=tools.only_one,
            is_named=tools.is_named,
            reasons=formats.reasons,
            is_inside_reasoning=is_inside,
            shows_reasoning=body.include_reasoning is not False,
            hides_reasoning_tokens=formats.reasons
            and (scores_text or body.include_reasoning is False)
            and (params.text.num_logprobs is not None or params.return_token_ids),
        )
        replies = replies_to(prompt, params)
        return Prepared(params, [Prompt(ids=prompt.ids)], "messages", ignored, replies, options)

    def _prepare_completion(self, data: bytes) -> Prepared:
        body, ignored = decode_completion(data)
        words = bad_word_tokens(body.bad_words, self.tokenizer)
        params = completion_params(body, self.model, bad_words=words)
        check = self._check_fewest(params, "prompt")
        given = given_prompts(body, vocab_size=self.model.vocab_size, check_fewest=check)
        prompts = completion_prompts(body, given, tokenizer=self.tokenizer, check_fewest=check)
        shown: Sequence[str | None] = [None] * len(prompts)
        if params.echo:
            shown = echoes(body, given, prompts, tokenizer=self.tokenizer)
        made = [Prompt(ids=ids, echo=echo) for ids, echo in zip(prompts, shown, strict=True)]
        skips = params.text.skip_special_tokens
        replies = partial(CompletionReplies, tokenizer=self.tokenizer, skip_special_tokens=skips)
        return Prepared(params, made, "prompt", ignored, replies)

    def _check_fewest(self, params: RequestParams, param: str) -> Callable[[int], None]:
        limit = self.engine.state.max_request_tokens
        return partial(params.check_prompt, limit=limit, param=param, at_least=True)

    async def _prepared(self, request: Request, prepare: Callable[[bytes], Prepared]) -> Prepared:
        async with self.bodies.read_json(request) as data:
            self.engine.check_ready()
            if len(data) > INLINE_BODY_BYTES or any(field in data for field in SLOW_FIELDS):
                return await self.threads.run(partial(prepare, data))
            return prepare(data)

    async def _answer(
        self,
        request: Request,
        prepare: Callable[[bytes], Prepared],
        *,
        id_prefix: str,
        is_kept: bool = False,
    ) -> Response:
        """Answer a request; one that is kept by its id does not have the client's."""
        exchange = exchange_of(request.scope)
        prepared = await self._prepared(request, prepare)
        params = prepared.params
        request_id = exchange.name(params.request_id)
        head = ReplyHead(
            id=f"{id_prefix}{secrets.token_hex(16) if is_kept else request_id}",
            created_at_s=int(time.time()),
            model=params.model,
            num_logprobs=params.text.num_logprobs,
            num_prompt_logprobs=params.num_prompt_logprobs,
            include_usage=params.include_usage,
            continuous_usage=params.continuous_usage,
            return_token_ids=params.return_token_ids,
        )
        run = self._submit(prepared, exchange)
        if exchange.record is not None:
            exchange.record.submitted(params, response_id=head.id, choices=run.choices)
        run.watch(request.receive)
        replies = prepared.make_replies(head)
        if params.stream:
            # Waiting here gives a request that is refused a proper status. It does not wait for
            # the first token: clients and proxies give up on a server that says nothing.
            await run.queued()
            blocks = self._event_blocks(run, replies, params, exchange)
            keep_alive = KeepAlive(replies.keep_alive, self.keep_alive_s)
            response: Response = EventStream(blocks, close=run.close, keep_alive=keep_alive)
        else:
            response = await self._whole_answer(run, replies, params)
        return _with_ignored(response, prepared)

    def _submit(self, prepared: Prepared, exchange: Exchange) -> Run:
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
                    )
                )
                detokenizer = IncrementalDetokenizer(
                    self.tokenizer,
                    # Without output nothing completes a character that the prompt begins.
                    prompt_ids=prompt.ids if budget else (),
                    skip_special_tokens=params.text.skip_special_tokens,
                    shown_tokens=prepared.message.markers if prepared.message else (),
                )
                message = Message(prepared.message) if prepared.message else None
                text = ChoiceText(params.text, detokenizer, message)
                choices.append(Choice(index=index, prompt=prompt, is_first=nth == 0, text=text))
        return Run(
            self.engine.submit(requests, grammar_field=params.grammar_field),
            choices=choices,
            prompts=prepared.prompts,
            metrics=self.metrics,
            exchange=exchange,
        )

    async def _whole_answer(self, run: Run, replies: Replies, params: RequestParams) -> Response:
        """Return the answer once all choices have finished."""
        while not run.done:
            for choice, delta in await run.next():
                choice.shown.append(delta.text)
                choice.token_ids.extend(delta.shown_ids)
                choice.logprobs.extend(delta.logprobs)
        run.close()
        num_scored = sum(each.prompt.num_scores + len(each.logprobs) for each in run.choices)
        encode = partial(replies.whole, run.choices, run.usage())
        body = await self._encoded(encode, num_logprobs=num_scored * params.num_candidates)
        return Response(body, media_type="application/json")

    async def _event_blocks(
        self,
        run: Run,
        replies: Replies,
        params: RequestParams,
        exchange: Exchange,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the stream's events, in blocks of all that can be sent at once.

        A failure becomes an error event, as the status has already been sent.
        """
        try:
            while True:
                grown = await run.next()
                num_scored = sum(each.prompt.num_scores for each, delta in grown if delta.is_first)
                encode = partial(_events, grown, replies)
                block = await self._encoded(encode, num_logprobs=num_scored * params.num_candidates)
                if run.done:
                    break
                if block:
                    yield block
        except ClientGone:
            return
        except Exception as error:
            exchange.failed(error)
            yield replies.failed(error)
            return
        yield block + replies.end(run.choices, run.usage())

    async def _encoded(self, encode: Callable[[], bytes], *, num_logprobs: int) -> bytes:
        """Return encode()'s result, which has so many log-probabilities."""
        return await self.threads.run(encode) if num_logprobs > INLINE_LOGPROBS else encode()


def _to_messages(_: ChatPrompt, __: RequestParams) -> MakeReplies:
    return MessagesReplies


def _any_length(_: int) -> None:
    """Accept a prompt of any length."""


def _with_ignored(response: Response, prepared: Prepared) -> Response:
    if prepared.ignored:
        response.headers[IGNORED_HEADER] = ", ".join(prepared.ignored)
    return response


def _events(grown: Sequence[tuple[Choice, Delta]], replies: Replies) -> bytes:
    return b"".join([replies.events(choice, delta) for choice, delta in grown])
