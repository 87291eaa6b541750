"""Conversion of messages to prompt tokens.

Owns the use of the chat template: the variables that a client may set, the form of earlier
answers, the continuation of the last message. Knows no sampling and no HTTP.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from models.text.chat_template import ChatTemplate, MessageForms, marked, may_set, text_of
from server.gateway.bodies.decoding import check_depth
from server.gateway.dialects.chat.cache_report import PromptMap
from server.gateway.dialects.chat.request import ChatBody, ChatMessage, ToolCall
from server.gateway.dialects.chat.tools import ToolUse
from server.gateway.dialects.dialect import CheckFewest
from server.gateway.errors import truncated
from server.gateway.generation.prompts import cut_prompt
from server.gateway.generation.served_model import ServedModel
from topspin.errors import InvalidRequest

# Some agents' first system block has a number that changes with each request, for their billing.
# It means nothing to a model, and would make every prompt differ from its first tokens on.
BILLING_PREFIX = "x-anthropic-billing-header"
# The names of the variable by which templates let requests turn reasoning on or off.
_REASONING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class ChatPrompt(NamedTuple):
    """A chat as the model gets it: its tokens, the text that they come from, and its places.

    `continued`: the last message's own text, if the model continues it. `is_reasoning_off`: the
    template was told that the model does not reason.
    """

    ids: list[int]
    text: str
    map: PromptMap | None = None
    continued: str = ""
    is_reasoning_off: bool = False


def chat_prompt(
    body: ChatBody,
    given: Sequence[ChatMessage],
    *,
    model: ServedModel,
    tools: ToolUse,
    check_fewest: CheckFewest | None = None,
) -> ChatPrompt:
    """Return the prompt of a chat request with these messages and tools; raises InvalidRequest.

    `check_fewest` is called before the text is tokenised; None: it may have any length.
    """
    template = model.chat_template("use a `prompt`")
    calls = model.formats.calls
    call_id_chars = calls.id_chars if calls else None
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if not may_set(name):
            raise InvalidRequest(
                f"`chat_template_kwargs`: `{truncated(name, 64)}` may not be set by a request",
                param="chat_template_kwargs",
            )
    kwargs = reasoning_variables(body, template) | kwargs
    _check_tool_use(given, template)
    numbered = list(enumerate(given))
    if template.forms.has_one_call:
        numbered = _with_one_call_each(given)
    messages = [
        _plain(message, idx, forms=template.forms, call_id_chars=call_id_chars)
        for idx, message in numbered
    ]
    if shown_tools := tools.for_template():
        kwargs["tools"] = shown_tools
    if body.continue_final_message:
        text = _continued(body, messages, template=template, kwargs=kwargs)
    else:
        text = template.render(
            messages, add_generation_prompt=body.add_generation_prompt is not False, **kwargs
        )
    if check_fewest is not None and body.truncate_prompt_tokens is None:
        check_fewest(model.tokenizer.fewest_tokens(text))
    # The template writes the special tokens itself.
    token_ids = model.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    if not token_ids:
        raise InvalidRequest("the messages give an empty prompt", param="messages")
    places = None
    if body.report_prefix_cache:
        if body.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "`report_prefix_cache` and `truncate_prompt_tokens` exclude each other",
                param="report_prefix_cache",
            )
        begins = [
            (begin, numbered[nth][0], role)
            for begin, nth, role in _begins(messages, template=template, kwargs=kwargs)
        ]
        places = PromptMap(text=text, begins=begins)
    continued = text_of(messages[-1]["content"]) if body.continue_final_message else ""
    is_off = any(kwargs.get(name) is False for name in _REASONING_SWITCHES & template.options)
    return ChatPrompt(cut_prompt(token_ids, body), text, places, continued, is_off)


def _begins(
    messages: Sequence[Mapping[str, Any]], *, template: ChatTemplate, kwargs: dict[str, Any]
) -> list[tuple[int, int, str]]:
    """Return where each message's content begins in the prompt, its index in them and its role.

    Found by marks that no client can foresee. A message whose content the template does not show
    has no place; blanks that it drops can move the places of those behind by as much.
    """
    secret = secrets.token_hex(16)
    with_marks = [
        {**message, "content": marked(message["content"], before=f"<{secret}:{idx}>")}
        if message.get("content") is not None
        else message
        for idx, message in enumerate(messages)
    ]
    text = template.render(with_marks, add_generation_prompt=False, **kwargs)
    begins: list[tuple[int, int, str]] = []
    num_marks_chars = 0
    for found in re.finditer(rf"<{secret}:([0-9]+)>", text):
        idx = int(found[1])
        begins.append((found.start() - num_marks_chars, idx, str(messages[idx]["role"])))
        num_marks_chars += len(found[0])
    return begins


def reasoning_variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables of the template by which a request says whether to reason.

    They are set by `reasoning_effort`, and by a switch under another name that it gives.
    """
    effort, given = body.reasoning_effort, body.chat_template_kwargs or {}
    values: dict[str, Any] = {}
    if effort is not None:
        values = {
            "reasoning_effort": effort,
            **dict.fromkeys(_REASONING_SWITCHES, effort != "none"),
        }
    if switches := sorted(_REASONING_SWITCHES & given.keys()):
        values |= dict.fromkeys(_REASONING_SWITCHES, given[switches[0]])
    return {name: value for name, value in values.items() if name in template.options}


