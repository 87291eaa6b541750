"""A tokenizer and a chat template for tests of answers in channels.

The template is ours; it asks of Jinja what gpt-oss' does, and refuses what that refuses.
"""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken

from models.text.tokenizer import Tokenizer
from server.gateway.parsing.channels import MARKS
from tests.server.gateway.fakes import backend

TEMPLATE = """
{%- macro type_of(schema) -%}
    {%- if schema.enum is defined -%}
        {{- schema.enum | map("tojson") | join(" | ") -}}
    {%- elif schema.type == "array" -%}
        {{- type_of(schema["items"] or {}) + "[]" -}}
    {%- elif schema.type == "object" and schema.properties -%}
        {{- "{" -}}
        {%- for name, each in schema.properties.items() -%}
            {{- name + ("" if name in (schema.required or []) else "?") + ": " -}}
            {{- type_of(each) + ("" if loop.last else ", ") -}}
        {%- endfor -%}
        {{- "}" -}}
    {%- elif schema.type is sequence and schema.type is not string -%}
        {%- for each in schema.type -%}
            {{- type_of({"type": each}) + ("" if loop.last else " | ") -}}
        {%- endfor -%}
    {%- else -%}
        {{- {"integer": "number", "object": "object"}.get(schema.type, schema.type or "any") -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro system() -%}
    {{- (model_identity if model_identity is defined else "You help.") + "\n" -}}
    {{- "Today: " + strftime_now("%Y-%m-%d") + "\n" -}}
    {{- "Effort: " + (reasoning_effort if reasoning_effort is defined else "medium") -}}
    {%- if builtin_tools is defined and "python" in builtin_tools %}{{ "\nHas python" }}{% endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>" -}}{{- system() -}}{{- "<|end|>" -}}
{%- set has_words = messages[0].role == "system" -%}
{%- set rest = messages[1:] if has_words else messages -%}
{%- if has_words or tools -%}
    {{- "<|start|>developer<|message|>" -}}
    {%- if has_words %}{{ messages[0].content }}{% endif -%}
    {%- for tool in tools or [] -%}
        {%- set function = tool.function -%}
        {{- "\n// " + (function.description or "") + "\ntype " + function.name + " = (" -}}
        {{- type_of(function.parameters) if function.parameters else "" -}}{{- ") => any;" -}}
    {%- endfor -%}
    {{- "<|end|>" -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in rest -%}
    {%- if message.role == "tool" -%}
        {%- if last.name is none %}{{ raise_exception("a result without a call") }}{% endif -%}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" -}}
        {{- message.content | tojson + "<|end|>" -}}
    {%- elif message.role == "assistant" and "tool_calls" in message -%}
        {%- if message.content and message.thinking -%}
            {{- raise_exception("content and thinking beside a call") -}}
        {%- endif -%}
        {%- set thought = message.content or message.thinking -%}
        {%- if thought -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" -}}
        {%- endif -%}
        {%- set function = message.tool_calls[0].function -%}
        {%- set last.name = function.name -%}
        {{- "<|start|>assistant to=functions." + function.name + "<|channel|>commentary json" -}}
        {{- "<|message|>" + function.arguments | tojson + "<|call|>" -}}
    {%- elif message.role == "assistant" -%}
        {%- if "thinking" in message and loop.last and not add_generation_prompt -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking -}}
            {{- "<|end|>" -}}
        {%- endif -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content -}}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
    {%- else -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif -%}
"""
THOUGHT = "<|channel|>analysis<|message|>hm"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'


@cache
def marked_backend() -> tokenizers.Tokenizer:
    """Return the tests' tokenizer, with the marks of channels as special tokens."""
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return made


@cache
def marked_tokenizer() -> Tokenizer:
    """Return the same as the gateway loads it."""
    return Tokenizer(marked_backend(), special_tokens={"eos_token": "<|return|>"}, source="test")
