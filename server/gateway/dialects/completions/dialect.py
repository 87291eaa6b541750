"""POST /v1/completions: from a body to its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from server.gateway.dialects.completions.reply import Completion, CompletionReplies
from server.gateway.dialects.completions.request import (
    CompletionBody,
    completion_prompts,
    echoes,
    given_prompts,
)
from server.gateway.dialects.dialect import PreparedRequest
from server.gateway.generation.params import meant, request_params
from server.gateway.generation.prompts import Prompt
from server.gateway.generation.served_model import ServedModel
from server.gateway.openapi.endpoint import CHUNKS, EXAMPLE_MODEL, OF_GENERATION, Endpoint

DEFAULT_MAX_TOKENS = 16
COMPLETIONS = Endpoint(
    method="post",
    path="/v1/completions",
    summary="Continue a text",
    body=CompletionBody,
    answer=Completion,
    events=CHUNKS.format("Completion"),
    refusals=OF_GENERATION,
    example={"model": EXAMPLE_MODEL, "prompt": "Once upon a time", "max_tokens": 50},
)


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """OpenAI's older endpoint: texts, or token ids, that the model continues."""

    model: ServedModel

    def answer_id(self, request_id: str) -> str:
        """Return the id of the answer to a request."""
        return f"cmpl-{request_id}"

    def prepare(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body; see Dialect."""
        model, reader = self.model, self.model.reader()
        body, tokenizer = meant(reader.read(data, CompletionBody)), model.tokenizer
        params = request_params(
            body,
            model,
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_logprobs=body.logprobs,
            echo=bool(body.echo),
        )
        check = partial(params.check_prompt, limit=max_tokens, param="prompt", at_least=True)
        given = given_prompts(body, model=model, check_fewest=check)
        prompts = completion_prompts(body, given, tokenizer=tokenizer, check_fewest=check)
        shown: Sequence[str | None] = [None] * len(prompts)
        if params.echo:
            shown = echoes(body, given, prompts, tokenizer=tokenizer)
        made = [Prompt(ids=ids, echo=echo) for ids, echo in zip(prompts, shown, strict=True)]
        replies = partial(CompletionReplies, tokenizer=tokenizer)
        return PreparedRequest(params, made, "prompt", reader.names, replies)
