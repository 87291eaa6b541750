"""Answers that follow a grammar behind reasoning, or with it off, do not reason again."""

from __future__ import annotations

from typing import Any

import pytest

from server.gateway.parsing.formats import message_formats
from tests.server.gateway.calls import CHAT, CHAT_BODY, USER, post, prompt_of
from tests.server.gateway.dialects.test_chat_tools import allows
from tests.server.gateway.fakes import FakeEngine, saying, template_of
from topspin.plan.settings import GatewaySection

# As Qwen3's, a hybrid model's: what is off is closed in the prompt.
QWEN3 = (
    "{{ tools | tojson if tools }}{% set reads = ['tool', 'tool_calls', '<tool_call>'] %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# As DeepSeek-V3.1's: only the end is written, and behind a tool's result nothing.
DEEPSEEK = (
    "{{ tools | tojson if tools }}{% set reads = ['tool', 'tool_calls', '<tool_call>'] %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
# As GLM-4.5's: what is off is said to the user and closed in the prompt.
GLM45 = (
    "{{ tools | tojson if tools }}{% for message in messages %}<|{{ message.role }}|>\n"
    "{{ message.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking and "
    "message.role == 'user' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)
# As MiniMax-M2's: the prompt opens the block.
MINIMAX_M2 = (
    "{{ tools | tojson if tools }}{% for message in messages %}]~b]{{ message.role }}\n"
    "{{ message.content }}[e~[\n{% endfor %}{% if add_generation_prompt %}]~b]ai\n<think>\n"
    "{% endif %}"
)
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
FUNCTION = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
STRICT = {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"role": "tool", "content": "3"}


def grammar(
    source: str = QWEN3, *, path: str = CHAT, messages: Any = (USER,), **fields: Any
) -> str:
    """Return the grammar with which the engine is asked to answer."""
    fake = FakeEngine(saying("yes", finish_reason="stop"))
    given = {"input": "hi"} if path == "/v1/responses" else {"messages": list(messages)}
    body = {"model": "tiny", **given, **fields}
    post(path, body, fake, template=template_of(source), max_request_tokens=1000)
    return fake.added[0].sampling.grammar


def test_messages_do_not_reason_unless_they_ask_for_it() -> None:
    def prompt(source: str = QWEN3, **fields: Any) -> str:
        fake = FakeEngine(saying("yes", finish_reason="stop"))
        body = {"model": "tiny", "max_tokens": 5, "messages": [USER], **fields}
        reply = post("/v1/messages", body, fake, template=template_of(source))
        assert "enable_thinking" not in reply.headers.get("x-topspin-ignored", "")
        return prompt_of(fake.added[0])

    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompt().endswith(closed)
    assert prompt(thinking={"type": "disabled"}).endswith(closed)
    for asked in (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"effort": "high"}},
    ):
        assert prompt(**asked).endswith("<|im_start|>assistant\n")
    assert prompt(MINIMAX_M2).endswith("]~b]ai\n<think>\n"), "it has no switch"


def continuing(text: str, **more: str) -> dict[str, Any]:
    return {
        "messages": [USER, {"role": "assistant", "content": text, **more}],
        "continue_final_message": True,
    }


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        (CHOICE, "yes"),
        pytest.param({**TOOLS, "tool_choice": "required"}, CALL, marks=pytest.mark.slow),
        pytest.param(STRICT, f"So: {CALL}", marks=pytest.mark.slow),
    ],
    ids=["choice", "required", "strict"],
)
@pytest.mark.parametrize(
    "off",
    [
        OFF,
        {"reasoning_effort": "none"},
        {**OFF, "messages": [USER, {"role": "assistant", "content": "x"}, TOOL]},
        {**OFF, "add_generation_prompt": False},
        continuing("<think>hm</think>So "),
        continuing("So "),
        continuing("", reasoning_content="hm"),
    ],
    ids=["variable", "effort", "result", "no prompt", "block", "begun", "reasoning"],
)
def test_an_answer_behind_reasoning_does_not_reason_again(
    fields: dict[str, Any], answer: str, off: dict[str, Any]
) -> None:
    made = grammar(**fields, **off)
    assert allows(made, answer)
    assert not allows(made, f"<think>\nhm\n</think>\n\n{answer}")
    assert not allows(made, f"\n<think>hm</think>{answer}")


@pytest.mark.parametrize(
    ("source", "fields", "begins"),
    [
        (QWEN3, {}, "<think>"),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": True}}, "<think>"),
        # Marks in earlier messages are not this answer's.
        (QWEN3, {"messages": [{"role": "user", "content": "is </think> a tag?"}]}, "<think>"),
        (
            QWEN3,
            {"messages": [{"role": "assistant", "content": "", "reasoning": "hm"}, TOOL]},
            "<think>",
        ),
        (DEEPSEEK, {"chat_template_kwargs": {"thinking": True}}, ""),
        (GLM45, {}, "\n<think>"),
        (MINIMAX_M2, {}, ""),
        (QWEN3, continuing("<think>so"), ""),
    ],
)
def test_an_answer_may_reason_where_it_is_not_told_otherwise(
    source: str, fields: dict[str, Any], begins: str
) -> None:
    made = grammar(source, **CHOICE, **fields)
    assert allows(made, f"{begins}\nhm\n</think>\n\nyes")
    assert allows(made, "yes") == bool(begins)


@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        ("glm45", GLM45, "\n<think>hm</think>\nyes"),
        ("glm45", GLM45.replace("<think>", "<th>"), "\n<think>hm</think>\nyes"),
        ("minimax_m2", MINIMAX_M2, "hm\n</think>\n\nyes"),
        ("auto", MINIMAX_M2, "hm\n</think>\n\nyes"),
    ],
)
def test_families_reason_in_the_block_that_their_templates_open(
    name: Any, source: str, text: str
) -> None:
    template = template_of(source)
    formats = message_formats(GatewaySection(reasoning_parser=name), template)
    answer = post(CHAT, CHAT_BODY, FakeEngine(saying(text)), template=template, formats=formats)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


def test_glm_closes_the_block_where_reasoning_is_off() -> None:
    made = grammar(GLM45, **CHOICE, **OFF)
    assert allows(made, "yes")
    assert not allows(made, "\n<think>hm</think>yes")


@pytest.mark.parametrize("messages", [[USER], [USER, TOOL]])
def test_a_template_may_close_what_it_does_not_open(messages: list[dict[str, str]]) -> None:
    off = {"chat_template_kwargs": {"thinking": False}}
    made = grammar(DEEPSEEK, messages=messages, **off, **CHOICE)
    assert allows(made, "no")
    assert not allows(made, "<think>hm</think>no")


def test_so_it_is_in_every_api() -> None:
    form = {"type": "json_schema", "schema": FUNCTION["parameters"]}
    named = {"text": {"format": {**form, "name": "x"}}, "reasoning": {"effort": "none"}}
    thinks_not = {"thinking": {"type": "disabled"}, "max_tokens": 9}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", named),
        ("/v1/messages", {"output_config": {"format": form}, **thinks_not}),
    ]
    for path, fields in asked:
        made = grammar(path=path, **fields)
        assert allows(made, '{"a": 1}'), path
        assert not allows(made, '<think>hm</think>{"a": 1}'), path
