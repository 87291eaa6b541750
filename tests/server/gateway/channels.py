"""A tokenizer and a chat template for tests of answers in channels.

The template is ours; it asks of Jinja what gpt-oss' does, and refuses what that refuses.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from models.text.tokenizer import Tokenizer
from server.gateway.parsing.channels import MARKS
from tests.server.gateway.fakes import backend

TEMPLATE = Path(__file__).with_name("channels.jinja").read_text()
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
