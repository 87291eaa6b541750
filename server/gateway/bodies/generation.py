"""The fields that the bodies of OpenAI's older endpoints, chat and completions, have in common.

Other APIs are translated to a chat's. server.gateway.generation.params gives the fields their
meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from server.gateway.bodies.fields import (
    ABSENT,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRINGS,
    BodyFields,
    Count,
    Ignored,
    Name,
    NumLogprobs,
    Object,
    Priority,
    Refused,
    RefusedObject,
    RefusedSwitch,
    StopString,
    neutral,
)
from server.gateway.bodies.sampling_defaults import (
    MinP,
    PositiveCount,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from server.sampling_limits import MAX_BIAS, MAX_PENALTY
from topspin.plan.retrieval import MAX_TOKENS, MIN_TOKENS

MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_STRUCTURED_CHOICES = 4096
MAX_ALLOWED_TOKEN_IDS = 2**14
# Printable ASCII, as in the header.
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=r"^[ -~]*$")]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_STRUCTURED_CHOICES)]


class StreamOptions(BodyFields, kw_only=True, frozen=True):
    """Options of a stream; `include_usage`: a last chunk carries the token counts.

    `continuous_usage_stats`: with `include_usage`, every chunk carries the counts so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored[bool] = None


class KvRetrieval(BodyFields, kw_only=True, frozen=True):
    """How many keys a token of a long context attends to, in place of --kv-retrieval-tokens.

    Not `enabled`: all.
    """

    enabled: bool | None = None
    tokens: Annotated[int, Meta(ge=MIN_TOKENS, le=MAX_TOKENS)] | None = None


class JsonSchemaFormat(BodyFields, kw_only=True, frozen=True):
    """OpenAI's `json_schema`; the answer follows `schema` whether `strict` or not."""

    name: Name
    schema: Raw
    strict: bool | None = None
    description: Ignored[str] = None


class ResponseFormat(BodyFields, kw_only=True, frozen=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @classmethod
    def of_schema(cls, schema: dict[str, Any], *, name: str = "output") -> ResponseFormat:
        """Return the format of JSON that follows `schema`."""
        named = JsonSchemaFormat(name=name, schema=Raw(msgspec.json.encode(schema)))
        return cls(type="json_schema", json_schema=named)


class StructuredOutputs(BodyFields, kw_only=True, frozen=True):
    """vLLM's `structured_outputs`, one of whose fields is given."""

    json: Raw = ABSENT
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None


class GenerationBody(BodyFields, kw_only=True, frozen=True):
    """The fields that chat and plain completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]],
            Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    kv_retrieval: KvRetrieval | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: (
        Annotated[list[Count], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Meta(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None

    # OpenAI's
    metadata: Ignored[Object] = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    service_tier: Ignored[str] = None
    store: Ignored[bool] = None
    user: Ignored[str] = None
    # vLLM's; length_penalty is for beam search, spaces_between_special_tokens for tokenizers
    # without a tokenizer.json.
    length_penalty: Ignored[float] = None
    session_id: Ignored[str] = None
    spaces_between_special_tokens: Ignored[bool] = None
    stream_interval: Ignored[int] = None
    kv_transfer_params: RefusedObject = ABSENT
    logprob_token_ids: Refused = ABSENT
    repetition_detection: Refused = ABSENT
    return_tokens_as_token_ids: RefusedSwitch = ABSENT
    thinking_token_budget: Annotated[Raw, neutral(-1)] = ABSENT
    truncation_side: Annotated[Raw, neutral("left")] = ABSENT
    use_beam_search: RefusedSwitch = ABSENT
    vllm_xargs: RefusedObject = ABSENT
    # llama.cpp's
    cache_prompt: Ignored[bool] = None
    id_slot: Ignored[int] = None
    return_progress: Ignored[bool] = None
    timings_per_token: Ignored[bool] = None
    dry_multiplier: Annotated[Raw, neutral(0)] = ABSENT
    dynatemp_range: Annotated[Raw, neutral(0)] = ABSENT
    grammar: Annotated[Raw, neutral("")] = ABSENT
    json_schema: RefusedObject = ABSENT
    mirostat: Annotated[Raw, neutral(0)] = ABSENT
    n_probs: Annotated[Raw, neutral(0)] = ABSENT
    repeat_penalty: Annotated[Raw, neutral(1)] = ABSENT
    typical_p: Annotated[Raw, neutral(1)] = ABSENT
    xtc_probability: Annotated[Raw, neutral(0)] = ABSENT