def switched_off(body: ChatBody, template: ChatTemplate) -> ChatBody:
    """Return a body that turns reasoning off unless it says whether to reason.

    A template without a switch is left alone.
    """
    is_said = body.chat_template_kwargs or body.reasoning_effort
    if is_said or not template.options & _REASONING_SWITCHES:
        return body
    return replace(body, chat_template_kwargs={"enable_thinking": False})


def unread_variables(body: ChatBody, template: ChatTemplate) -> list[str]:
    """Return the variables of a request that the template does not read, under any name."""
    read = template.options
    if read & _REASONING_SWITCHES:
        read |= _REASONING_SWITCHES
    return [name for name in body.chat_template_kwargs or () if name not in read]


def _check_tool_use(messages: Sequence[ChatMessage], template: ChatTemplate) -> None:
    """Raise InvalidRequest for calls and results of tools that the template would not show."""
    for idx, message in enumerate(messages):
        if message.role == "tool" and not template.mentions("tool"):
            raise InvalidRequest(
                "the model's chat template has no role `tool`", param=f"messages[{idx}].role"
            )
        if not message.tool_calls:
            continue
        if message.role != "assistant" or not template.mentions("tool_calls"):
            reason = "the model's chat template shows none"
            if message.role != "assistant":
                reason = "only the assistant calls tools"
            raise InvalidRequest(f"`tool_calls`: {reason}", param=f"messages[{idx}].tool_calls")


def _with_one_call_each(given: Sequence[ChatMessage]) -> list[tuple[int, ChatMessage]]:
    """Return the messages with their indices, each call in one of its own, before its result."""
    found: list[tuple[int, ChatMessage]] = []
    calls: list[tuple[int, ChatMessage]] = []  # whose results have not come
    for idx, message in enumerate(given):
        if message.role == "tool":
            ids = [each.tool_calls[0].id for _, each in calls if each.tool_calls]
            if message.tool_call_id in ids:
                found.append(calls.pop(ids.index(message.tool_call_id)))
        else:
            found += calls
            calls = []
        if len(message.tool_calls or ()) < 2:
            found.append((idx, message))
            continue
        for call in message.tool_calls or ():
            calls.append((idx, replace(message, tool_calls=[call])))
            message = ChatMessage(role="assistant")
    return found + calls


def _with_one_text(message: ChatMessage) -> ChatMessage:
    """Return a message whose content follows its reasoning there, if it has both and calls."""
    thought, content = message.reasoning_content or message.reasoning, message.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
    if not (message.tool_calls and thought and text):
        return message
    return replace(message, content=None, reasoning_content=f"{thought}\n\n{text}")


def _plain(
    message: ChatMessage, idx: int, *, forms: MessageForms, call_id_chars: int | None
) -> dict[str, Any]:
    """Return the message as templates expect it: texts in a form of `forms`, and no `developer`.

    Of longer ids of calls the end is kept, in the call and in its result. Open models' templates
    call OpenAI's `developer` by its older name, `system`.
    """
    if forms.has_one_text:
        message = _with_one_text(message)
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    is_list = not isinstance(content, str)
    texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
    texts = [text for text in texts if not (is_list and text.startswith(BILLING_PREFIX))]
    plain: dict[str, Any] = {"role": role, "content": forms.content(role, texts, is_list=is_list)}
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_call(call, f"messages[{idx}].tool_calls[{call_idx}]", call_id_chars)
            for call_idx, call in enumerate(message.tool_calls)
        ]
        if forms.calls.has_texts:
            for call, given in zip(plain["tool_calls"], message.tool_calls, strict=True):
                call["function"]["arguments"] = given.function.arguments.strip() or "{}"
    if message.tool_calls and message.content is None:
        del plain["content"]
        plain |= forms.calls.members
    optional = {
        "name": message.name,
        "tool_call_id": _end_of(message.tool_call_id, call_id_chars),
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    plain.update({name: value for name, value in optional.items() if value is not None})
    return plain


def _end_of(call_id: str | None, num_chars: int | None) -> str | None:
    if call_id is None or num_chars is None:
        return call_id
    return call_id[-num_chars:].rjust(num_chars, "0")


def _plain_call(call: ToolCall, param: str, id_chars: int | None) -> dict[str, Any]:
    """Return the call as templates expect it: its arguments are an object, not JSON text."""
    where = f"{param}.function.arguments"
    try:
        arguments = msgspec.json.decode(
            call.function.arguments.strip() or "{}", type=dict[str, Any]
        )
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{where}` is no JSON object: {error}", param=where) from None
    check_depth(arguments, param=where)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": _end_of(call.id, id_chars), "type": call.type, "function": function}


def _continued(
    body: ChatBody,
    messages: list[dict[str, Any]],
    *,
    template: ChatTemplate,
    kwargs: dict[str, Any],
) -> str:
    """Return the prompt up to the end of the last message's text, which the model continues."""
    if body.add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            param="continue_final_message",
        )
    if messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "`continue_final_message` needs the last message to be the assistant's",
            param="continue_final_message",
        )
    if messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "the last message's tool calls have no results", param=f"messages[{len(messages) - 1}]"
        )
    # A mark that no client can foresee shows where the template put the end of the text.
    mark = f"<{secrets.token_hex(16)}>"
    last = {**messages[-1], "content": marked(messages[-1]["content"], after=mark)}
    text = template.render([*messages[:-1], last], add_generation_prompt=False, **kwargs)
    shown, found, _ = text.partition(mark)
    if not found:
        raise InvalidRequest(
            "the model's chat template does not show the last message as it is",
            param="continue_final_message",
        )
    return shown
