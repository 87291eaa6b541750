"""Turns a gateway's AddRequest into a Request, or says why it cannot be served.

Owns the limits of a single request. A request that is refused here could never run, or would
harm others if it did; gateways are not trusted to have checked it.
Knows no queue and no other requests. Called by policy.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from server.sampling_limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_COUNT,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from server.scheduler.planning.block_pool import HashChain
from server.scheduler.planning.sequence import Request
from topspin.errors import InvalidRequest, ProtocolError
from topspin.grammars import MAX_GRAMMAR_BYTES
from topspin.messages import AddRequest, SamplingParams, choice_of, unpack_ints
from topspin.plan.kv_cache import BlockNeeds
from topspin.plan.retrieval import MAX_TOKENS, MIN_TOKENS, RetrievalPolicy


class Intake:
    """The limits of requests, and the conversion."""

    def __init__(
        self,
        *,
        vocab_size: int,
        needs: BlockNeeds,
        max_model_len: int,
        max_request_tokens: int,
        retrieval: RetrievalPolicy | None = None,
    ) -> None:
        """`max_request_tokens`: prompt and output tokens that fit the largest node's cache."""
        self._retrieval = retrieval
        self._vocab_size = vocab_size
        self._needs = needs
        self._max_model_len = max_model_len
        self._max_request_tokens = max_request_tokens

    def request(
        self, message: AddRequest, *, peer: bytes, arrival: int, number: int | None = None
    ) -> Request:
        """Return the request; raises InvalidRequest naming the invalid parameter.

        `number` is among all choices; None: `arrival`.
        """
        prompt = self._prompt(message, has_output=message.sampling.max_tokens > 0)
        output = self._tokens("output", message.output)
        sampling = message.sampling
        _check_sampling(sampling, vocab_size=self._vocab_size)
        self._check_retrieval(sampling.kv_retrieval_tokens)
        max_length = min(len(prompt) + sampling.max_tokens, self._max_model_len)
        if output and len(prompt) + len(output) >= max_length:
            raise InvalidRequest(f"output: all of its {len(output)} tokens are there already")
        _check_range("num_scored", message.num_scored, 0, len(prompt) - 1)
        # The last token is returned, not fed: it needs no place in the cache.
        position_limit = max_length - 1 if sampling.max_tokens else max_length
        if max_length > self._max_request_tokens:
            raise InvalidRequest(
                f"prompt and output of up to {max_length} tokens do not fit the cache of a node, "
                f"which holds {self._max_request_tokens}",
                param="max_tokens",
            )
        choice = choice_of(message.request_id)
        return Request(
            request_id=message.request_id,
            peer=peer,
            arrival=arrival,
            place=int(choice) if choice.isdecimal() else 0,
            number=arrival if number is None else number,
            sampling=sampling,
            tokens=prompt + output,
            num_prompt_tokens=len(prompt),
            max_length=max_length,
            position_limit=position_limit,
            max_blocks=self._needs.of(-(-position_limit // self._needs.block_size)),
            stop_ids=frozenset(sampling.stop_token_ids) | frozenset(sampling.eos_token_ids),
            hashes=HashChain(message.cache_salt, self._needs.block_size),
            cache_salt=message.cache_salt,
            priority=message.priority,
            num_scored=message.num_scored,
        )

    def _check_retrieval(self, asked: int | None) -> None:
        """Raise InvalidRequest for a number of keys with which nodes could not retrieve."""
        if not asked:
            return
        _check_range("kv_retrieval", asked, MIN_TOKENS, MAX_TOKENS)
        try:
            if self._retrieval is not None:
                self._retrieval.with_tokens(asked)
        except ValueError as error:
            raise InvalidRequest(f"kv_retrieval: {error}", param="kv_retrieval") from error

    def _prompt(self, message: AddRequest, *, has_output: bool) -> array[int]:
        prompt = self._tokens("prompt", message.prompt)
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(prompt) + has_output > self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; the context of {self._max_model_len} "
                "leaves no room for output",
                param="prompt",
            )
        return prompt

    def _tokens(self, param: str, packed: bytes) -> array[int]:
        try:
            tokens = array("i", unpack_ints(packed))
        except ProtocolError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        if tokens and (min(tokens) < 0 or max(tokens) >= self._vocab_size):
            raise InvalidRequest(
                f"the {param} has token ids outside 0..{self._vocab_size - 1}", param=param
            )
        return tokens


def _check_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequest naming the first parameter that is out of its range."""
    given = sampling
    _check_range("max_tokens", given.max_tokens, 0, MAX_COUNT)
    _check_range("min_tokens", given.min_tokens, 0, MAX_COUNT)
    _check_range("seed", given.seed, 0, MAX_SEED)
    _check_range("choice", given.choice, 0, MAX_COUNT)
    _check_range("temperature", given.temperature, 0, MAX_TEMPERATURE)
    _check_range("top_p", given.top_p, 0, 1)
    _check_range("top_k", given.top_k, 0, MAX_COUNT)
    _check_range("min_p", given.min_p, 0, 1)
    _check_range("presence_penalty", given.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", given.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range(
        "repetition_penalty",
        given.repetition_penalty,
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    )
    if given.logprobs is not None:
        # The gateway limits how many a client may ask for; here the vocabulary does.
        _check_range("logprobs", given.logprobs, 0, vocab_size)
    if given.prompt_logprobs is not None:
        _check_range("prompt_logprobs", given.prompt_logprobs, 0, vocab_size)
    for bias in given.logit_bias.values():
        _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    _check_ids("logit_bias", given.logit_bias, vocab_size)
    _check_ids("stop_token_ids", given.stop_token_ids, vocab_size)
    _check_ids("eos_token_ids", given.eos_token_ids, vocab_size)
    _check_ids("logprob_token_ids", given.logprob_token_ids, vocab_size)
    _check_ids("allowed_token_ids", given.allowed_token_ids, vocab_size)
    _check_range("bad_words", len(given.bad_words), 0, MAX_BAD_WORDS)
    for word in given.bad_words:
        _check_range("bad_words", len(word), 1, MAX_BAD_WORD_TOKENS)
        _check_ids("bad_words", word, vocab_size)
    _check_grammar(given)


def _check_grammar(given: SamplingParams) -> None:
    """Raise InvalidRequest for a grammar that is too long or can never end."""
    if not given.grammar:
        return
    size = len(given.grammar.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the grammar has {size} bytes: {MAX_GRAMMAR_BYTES} are possible", param="grammar"
        )
    if given.min_tokens or not given.eos_token_ids:
        raise InvalidRequest(
            "a grammar ends by the model's eos token, which min_tokens and ignore_eos forbid",
            param="grammar",
        )


def _check_range(param: str, value: float, lowest: float, highest: float) -> None:
    # A NaN is in no range.
    if not lowest <= value <= highest:
        raise InvalidRequest(
            f"{param} is {value}: must be between {lowest} and {highest}", param=param
        )


def _check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequest(f"{param} has token ids outside 0..{vocab_size - 1}", param=param)
