"""Bad requests with tools, and to /v1/responses: a part of the table of bad_requests.py."""

from __future__ import annotations

from tests.server.gateway.calls import CHAT, Bad

RESPONSES = "/v1/responses"
RESPONSES_BODY: dict[str, object] = {"model": "tiny", "input": "hi"}
NAMED = {"type": "function", "function": {"name": "f"}}

TOOL_ROWS = [
    Bad(
        CHAT,
        {"tools": [{"type": "function"}]},
        "tools[0].function",
        "missing required field `tools[0].function`",
    ),
    Bad(
        CHAT,
        {"tools": [{"function": {"name": "a b"}}]},
        "tools[0].function.name",
        "`tools[0].function.name`: Expected `str` matching regex '^[a-zA-Z0-9_.:-]+$'",
    ),
    Bad(
        CHAT,
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "tools[0].type",
        "`tools[0].type`: Invalid enum value 'custom'",
    ),
    Bad(CHAT, {"tools": [NAMED]}, "tools", "the model's chat template shows no tools"),
    Bad(
        CHAT,
        {"tools": [{"function": {"name": "f", "parameters": [1]}}]},
        "tools[0].function.parameters",
        "`tools[0].function.parameters`: Expected `object | null`, got `array`",
    ),
    Bad(CHAT, {"tool_choice": "required"}, "tool_choice", "`tool_choice` needs `tools`"),
    Bad(CHAT, {"tool_choice": "any"}, "tool_choice", "`tool_choice`: Invalid enum value 'any'"),
    Bad(
        CHAT,
        {"tool_choice": {"type": "function"}},
        "tool_choice.function",
        "missing required field `tool_choice.function`",
    ),
    Bad(
        CHAT,
        {"functions": [{"name": "f"}]},
        "functions",
        "`functions` is not supported by this server",
    ),
    Bad(
        CHAT,
        {"function_call": {"name": "f"}},
        "function_call",
        "`function_call` is not supported by this server",
    ),
    Bad(
        CHAT,
        {"report_prefix_cache": True, "truncate_prompt_tokens": 5},
        "report_prefix_cache",
        "`report_prefix_cache` and `truncate_prompt_tokens` exclude each other",
    ),
    Bad(CHAT, {"priority": 0.5}, "priority", "`priority`: Expected `int | null`, got `float`"),
    Bad(CHAT, {"documents": [{}]}, "documents", "`documents` is not supported by this server"),
]

RESPONSES_ROWS = [
    Bad(
        RESPONSES,
        {"input": [{"role": "user", "content": "hi"}] * 10_001},
        "input",
        "`input`: Expected `array` of length <= 10000",
    ),
    Bad(RESPONSES, {"input": None}, "input", "`input`: Expected `array`, got `null`"),
    Bad(RESPONSES, {"input": []}, "input", "`input`: Expected `array` of length >= 1"),
    Bad(RESPONSES, {"input": 5}, "input", "`input`: Expected `array`, got `int`"),
    Bad(
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input[0].type",
        "`input[0].type`: Invalid value 'item_reference'",
    ),
    Bad(
        RESPONSES,
        {"input": [{"type": "message", "role": "user"}]},
        "input[0].content",
        "missing required field `input[0].content`",
    ),
    Bad(
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "`input[0].content[0].type`: Invalid enum value 'input_image'",
    ),
    Bad(
        RESPONSES,
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
        "`tools[0].type`: Invalid enum value 'web_search'",
    ),
    Bad(
        RESPONSES,
        {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
        "tools",
        "the model's chat template shows no tools",
    ),
    Bad(RESPONSES, {"tool_choice": "required"}, "tool_choice", "`tool_choice` needs `tools`"),
    Bad(
        RESPONSES,
        {"background": True},
        "background",
        "`background` is not supported by this server",
    ),
    Bad(
        RESPONSES,
        {"conversation": "c"},
        "conversation",
        "`conversation` is not supported by this server",
    ),
    Bad(
        RESPONSES,
        {"truncation": "auto"},
        "truncation",
        "`truncation` is not supported by this server",
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
    Bad(RESPONSES, {"n": 2}, "n", "unknown or unsupported field `n`"),
    Bad(
        RESPONSES,
        {"max_output_tokens": 0},
        "max_output_tokens",
        "`max_output_tokens`: Expected `int` >= 1",
    ),
    Bad(RESPONSES, {"metadata": {"a": 1}}, "metadata", "`metadata`: Expected `str`, got `int`"),
    Bad(RESPONSES, {"temperature": 3}, "temperature", "`temperature`: Expected `float` <= 2.0"),
]
