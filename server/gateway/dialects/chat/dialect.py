"""POST /v1/chat/completions, and the way from any chat to its request.

Owns the order in which a chat is checked, given to the template, and its grammar made. Other APIs
of chats call prepared_chat with theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from server.gateway.dialects.chat.channel_grammar import constrained_channels
from server.gateway.dialects.chat.generic_tools import shown_chat
from server.gateway.dialects.chat.prompt import (
    ChatPrompt,
    chat_prompt,
    reasoning_variables,
    unread_variables,
)
from server.gateway.dialects.chat.reply import ChatAnswer, ChatChunk, ChatReplies
from server.gateway.dialects.chat.request import ChatBody, ChatMessage, DecodedChat, decode_chat
from server.gateway.dialects.chat.tools import (
    MAX_THOUGHT_TOKENS,
    ThoughtBudget,
    constrained,
    tool_use,
)
from server.gateway.dialects.chat.truncation import latest_turns
from server.gateway.dialects.dialect import PreparedRequest, Replies, ReplyHead
from server.gateway.generation.params import RequestParams, request_params
from server.gateway.generation.prompts import Prompt
from server.gateway.generation.served_model import ServedModel
from server.gateway.grammars.structured_outputs import check_end, marker_terminal
from server.gateway.openapi.endpoint import CHUNKS, EXAMPLE_MODEL, OF_GENERATION, Endpoint
from server.gateway.parsing.channels import begun_answer
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from server.gateway.parsing.reasoning import begins_inside, is_over
from topspin.errors import InvalidRequest

CHAT = Endpoint(
    method="post",
    path="/v1/chat/completions",
    summary="Answer a chat",
    body=ChatBody,
    parts=(ChatMessage, ChatChunk),
    answer=ChatAnswer,
    events=CHUNKS.format("ChatChunk"),
    refusals=OF_GENERATION,
    example={
        "model": EXAMPLE_MODEL,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 100,
    },
)

MakeReplies = Callable[[ReplyHead], Replies]


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """OpenAI's chats."""

    model: ServedModel

    def answer_id(self, request_id: str) -> str:
        """Return the id of the answer to a request."""
        return f"chatcmpl-{request_id}"

    def prepare(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body; see Dialect."""

        decoded = decode_chat(data, self.model.reader())
        echoed = decoded.echoed()

        def replies(prompt: ChatPrompt) -> MakeReplies:
            return partial(
                ChatReplies, tokenizer=self.model.tokenizer, places=prompt.map, echoed=echoed
            )

        return prepared_chat(decoded, self.model, replies, max_tokens=max_tokens)


def prepared_chat(
    decoded: DecodedChat,
    model: ServedModel,
    replies_to: Callable[[ChatPrompt], MakeReplies],
    *,
    max_tokens: int | None,
    scores_text: bool = False,
    drops_turns: bool = False,
) -> PreparedRequest:
    """Return a chat ready to be generated; raises as Dialect.prepare.

    `max_tokens` None: its prompt may have any length. `scores_text`: log-probabilities are those of
    the answer's text, not of its reasoning. `drops_turns`: where all do not fit, the latest are
    answered.
    """
    body, messages, ignored = decoded
    tokenizer, formats = model.tokenizer, model.formats
    params = _params(body, model)
    template = model.chat_template("use /v1/completions")
    if body.tools and body.tool_choice == "none" and not template.mentions("tools"):
        # Agents send them with every request, to any model.
        body, ignored = msgspec.structs.replace(body, tools=None), ("tools", *ignored)
    tools = tool_use(body, formats=formats)
    shown = shown_chat(body, messages, tools, template, calls=formats.calls)
    check_fewest = None
    if max_tokens is not None:
        check_fewest = partial(
            params.check_prompt, limit=max_tokens, param="messages", at_least=True
        )
    made_of = partial(chat_prompt, body, model=model, tools=shown.tools, check_fewest=check_fewest)
    if drops_turns and max_tokens is not None:
        prompt = latest_turns(shown.messages, made_of, room=max_tokens - params.wanted(max_tokens))
    else:
        prompt = made_of(shown.messages)
    if body.reasoning_effort and not reasoning_variables(body, template):
        ignored = ("reasoning_effort", *ignored)
    unread = unread_variables(body, template)
    ignored = (*ignored, *(f"chat_template_kwargs.{name}" for name in unread))
    is_inside = formats.reasons and begins_inside(prompt.text, prompt.continued)
    options = MessageOptions(
        calls=formats.calls if tools.may_call else None,
        tools=tools.schemas,
        only_one_call=tools.only_one,
        is_named=tools.is_named,
        reasons=formats.reasons,
        is_inside_reasoning=is_inside,
        has_channels=formats.has_channels,
        begun=begun_answer(prompt.text) if formats.has_channels else "",
        has_only_calls=bool(tools.called)
        and not (formats.has_channels and body.continue_final_message),
        shows_reasoning=body.include_reasoning is not False,
        hides_reasoning_tokens=formats.reasons
        and (scores_text or body.include_reasoning is False)
        and (params.text.num_logprobs is not None or params.return_token_ids),
    )
    terminal = marker_terminal(tokenizer.token_id, tokenizer.special_ids)
    asked = body.thinking_token_budget
    is_wish = body.thinking is not None and body.thinking.budget_tokens == asked
    budget = ThoughtBudget.of(asked, formats, tokenizer.token_id, is_wish=is_wish)
    if budget is None and asked is not None and 0 <= asked <= MAX_THOUGHT_TOKENS:
        ignored = ("thinking.budget_tokens" if is_wish else "thinking_token_budget", *ignored)
    if formats.has_channels:
        begun = AnswerMessage(options)
        grammar = constrained_channels(params.sampling.grammar, tools, begun, terminal=terminal)
    else:
        is_behind = prompt.is_reasoning_off or is_over(prompt.text, prompt.continued)
        grammar = constrained(
            params.sampling.grammar,
            tools,
            calls=formats.calls,
            terminal=terminal,
            reasons=formats.reasons,
            is_inside_reasoning=is_inside,
            is_behind_reasoning=is_behind and not is_inside,
            budget=budget,
        )
    if grammar:
        field = "tools" if tools.tools else "thinking_token_budget"
        check_end(body, field)
        params = params.with_grammar(grammar, field=field)
    prompts = [Prompt(ids=prompt.ids)]
    replies = replies_to(prompt)
    return PreparedRequest(params, prompts, "messages", ignored, replies, options, shown.is_generic)


def _params(body: ChatBody, model: ServedModel) -> RequestParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            f"`max_tokens` is {older} but `max_completion_tokens` is {newer}; give one of them",
            param="max_tokens",
        )
    return request_params(
        body,
        model,
        max_tokens=older if newer is None else newer,
        default_max_tokens=model.defaults.max_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
