"""Conversion of a request's fields to checked values for the engine and for the text.

Owns defaults, checks that need the model (names, vocabulary, context length) and rules
between fields. Knows no HTTP; server.gateway.dialects calls it between decoding and the prompt.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from server.gateway.bodies.generation import (
    OTHER_NAMES,
    GenerationBody,
    KvRetrieval,
    StreamOptions,
    StructuredOutputs,
)
from server.gateway.errors import ContextLengthExceeded, truncated
from server.gateway.generation.choice import TextOptions
from server.gateway.generation.prompts import bad_word_tokens
from server.gateway.generation.served_model import ServedModel
from server.gateway.generation.stop_strings import StopStrings
from server.gateway.grammars.structured_outputs import grammar_of
from server.sampling_limits import MAX_LOGPROBS
from topspin.errors import InvalidRequest
from topspin.messages import SamplingParams
from topspin.plan.retrieval import RetrievalPolicy

# Log-probabilities of prompts in one answer: each takes some 100 bytes here, and 70 as JSON.
MAX_PROMPT_SCORES = 2**19
_SEED_MASK = 2**64 - 1
_EMPTY: Final = (None, "", b"null", b"{}")
_Number = TypeVar("_Number", int, float)
Body = TypeVar("Body", bound=GenerationBody)
_log = logging.getLogger("gateway")


def meant(body: Body) -> Body:
    """Return a body with what it says under other servers' names under ours.

    Raises InvalidRequest for what is then given twice.
    """
    found: dict[str, Any] = {}
    for name, field in OTHER_NAMES.items():
        value = getattr(body, name)
        if (bytes(value) if isinstance(value, Raw) else value) in _EMPTY:
            continue
        target, _, part = field.partition(".")
        if target in found or getattr(body, target) is not None:
            raise InvalidRequest(f"`{name}` and `{target}` are given both", param=name)
        found[target] = StructuredOutputs(**{part: value}) if part else value
    return msgspec.structs.replace(body, **found) if found else body


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestParams:
    """The checked parameters of one request.

    If `max_tokens` is None, `default_max_tokens` applies; if both are None, all tokens that fit.
    `sampling` lacks only max_tokens and choice, which `sampling_of` sets for each choice; its
    `prompt_logprobs` may be for `echo`, `num_prompt_logprobs` are the client's. `grammar_field` is
    the one that asks for the grammar. `has_seed`: the client's seed, else one was drawn.
    `tokens_as_ids`: log-probabilities name tokens `token_id:N`, not by their texts.
    """

    model: str
    num_choices: int
    max_tokens: int | None
    default_max_tokens: int | None
    sampling: SamplingParams
    grammar_field: str
    text: TextOptions
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    num_prompt_logprobs: int | None
    echo: bool
    cache_salt: str
    priority: int
    request_id: str | None
    has_seed: bool

    @property
    def num_candidates(self) -> int:
        """Return how many log-probabilities the answer has of one token, at most."""
        asked = (self.text.num_logprobs, self.sampling.prompt_logprobs)
        return 1 + max(each or 0 for each in asked)

    def with_grammar(self, grammar: str, *, field: str) -> RequestParams:
        """Return the parameters of a request whose answers follow `grammar`.

        `field` asks for it if no other field has asked for one.
        """
        sampling = msgspec.structs.replace(self.sampling, grammar=grammar)
        return replace(self, sampling=sampling, grammar_field=self.grammar_field or field)

    def sampling_of(self, choice_idx: int, *, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one choice; the first has the prompt scored."""
        prompt_logprobs = self.sampling.prompt_logprobs if choice_idx == 0 else None
        return msgspec.structs.replace(
            self.sampling, choice=choice_idx, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs
        )

    def check_prompt_scores(self, num_prompt_tokens: int) -> None:
        """Raise InvalidRequest if the answer would have too many prompt log-probabilities."""
        num_top = self.sampling.prompt_logprobs
        if num_top is None:
            return
        num_scores = num_prompt_tokens * self.num_choices * (num_top + 1)
        if num_scores > MAX_PROMPT_SCORES:
            param = "logprobs" if self.num_prompt_logprobs is None else "prompt_logprobs"
            raise InvalidRequest(
                f"`{param}`: {num_prompt_tokens} prompt tokens, n = {self.num_choices} and "
                f"{num_top} candidates beside each token are {num_scores} log-probabilities of "
                f"prompts; an answer has at most {MAX_PROMPT_SCORES}",
                param=param,
            )

    def check_prompt(
        self, num_tokens: int, *, limit: int, param: str, at_least: bool = False
    ) -> None:
        """Raise ContextLengthExceeded if a prompt of this length does not fit `limit`.

        `at_least`: it may be longer. Unless nothing is to be generated, one token is output.
        """
        has_output = self.max_tokens != 0
        if num_tokens + has_output > limit:
            raise ContextLengthExceeded(
                f"the prompt has {'at least ' if at_least else ''}{num_tokens} tokens; this server "
                f"takes at most {limit} tokens, prompt and output together"
                f"{', and at least one is output' if has_output else ''}",
                param=param,
            )

    def wanted(self, limit: int) -> int:
        """Return how many tokens of output a prompt that is shortened leaves room for."""
        asked = self.default_max_tokens if self.max_tokens is None else self.max_tokens
        return max(1, limit // 4) if asked is None else min(asked, limit)

    def output_budget(self, num_prompt_tokens: int, *, limit: int, param: str) -> int:
        """Return how many tokens may be generated after a prompt of this length.

        Raises ContextLengthExceeded if the prompt, or prompt and requested output together,
        do not fit `limit`; InvalidRequest if min_tokens cannot be reached.
        """
        self.check_prompt(num_prompt_tokens, limit=limit, param=param)
        room = limit - num_prompt_tokens
        if self.max_tokens is not None and self.max_tokens > room:
            raise ContextLengthExceeded(
                f"{num_prompt_tokens} prompt tokens and {self.max_tokens} requested output "
                f"tokens are {num_prompt_tokens + self.max_tokens} together; this server takes "
                f"at most {limit}",
                param=param,
            )
        default = room if self.default_max_tokens is None else min(room, self.default_max_tokens)
        budget = default if self.max_tokens is None else self.max_tokens
        if self.sampling.min_tokens > budget:
            raise InvalidRequest(
                f"`min_tokens` {self.sampling.min_tokens} is more than the {budget} tokens "
                "that may be generated",
                param="min_tokens",
            )
        return budget


def request_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    num_logprobs: int | None,
    echo: bool = False,
) -> RequestParams:
    """Check a request; raises InvalidRequest or ModelNotFound naming the field.

    The arguments are the fields that dialects have in different forms.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true", param="stream_options")
    scored = body.prompt_logprobs
    if scored == model.max_logprobs == -1:
        scored = model.vocab_size
    else:
        _check_logprobs("prompt_logprobs", scored, most=model.max_logprobs)
    _check_logprobs("logprobs", num_logprobs, most=model.max_logprobs)
    by_id = tuple(body.logprob_token_ids or ())
    model.check_vocabulary(by_id, param="logprob_token_ids")
    if by_id and num_logprobs is None:
        raise InvalidRequest("`logprob_token_ids` needs `logprobs`", param="logprob_token_ids")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "`prompt_logprobs` is not available in a stream", param="prompt_logprobs"
        )
    asked = [scored, num_logprobs if echo else None]
    num_prompt_logprobs = max((num for num in asked if num is not None), default=None)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    options = body.stream_options or StreamOptions()
    if max_tokens == -1:  # llama.cpp's: as many as fit
        max_tokens = default_max_tokens = None
    grammar = grammar_of(body)
    return RequestParams(
        model=model.checked_name(body.model),
        num_choices=body.n or 1,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        sampling=_sampling(
            body,
            model,
            num_logprobs=0 if by_id else num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            logprob_token_ids=by_id,
            grammar=grammar.text,
        ),
        grammar_field=grammar.field,
        text=TextOptions(
            stops=StopStrings(stops) if stops else None,
            min_tokens=body.min_tokens or 0,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            num_logprobs=len(by_id) or num_logprobs,
            stop_token_ids=tuple(body.stop_token_ids or ()),
        ),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        num_prompt_logprobs=scored,
        echo=echo,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        request_id=body.request_id,
        has_seed=body.seed is not None,
    )


def _sampling(
    body: GenerationBody,
    model: ServedModel,
    *,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    logprob_token_ids: tuple[int, ...],
    grammar: str,
) -> SamplingParams:
    logit_bias = _biases(body.logit_bias or {})
    model.check_vocabulary(list(logit_bias), param="logit_bias")
    stop_token_ids = tuple(body.stop_token_ids or ())
    model.check_vocabulary(stop_token_ids, param="stop_token_ids")
    allowed_token_ids = tuple(body.allowed_token_ids or ())
    model.check_vocabulary(allowed_token_ids, param="allowed_token_ids")
    defaults = model.defaults
    seed = None if body.seed is None else int(body.seed)
    if seed != body.seed:
        raise InvalidRequest(f"`seed` is {body.seed}, which is no whole number", param="seed")
    if seed is None:
        seed = secrets.randbits(64)
        _log.debug("drew seed %d for an unseeded request", seed)
    return SamplingParams(
        max_tokens=0,
        seed=seed & _SEED_MASK,
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(0, _given(body.top_k, defaults.top_k)),
        min_p=_given(body.min_p, defaults.min_p),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_bias,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        eos_token_ids=() if body.ignore_eos else model.eos_token_ids,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        logprob_token_ids=logprob_token_ids,
        kv_retrieval_tokens=_retrieval_tokens(body.kv_retrieval, served=model.retrieval),
        grammar=grammar,
        allowed_token_ids=allowed_token_ids,
        bad_words=bad_word_tokens(body.bad_words, model.tokenizer),
    )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return `logit_bias` by tokens; raises InvalidRequest that names all keys that are none."""
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    if wrong:
        shown = truncated("`, `".join(wrong), 256)
        said = (
            f"key `{shown}` is no token id"
            if len(wrong) == 1
            else f"keys `{shown}` are no token ids"
        )
        raise InvalidRequest(
            f"`logit_bias`: the {said}", param=f"logit_bias.{truncated(wrong[0], 64)}"
        )
    return {int(key): bias for key, bias in given.items()}


