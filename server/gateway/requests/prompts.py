"""Conversion of messages or text to prompt tokens.

Owns the use of the chat template (the variables that a client may set, the form of earlier
answers, the continuation of the last message) and the forms of a completion's prompt.
Knows no sampling and no HTTP; server.gateway.handler calls it, for large bodies in a worker
thread.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from models.text.chat_template import ChatTemplate, may_set
from models.text.message_forms import MessageForms, marked, text_of
from models.text.tokenizer import Tokenizer, text_before
from server.gateway.answers.cache_report import PromptMap
from server.gateway.errors import truncated
from server.gateway.requests.decoding import check_depth, decode, decode_each, decode_pieces
from server.gateway.requests.params import check_choices, check_vocabulary
from server.gateway.requests.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Count,
    NonEmptyList,
    ToolCall,
)
from server.sampling_limits import MAX_BAD_WORD_TOKENS
from topspin.errors import InvalidRequest

# Some agents' first system block has a number that changes with each request, for their billing.
# It means nothing to a model, and would make every prompt differ from its first tokens on.
BILLING_PREFIX = "x-anthropic-billing-header"
# The variables by which templates let requests turn reasoning off.
_REASONING_SWITCHES = frozenset({"enable_thinking", "thinking"})
# A list of numbers, by its first item.
_FLAT_LIST = re.compile(rb"\[\s*[-0-9]")


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
    template: ChatTemplate,
    tokenizer: Tokenizer,
    check_fewest: Callable[[int], None],
    tools: Sequence[Mapping[str, object]] | None = None,
    call_id_chars: int | None = None,
) -> ChatPrompt:
    """Return the prompt of a chat request with these messages and tools; raises InvalidRequest.

    `call_id_chars`: the length of the ids of calls that the template takes. `check_fewest` is
    called with a lower bound of its tokens before the text is tokenised.
    """
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if not may_set(name):
            raise InvalidRequest(
                f"`chat_template_kwargs`: `{truncated(name, 64)}` may not be set by a request",
                param="chat_template_kwargs",
            )
    kwargs = reasoning_variables(body, template) | kwargs
    _check_tool_use(given, template)
    messages = [
        _plain(message, idx, forms=template.forms, call_id_chars=call_id_chars)
        for idx, message in enumerate(given)
    ]
    if tools is not None:
        kwargs["tools"] = tools
    if body.continue_final_message:
        text = _continued(body, messages, template=template, kwargs=kwargs)
    else:
        text = template.render(
            messages, add_generation_prompt=body.add_generation_prompt is not False, **kwargs
        )
    if body.truncate_prompt_tokens is None:
        check_fewest(tokenizer.fewest_tokens(text))
    # The template writes the special tokens itself.
    token_ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    if not token_ids:
        raise InvalidRequest("the messages give an empty prompt", param="messages")
    places = None
    if body.report_prefix_cache:
        if body.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "`report_prefix_cache` and `truncate_prompt_tokens` exclude each other",
                param="report_prefix_cache",
            )
        places = PromptMap(text=text, begins=_begins(messages, template=template, kwargs=kwargs))
    continued = text_of(messages[-1]["content"]) if body.continue_final_message else ""
    is_off = any(kwargs.get(name) is False for name in _REASONING_SWITCHES & template.options)
    return ChatPrompt(
        _last(token_ids, body.truncate_prompt_tokens), text, places, continued, is_off
    )


def _begins(
    messages: Sequence[Mapping[str, Any]], *, template: ChatTemplate, kwargs: dict[str, Any]
) -> list[tuple[int, int, str]]:
    """Return where each message's content begins in the prompt, its index and role.

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


