"""Bad requests with their exact errors: the table of tests/server/gateway/test_errors.py.

A row's fields replace those of a good body. The served model, `tiny`, takes 100 tokens.
"""

from __future__ import annotations

from tests.server.gateway.bad_completions import COMPLETION_ROWS
from tests.server.gateway.bad_tools import RESPONSES, RESPONSES_BODY, RESPONSES_ROWS, TOOL_ROWS
from tests.server.gateway.calls import CHAT, CHAT_BODY, OTHER_MODEL, PLAIN, PLAIN_BODY, USER, Bad

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GOOD: dict[str, dict[str, object]] = {
    PLAIN: PLAIN_BODY,
    CHAT: CHAT_BODY,
    RESPONSES: RESPONSES_BODY,
    TOKENIZE: {},
    DETOKENIZE: {},
}

CHAT_ROWS = [
    Bad(CHAT, {"messages": []}, "messages", "`messages`: Expected `array` of length >= 1"),
    Bad(
        CHAT,
        {"messages": [USER] * 10_001},
        "messages",
        "`messages`: Expected `array` of length <= 10000",
    ),
    Bad(CHAT, {"messages": None}, "messages", "`messages`: Expected `array`, got `null`"),
    Bad(CHAT, {"messages": ["hi"]}, "messages[0]", "`messages[0]`: Expected `object`, got `str`"),
    Bad(
        CHAT,
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "missing required field `messages[0].content`",
    ),
    Bad(
        CHAT,
        {"messages": [{"content": "x"}]},
        "messages[0].role",
        "missing required field `messages[0].role`",
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
        {"messages": [{**USER, "colour": "red"}]},
        "messages[0].colour",
        "unknown or unsupported field `messages[0].colour`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "tool_calls": [{"id": 1}]}]},
        "messages[0].tool_calls[0].id",
        "`messages[0].tool_calls[0].id`: Expected `str | null`, got `int`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "content of type `image_url` is not supported, only `text`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "a text part needs `text`",
    ),
    Bad(
        CHAT,
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens",
        "`max_tokens` is 5 but `max_completion_tokens` is 6; give one of them",
    ),
    Bad(CHAT, {"top_logprobs": 2}, "top_logprobs", "`top_logprobs` needs `logprobs` to be true"),
    Bad(
        CHAT,
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "`top_logprobs`: Expected `int` <= 20",
    ),
    Bad(CHAT, {"logprobs": 1}, "logprobs", "`logprobs`: Expected `bool | null`, got `int`"),
    Bad(
        CHAT,
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "`prompt_logprobs` is not available in a stream",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"a": [1]}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: Expected `bool | int | float | str | null`, got `array`",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"messages": "x"}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: `messages` may not be set by a request",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"tools": "x"}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: `tools` may not be set by a request",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"bos_token": "x"}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: `bos_token` may not be set by a request",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"_x": 1}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: `_x` may not be set by a request",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"not a name": 1}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: `not a name` may not be set by a request",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"range": 1}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: `range` may not be set by a request",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {"a": 2**31}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: Expected `int` <= 2147483647",
    ),
    Bad(
        CHAT,
        {"chat_template_kwargs": {f"k{i}": i for i in range(33)}},
        "chat_template_kwargs",
        "`chat_template_kwargs`: Expected `object` of length <= 32",
    ),
    Bad(
        CHAT,
        {"continue_final_message": True},
        "continue_final_message",
        "`continue_final_message` needs the last message to be the assistant's",
    ),
    Bad(
        CHAT,
        {
            "messages": [{"role": "assistant", "content": "so"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
        "`continue_final_message` and `add_generation_prompt` exclude each other",
    ),
    Bad(CHAT, {"echo": True}, "echo", "`echo` is not supported by this server"),
    Bad(CHAT, {"best_of": 2}, "best_of", "unknown or unsupported field `best_of`"),
    Bad(CHAT, {"prompt": "a"}, "prompt", "unknown or unsupported field `prompt`"),
    Bad(CHAT, {"model": "other"}, "model", OTHER_MODEL, "model_not_found", 404),
    Bad(CHAT, {"messages": "hi"}, "messages", "`messages`: Expected `array`, got `str`"),
    Bad(
        CHAT,
        {"messages": [USER, None]},
        "messages[1]",
        "`messages[1]`: Expected `object`, got `null`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "role": "robot"}]},
        "messages[0].role",
        "`messages[0].role`: Invalid enum value 'robot'",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "name": ""}]},
        "messages[0].name",
        "`messages[0].name`: Expected `str` of length >= 1",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": 5}]},
        "messages[0].content",
        "`messages[0].content`: Expected `str | array | null`, got `int`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": [{"text": "x"}]}]},
        "messages[0].content[0].type",
        "missing required field `messages[0].content[0].type`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "audio": {"id": "a"}}]},
        "messages[0].audio",
        "`messages[0].audio` is not supported by this server",
    ),
    Bad(
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "missing required field `messages[0].tool_calls[0].function.arguments`",
    ),
    Bad(
        CHAT,
        {"messages": [{**USER, "content": "hello " * 10_000}]},
        "messages",
        "the prompt has at least 5002 tokens; this server takes at most 100 tokens, prompt and "
        "output together, and at least one is output",
        "context_length_exceeded",
    ),
    Bad(
        CHAT,
        {"reasoning_effort": ""},
        "reasoning_effort",
        "`reasoning_effort`: Expected `str` of length >= 1",
    ),
    Bad(
        CHAT,
        {"add_generation_prompt": "no"},
        "add_generation_prompt",
        "`add_generation_prompt`: Expected `bool | null`, got `str`",
    ),
    Bad(
        CHAT,
        {"modalities": ["audio"]},
        "modalities",
        "`modalities` is not supported by this server",
    ),
    Bad(CHAT, {"documents": [{}]}, "documents", "`documents` is not supported by this server"),
    Bad(
        CHAT,
        {"max_completion_tokens": -1},
        "max_completion_tokens",
        "`max_completion_tokens`: Expected `int` >= 0",
    ),
]

