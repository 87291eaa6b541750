"""Requests that break a rule which no schema tells, and the errors that say which.

A row's fields replace those of a good body. The served model, `tiny`, takes 100 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.server.gateway.calls import CHAT, CHAT_BODY, PLAIN, PLAIN_BODY, USER

RESPONSES, TOKENIZE, DETOKENIZE = "/v1/responses", "/tokenize", "/detokenize"
GOOD: dict[str, dict[str, object]] = {
    PLAIN: PLAIN_BODY,
    CHAT: CHAT_BODY,
    RESPONSES: {"model": "tiny", "input": "hi"},
    TOKENIZE: {},
    DETOKENIZE: {},
}


class Bad(NamedTuple):
    """A request's path and fields, and the error's `param`, `message`, `code` and status."""

    path: str
    fields: dict[str, object]
    param: str
    message: str
    code: str | None = None
    status: int = 400


FORMS = "`prompt` is neither a string nor a list of only strings, token ids or lists of these"
NO_RETRIEVAL = (
    "`kv_retrieval`: this server attends to all keys; it was started without --kv-retrieval-tokens"
)
SCORES = (
    "396 prompt tokens, n = 64 and 20 candidates beside each token are 532224 log-probabilities "
    "of prompts; an answer has at most 524288"
)
OTHER_MODEL = "the model `other` is not served here"
NO_TOOLS = "the model's chat template shows no tools"
NO_TEXT = "content of type `image_url` is not supported, only `text`"
NOT_ASSISTANT = "`continue_final_message` needs the last message to be the assistant's"
BOTH_ENDS = "`continue_final_message` and `add_generation_prompt` exclude each other"
BOTH_CUT = "`report_prefix_cache` and `truncate_prompt_tokens` exclude each other"
OUTSIDE = "token id 1000000 is outside the vocabulary of 265"
TOO_LONG = "prompt and output together"
LONG = "context_length_exceeded"
ASSISTANT = {"role": "assistant", "content": "so"}
NAMED = {"type": "function", "function": {"name": "f"}}
FOUR = [[1] * 99] * 4

ROWS = [
    Bad(PLAIN, {"prompt": ""}, "prompt", "a prompt is empty"),
    Bad(PLAIN, {"prompt": [[1], []]}, "prompt", "a prompt is empty"),
    Bad(PLAIN, {"prompt": ["a", 1]}, "prompt", FORMS),
    Bad(PLAIN, {"prompt": [[1], "a"]}, "prompt", FORMS),
    Bad(PLAIN, {"prompt": [10**6]}, "prompt", f"`prompt`: {OUTSIDE}"),
    Bad(PLAIN, {"prompt": [1, "a"]}, "prompt[1]", "`prompt[1]`: Expected `int`, got `str`"),
    Bad(PLAIN, {"prompt": [[1], [2, -1]]}, "prompt[1][1]", "`prompt[1][1]`: Expected `int` >= 0"),
    Bad(
        PLAIN,
        {"n": 128, "prompt": ["a", "b", "c"]},
        "n",
        "3 prompts with n = 128 are 384 choices; at most 256 are served in one request",
    ),
    Bad(PLAIN, {"logit_bias": {"-1": 1}}, "logit_bias", "`logit_bias`: a token id is negative"),
    Bad(PLAIN, {"logit_bias": {"1000000": 1}}, "logit_bias", f"`logit_bias`: {OUTSIDE}"),
    Bad(PLAIN, {"logit_bias": {"x": 1}}, "logit_bias", "`logit_bias`: Expected `int`, got `str`"),
    Bad(PLAIN, {"stop_token_ids": [10**6]}, "stop_token_ids", f"`stop_token_ids`: {OUTSIDE}"),
    Bad(PLAIN, {"min_tokens": 17}, "min_tokens", "`min_tokens` 17 is more than the 16 tokens"),
    Bad(PLAIN, {"kv_retrieval": {"tokens": 64}}, "kv_retrieval", NO_RETRIEVAL),
    Bad(PLAIN, {"kv_retrieval": {"enabled": True}}, "kv_retrieval", NO_RETRIEVAL),
    Bad(
        PLAIN,
        {"kv_retrieval": {"enabled": False, "tokens": 64}},
        "kv_retrieval",
        "`kv_retrieval`: `tokens` has no meaning if `enabled` is false",
    ),
    Bad(
        PLAIN,
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "`stream_options` needs `stream` to be true",
    ),
    Bad(
        PLAIN,
        {"prompt_logprobs": 0, "stream": True},
        "prompt_logprobs",
        "`prompt_logprobs` is not available in a stream",
    ),
    Bad(
        PLAIN,
        {"prompt": FOUR, "prompt_logprobs": 20, "n": 64},
        "prompt_logprobs",
        f"`prompt_logprobs`: {SCORES}",
    ),
    Bad(PLAIN, {"prompt": FOUR, "echo": True, "logprobs": 20, "n": 64}, "logprobs", SCORES),
    Bad(PLAIN, {"suffix": "end" * 10**5}, "suffix", "`suffix` is not supported by this server"),
    Bad(PLAIN, {"f" * 1000: 1}, "f" * 61 + "...", "unknown or unsupported field `fff"),
    Bad(PLAIN, {"model": "other"}, "model", OTHER_MODEL, "model_not_found", 404),
    Bad(PLAIN, {"model": "m" * 99}, "model", "m" * 61 + "...`", "model_not_found", 404),
    Bad(PLAIN, {"prompt": [1] * 101, "max_tokens": 0}, "prompt", TOO_LONG, LONG),
    Bad(
        PLAIN,
        {"prompt": [1] * 60, "max_tokens": 41},
        "prompt",
        "60 prompt tokens and 41 requested output tokens are 101 together; this server takes "
        "at most 100",
        LONG,
    ),
    Bad(
        CHAT,
        {"messages": [USER, {"role": "tool", "content": "x"}]},
        "messages[1].role",
        "the model's chat template has no role `tool`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": None}]},
        "messages[0].content",
        "missing required field `messages[0].content`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        NO_TEXT,
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "a text part needs `text`",
    ),
    Bad(CHAT, {"messages": [{**USER, "content": "hello " * 10_000}]}, "messages", TOO_LONG, LONG),
    Bad(
        CHAT,
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "`max_tokens` is 5 but `max_completion_tokens` is 6; give one of them",
    ),
    Bad(CHAT, {"top_logprobs": 2}, "top_logprobs", "`top_logprobs` needs `logprobs` to be true"),
    Bad(CHAT, {"continue_final_message": True}, "continue_final_message", NOT_ASSISTANT),
    Bad(
        CHAT,
        {
            "messages": [ASSISTANT],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
        BOTH_ENDS,
    ),
    Bad(
        CHAT,
        {"report_prefix_cache": True, "truncate_prompt_tokens": 5},
        "report_prefix_cache",
        BOTH_CUT,
    ),
    Bad(CHAT, {"tools": [NAMED]}, "tools", NO_TOOLS),
    Bad(CHAT, {"tool_choice": "required"}, "tool_choice", "`tool_choice` needs `tools`"),
    *(
        Bad(
            CHAT,
            {"chat_template_kwargs": {name: 1}},
            "chat_template_kwargs",
            f"`chat_template_kwargs`: `{name}` may not be set by a request",
        )
        for name in ("messages", "tools", "bos_token", "_x", "not a name", "range")
    ),
    Bad(
        RESPONSES,
        {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
        "tools",
        NO_TOOLS,
    ),
    Bad(
        RESPONSES,
        {"top_logprobs": 2},
        "top_logprobs",
        '`top_logprobs` needs "message.output_text.logprobs" in `include`',
    ),
    Bad(
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "`text.format` needs a `schema`",
    ),
    Bad(TOKENIZE, {}, "prompt", "one of `prompt` and `messages` is needed"),
    Bad(
        TOKENIZE,
        {"prompt": "a", "messages": [USER]},
        "messages",
        "`messages` does not go with `prompt`",
    ),
    Bad(
        TOKENIZE,
        {"messages": [USER], "continue_final_message": True},
        "continue_final_message",
        NOT_ASSISTANT,
    ),
    Bad(TOKENIZE, {"prompt": "a", "model": "other"}, "model", OTHER_MODEL, "model_not_found", 404),
    Bad(DETOKENIZE, {"tokens": [1] * (2**18 + 1)}, "tokens", "`array` of length <= 262144"),
    Bad(DETOKENIZE, {"tokens": [10**6]}, "tokens", f"`tokens`: {OUTSIDE}"),
]