def reasoning_variables(body: ChatBody, template: ChatTemplate) -> dict[str, str | bool]:
    """Return the variables that `reasoning_effort` sets, without those the template ignores."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    values: dict[str, str | bool] = {
        "reasoning_effort": effort,
        "enable_thinking": effort != "none",
    }
    return {name: value for name, value in values.items() if template.mentions(name)}


def given_prompts(
    body: CompletionBody, *, vocab_size: int, check_fewest: Callable[[int], None]
) -> list[str] | list[list[int]]:
    """Return the prompts of a completion request as they were given, at least one.

    Raises InvalidRequest for mixed lists, too many prompts and ids outside the vocabulary.
    `check_fewest` is called
    with a lower bound of the tokens in a list before that is decoded.
    """
    data = bytes(body.prompt)
    items = [body.prompt]
    if data.startswith(b"[") and not _FLAT_LIST.match(data):
        items = decode(body.prompt, NonEmptyList, param="prompt")
    check_choices(len(items), body.n or 1)
    kinds = {bytes(item)[:1] for item in items}
    if kinds == {b'"'}:
        return decode_each(items, str, param="prompt")
    if kinds != {b"["}:
        raise InvalidRequest(
            "`prompt` is neither a string nor a list of only strings, token ids or lists of these",
            param="prompt",
        )
    prompts = []
    for idx, item in enumerate(items):
        if body.truncate_prompt_tokens is None:
            check_fewest(bytes(item).count(b",") + 1)
        param = "prompt" if item is body.prompt else f"prompt[{idx}]"
        prompts.append(_given_ids(bytes(item), vocab_size=vocab_size, param=param))
    return prompts


def _given_ids(data: bytes, *, vocab_size: int, param: str) -> list[int]:
    ids: list[int] = []
    for piece in decode_pieces(data, list[Count], param=param):
        check_vocabulary(piece, vocab_size=vocab_size, param="prompt")
        ids += piece
    return ids


def completion_prompts(
    body: CompletionBody,
    given: list[str] | list[list[int]],
    *,
    tokenizer: Tokenizer,
    check_fewest: Callable[[int], None],
) -> list[list[int]]:
    """Return the prompts' tokens; raises InvalidRequest for an empty prompt.

    `check_fewest` is called with a lower bound of a text's tokens before any is tokenised.
    """
    for text in given:
        if isinstance(text, str) and body.truncate_prompt_tokens is None:
            check_fewest(tokenizer.fewest_tokens(text))
    special = body.add_special_tokens is not False
    prompts = [
        tokenizer.encode(each, add_special_tokens=special) if isinstance(each, str) else each
        for each in given
    ]
    if not all(prompts):
        raise InvalidRequest("a prompt is empty", param="prompt")
    return [_last(token_ids, body.truncate_prompt_tokens) for token_ids in prompts]


def echoes(
    body: CompletionBody,
    given: list[str] | list[list[int]],
    prompts: Sequence[list[int]],
    *,
    tokenizer: Tokenizer,
) -> list[str]:
    """Return what `echo` shows of each prompt: the text as given, or that of the tokens."""
    texts = [text for text in given if isinstance(text, str)]
    if texts and body.truncate_prompt_tokens is None:
        return texts
    if body.max_tokens == 0:
        return [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    skips = body.skip_special_tokens is not False
    return [text_before(tokenizer, ids, skip_special_tokens=skips) for ids in prompts]


def bad_word_tokens(
    words: Sequence[str] | None, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must not come out, as vLLM takes them.

    Of each word the tokens at the beginning of a text and, if a space before it only changes its
    first token, those in the middle of one.
    """
    sequences: list[tuple[int, ...]] = []
    for idx, word in enumerate(words or ()):
        bare = word.lstrip()
        first, spaced = (
            tuple(tokenizer.encode(each, add_special_tokens=False)) for each in (bare, " " + bare)
        )
        if not 1 <= len(first) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"`bad_words[{idx}]` has {len(first)} tokens: 1 to {MAX_BAD_WORD_TOKENS} are "
                "possible",
                param=f"bad_words[{idx}]",
            )
        sequences.append(first)
        if len(spaced) == len(first) and spaced[0] != first[0]:
            sequences.append(spaced)
    return tuple(sequences)


def _last(token_ids: list[int], num_tokens: int | None) -> list[int]:
    """Return the last `num_tokens` ids; None: all."""
    return token_ids if num_tokens is None else token_ids[-num_tokens:]


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


def _plain(
    message: ChatMessage, idx: int, *, forms: MessageForms, call_id_chars: int | None
) -> dict[str, Any]:
    """Return the message as templates expect it: texts in a form of `forms`, and no `developer`.

    Of longer ids of calls the end is kept, in the call and in its result. Open models' templates
    call OpenAI's `developer` by its older name, `system`.
    """
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
    if message.tool_calls and message.content is None:
        del plain["content"]
        plain |= forms.calls.members
        if forms.calls.has_texts:
            for call, given in zip(plain["tool_calls"], message.tool_calls, strict=True):
                call["function"]["arguments"] = given.function.arguments
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