TOKENIZE_ROWS = [
    Bad(TOKENIZE, {}, "prompt", "one of `prompt` and `messages` is needed"),
    Bad(TOKENIZE, {"prompt": 5}, "prompt", "`prompt`: Expected `str | null`, got `int`"),
    Bad(TOKENIZE, {"prompt": None}, "prompt", "one of `prompt` and `messages` is needed"),
    Bad(
        TOKENIZE,
        {"prompt": "a", "messages": [USER]},
        "messages",
        "`messages` does not go with `prompt`",
    ),
    Bad(TOKENIZE, {"prompt": "a", "tools": []}, "tools", "`tools` does not go with `prompt`"),
    Bad(TOKENIZE, {"prompt": "a", "text": "b"}, "text", "unknown or unsupported field `text`"),
    Bad(TOKENIZE, {"prompt": "a", "model": "other"}, "model", OTHER_MODEL, "model_not_found", 404),
    Bad(
        TOKENIZE,
        {"prompt": "a", "return_token_strs": 1},
        "return_token_strs",
        "`return_token_strs`: Expected `bool | null`, got `int`",
    ),
    Bad(TOKENIZE, {"messages": []}, "messages", "`messages`: Expected `array` of length >= 1"),
    Bad(
        TOKENIZE,
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "missing required field `messages[0].content`",
    ),
    Bad(
        TOKENIZE,
        {"messages": [USER], "chat_template": "x"},
        "chat_template",
        "`chat_template` is not supported by this server",
    ),
    Bad(
        TOKENIZE,
        {"messages": [USER], "add_generation_prompt": 1},
        "add_generation_prompt",
        "`add_generation_prompt`: Expected `bool | null`, got `int`",
    ),
    Bad(
        TOKENIZE,
        {"messages": [USER], "continue_final_message": True},
        "continue_final_message",
        "`continue_final_message` needs the last message to be the assistant's",
    ),
]

DETOKENIZE_ROWS = [
    Bad(DETOKENIZE, {}, "tokens", "missing required field `tokens`"),
    Bad(DETOKENIZE, {"tokens": "a"}, "tokens", "`tokens`: Expected `array`, got `str`"),
    Bad(DETOKENIZE, {"tokens": None}, "tokens", "`tokens`: Expected `array`, got `null`"),
    Bad(DETOKENIZE, {"tokens": [-1]}, "tokens[0]", "`tokens[0]`: Expected `int` >= 0"),
    Bad(DETOKENIZE, {"tokens": [1.5]}, "tokens[0]", "`tokens[0]`: Expected `int`, got `float`"),
    Bad(DETOKENIZE, {"tokens": [1, "a"]}, "tokens[1]", "`tokens[1]`: Expected `int`, got `str`"),
    Bad(
        DETOKENIZE,
        {"tokens": [10**6]},
        "tokens",
        "`tokens`: token id 1000000 is outside the vocabulary of 265",
    ),
    Bad(
        DETOKENIZE,
        {"tokens": [1] * (2**18 + 1)},
        "tokens",
        "`tokens`: Expected `array` of length <= 262144",
    ),
    Bad(
        DETOKENIZE, {"tokens": [1], "model": "other"}, "model", OTHER_MODEL, "model_not_found", 404
    ),
    Bad(DETOKENIZE, {"tokens": [1], "skip": True}, "skip", "unknown or unsupported field `skip`"),
]

ROWS = [
    *COMPLETION_ROWS,
    *CHAT_ROWS,
    *TOOL_ROWS,
    *RESPONSES_ROWS,
    *TOKENIZE_ROWS,
    *DETOKENIZE_ROWS,
]
