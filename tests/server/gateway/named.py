"""Calls that name a function before a JSON object, as models' chat templates show them."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = ("deepseek_v3", "deepseek_v31", "kimi_k2")
# Of each format: what stands around the calls, and between two of them.
_AROUND = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
}


def written_section(name: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return the text of a message with these functions and their arguments."""
    begin, between, end = _AROUND[name]
    return begin + between.join(bare_calls(name, calls)) + end


def bare_calls(name: str, calls: Sequence[tuple[str, str]]) -> list[str]:
    """Return the text of each call, without what stands around all."""
    match name:
        case "deepseek_v3":
            form = (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
            )
        case "deepseek_v31":
            form = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        case _:
            form = (
                "<|tool_call_begin|>functions.{}:{idx}<|tool_call_argument_begin|>{}"
                "<|tool_call_end|>"
            )
    return [form.format(*call, idx=idx) for idx, call in enumerate(calls)]
