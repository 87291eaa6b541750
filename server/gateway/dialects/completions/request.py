"""The body of POST /v1/completions: its fields, and the forms of its prompt.

Long prompts are decoded piece by piece. Knows no sampling and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Raw

from models.text.tokenizer import Tokenizer, text_before
from server.gateway.bodies.decoding import decode, decode_each, decode_pieces
from server.gateway.bodies.fields import ABSENT, Count, Ignored, NumLogprobs, neutral
from server.gateway.bodies.generation import GenerationBody
from server.gateway.dialects.dialect import CheckFewest
from server.gateway.generation.prompts import cut_prompt
from server.gateway.generation.served_model import ServedModel
from topspin.errors import InvalidRequest

MAX_CHOICES_OF_ALL_PROMPTS = 256
_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
PROMPT_SCHEMA: dict[str, object] = {
    "anyOf": [
        _TEXT_SCHEMA,
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": _TEXT_SCHEMA},
        {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
    ]
}
NonEmptyList = Annotated[list[Raw], Meta(min_length=1)]


class CompletionBody(GenerationBody, kw_only=True, frozen=True):
    """POST /v1/completions."""

    # May be long: given_prompts decodes it piece by piece.
    prompt: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    include_reasoning: Ignored[bool] = None
    best_of: Annotated[Raw, neutral(1)] = ABSENT
    suffix: Annotated[Raw, neutral("")] = ABSENT


# A list of numbers, by its first item.
_FLAT_LIST = re.compile(rb"\[\s*[-0-9]")


def given_prompts(
    body: CompletionBody, *, model: ServedModel, check_fewest: CheckFewest
) -> list[str] | list[list[int]]:
    """Return the prompts of a completion request as they were given, at least one.

    Raises InvalidRequest for mixed lists, too many prompts and ids outside the vocabulary.
    `check_fewest` is called before a list is decoded.
    """
    data = bytes(body.prompt)
    items = [body.prompt]
    if data.startswith(b"[") and not _FLAT_LIST.match(data):
        items = decode(body.prompt, NonEmptyList, param="prompt")
    _check_choices(len(items), body.n or 1)
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
        prompts.append(_given_ids(bytes(item), model=model, param=param))
    return prompts


def _given_ids(data: bytes, *, model: ServedModel, param: str) -> list[int]:
    ids: list[int] = []
    for piece in decode_pieces(data, list[Count], param=param):
        model.check_vocabulary(piece, param="prompt")
        ids += piece
    return ids


def completion_prompts(
    body: CompletionBody,
    given: list[str] | list[list[int]],
    *,
    tokenizer: Tokenizer,
    check_fewest: CheckFewest,
) -> list[list[int]]:
    """Return the prompts' tokens; raises InvalidRequest for an empty prompt.

    `check_fewest` is called for each text before any is tokenised.
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
    return [cut_prompt(token_ids, body) for token_ids in prompts]


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


def _check_choices(num_prompts: int, num_choices: int) -> None:
    """Raise InvalidRequest for too many choices, before any prompt is tokenised."""
    if num_prompts * num_choices > MAX_CHOICES_OF_ALL_PROMPTS:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {num_choices} are {num_prompts * num_choices} "
            f"choices; at most {MAX_CHOICES_OF_ALL_PROMPTS} are served in one request",
            param="n",
        )
