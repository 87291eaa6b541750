"""Fields that the bodies of OpenAI's endpoints have in common, and other servers' names of them.

Other APIs are translated to a chat's. server.gateway.generation.params gives the fields their
meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

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
    Object,
    Priority,
    Refused,
    RefusedObject,
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
from server.sampling_limits import MAX_BIAS, MAX_COUNT, MAX_LOGPROBS, MAX_PENALTY
from topspin.plan.retrieval import MAX_TOKENS, MIN_TOKENS

MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_STRUCTURED_CHOICES = 4096
MAX_ALLOWED_TOKEN_IDS = 2**14
# Printable ASCII, as in the header.
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=r"^[ -~]*$")]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float
"""A float is a whole number, as languages without integers write it."""
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
    """OpenAI's `response_format`, and vLLM's for text with tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # Of a structural_tag; server.gateway.grammars.structural_tags decodes them.
    format: Raw = ABSENT
    structures: Raw = ABSENT
    triggers: Raw = ABSENT

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
    structural_tag: Raw = ABSENT


class SamplingBody(BodyFields, kw_only=True, frozen=True):
    """The fields that say how tokens are chosen, and with whom a request shares what."""

    model: str | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]],
            Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    logprob_token_ids: (
        Annotated[list[Count], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None
    ) = None
    stream: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    truncation_side: Literal["left", "right"] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    kv_retrieval: KvRetrieval | None = None
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
    prompt_cache_key: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    service_tier: Ignored[str] = None
    user: Ignored[str] = None
    # vLLM's
    kv_transfer_params: Annotated[Raw, neutral({}, why="caches do not move between engines")] = (
        ABSENT
    )
    repetition_detection: Refused = ABSENT
    vllm_xargs: RefusedObject = ABSENT


class GenerationBody(SamplingBody, kw_only=True, frozen=True):
    """The fields that chat and plain completions have in common."""

    max_tokens: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None

    # Other servers' names of what is above (OTHER_NAMES).
    ebnf: str | None = None
    grammar: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json: Raw = ABSENT
    guided_regex: str | None = None
    json_schema: Raw = ABSENT
    n_predict: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    random_seed: Seed | None = None
    regex: str | None = None
    structural_tag: Raw = ABSENT

    # OpenAI's
    metadata: Ignored[Object] = None
    store: Ignored[bool] = None
    # vLLM's; length_penalty is for beam search, spaces_between_special_tokens for tokenizers
    # without a tokenizer.json.
    guided_decoding_backend: Ignored[str] = None
    guided_whitespace_pattern: Ignored[str] = None
    length_penalty: Ignored[float] = None
    session_id: Ignored[str] = None
    spaces_between_special_tokens: Ignored[bool] = None
    stream_interval: Ignored[int] = None
    use_beam_search: Annotated[
        Raw, neutral(False, why="answers are sampled; `n` gives several")
    ] = ABSENT
    # llama.cpp's
    cache_prompt: Ignored[bool] = None
    dry_allowed_length: Ignored[Any] = None
    dry_base: Ignored[Any] = None
    dry_penalty_last_n: Ignored[Any] = None
    dry_sequence_breakers: Ignored[Any] = None
    dynatemp_exponent: Ignored[Any] = None
    id_slot: Ignored[int] = None
    min_keep: Ignored[Any] = None
    mirostat_eta: Ignored[Any] = None
    mirostat_tau: Ignored[Any] = None
    n_discard: Ignored[Any] = None
    n_keep: Ignored[Any] = None
    post_sampling_probs: Ignored[Any] = None
    reasoning_format: Ignored[Any] = None
    repeat_last_n: Ignored[Any] = None
    return_progress: Ignored[bool] = None
    timings_per_token: Ignored[bool] = None
    xtc_threshold: Ignored[Any] = None
    dry_multiplier: Annotated[Raw, neutral(0)] = ABSENT
    dynatemp_range: Annotated[Raw, neutral(0)] = ABSENT
    mirostat: Annotated[Raw, neutral(0)] = ABSENT
    n_probs: Annotated[Raw, neutral(0)] = ABSENT
    repeat_penalty: Annotated[Raw, neutral(1)] = ABSENT
    typical_p: Annotated[Raw, neutral(1)] = ABSENT
    xtc_probability: Annotated[Raw, neutral(0)] = ABSENT
    # Of Ollama, LM Studio, NIM, OpenRouter, SGLang and Mistral: how a server runs, finds or shows
    # the model.
    draft_model: Ignored[Any] = None
    keep_alive: Ignored[Any] = None
    models: Ignored[Any] = None
    nvext: Ignored[Any] = None
    plugins: Ignored[Any] = None
    prompt_mode: Ignored[Any] = None
    provider: Ignored[Any] = None
    rid: Ignored[Any] = None
    route: Ignored[Any] = None
    safe_prompt: Ignored[Any] = None
    separate_reasoning: Ignored[Any] = None
    stream_reasoning: Ignored[Any] = None
    transforms: Ignored[Any] = None
    ttl: Ignored[Any] = None
    usage: Ignored[Any] = None


_SAME: Final = {"n_predict": "max_tokens", "random_seed": "seed"}
SAME_OUTPUTS: Final = {
    "ebnf": "grammar",
    "grammar": "grammar",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "json_schema": "json",
    "regex": "regex",
    "structural_tag": "structural_tag",
}
OTHER_NAMES: Final = {
    **_SAME,
    **{name: f"structured_outputs.{field}" for name, field in SAME_OUTPUTS.items()},
}
"""Other servers' names of fields, by which they are known here too."""