def _check_logprobs(name: str, asked: int | None, *, most: int) -> None:
    """Raise InvalidRequest for more candidates beside each token than the operator lets have."""
    most = MAX_LOGPROBS if most == -1 else most
    if asked is not None and (asked > most or asked < 0):
        reason = "all of the vocabulary" if asked < 0 else str(asked)
        raise InvalidRequest(
            f"`{name}` asks for {reason} beside each token; at most {most} are served "
            "(--max-logprobs)",
            param=name,
        )


def _retrieval_tokens(asked: KvRetrieval | None, *, served: RetrievalPolicy | None) -> int | None:
    """Return SamplingParams' kv_retrieval_tokens."""
    if asked is None:
        return None
    if asked.enabled is False:
        if asked.tokens is not None:
            raise InvalidRequest(
                "`kv_retrieval`: `tokens` has no meaning if `enabled` is false",
                param="kv_retrieval",
            )
        return 0
    if served is None:
        raise InvalidRequest(
            "`kv_retrieval`: this server attends to all keys; it was started without "
            "--kv-retrieval-tokens",
            param="kv_retrieval",
        )
    if asked.tokens is not None:
        try:
            served.with_tokens(asked.tokens)
        except ValueError as error:
            raise InvalidRequest(f"`kv_retrieval`: {error}", param="kv_retrieval") from error
    return asked.tokens


def _given(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
