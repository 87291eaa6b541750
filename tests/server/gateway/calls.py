"""Calls of both endpoints, and functions for their answers. Knows no test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from tests.server.gateway.fakes import FakeEngine, Script, gateway, ids, output, saying, tokenizer
from topspin.messages import AddRequest, FinishReason, RequestOutput, TokenLogprobs, unpack_ints

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
PLAIN = "/v1/completions"
USER = {"role": "user", "content": "hi"}
CHAT_BODY: dict[str, Any] = {"model": "tiny", "messages": [USER]}
PLAIN_BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
PROMPT = "user: hi\nassistant: "


def answer_to(
    path: str,
    body: object = None,
    *,
    fake: FakeEngine | None = None,
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    **options: Any,
) -> httpx.Response:
    """Return the answer to a GET, or to a POST of `body`: JSON, or bytes that are said to be so.

    Values of `headers` are sent as Latin-1. `options` are those of gateway. A fake engine serves
    one such call: it belongs to its loop.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]

    async def test() -> httpx.Response:
        async with gateway(fake or FakeEngine(saying("ok")), **options) as client:
            if body is None:
                return await client.get(path, headers=raw)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            raw.append((b"Content-Type", b"application/json"))
            return await client.post(path, content=content, headers=raw)

    return asyncio.run(test())


def post(path: str, body: Mapping[str, Any], fake: FakeEngine, **options: Any) -> httpx.Response:
    """Return the answer to a POST that is served; `options` are those of answer_to."""
    response = answer_to(path, body, fake=fake, **options)
    assert response.status_code == 200, response.text
    return response


def events_of(response: httpx.Response) -> list[Any]:
    """Return the JSON of each event after checking the frame and the end of the stream."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: {") for frame in frames[:-2])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def without_head(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without id, time and names, which `test_every_event...` checks."""
    head = ("id", "object", "created", "model")
    return {key: value for key, value in event.items() if key not in head}


def prompt_of(request: AddRequest) -> str:
    return tokenizer().decode(list(unpack_ints(request.prompt)), skip_special_tokens=False)


def chat_choice(index: int, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice]}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def scored(text: str) -> Script:
    """Return a script that generates `text`: each token is best (-0.5), `z` second (-infinity).

    The prompt is scored if asked, by `prompt_score`, a token per output; with max_tokens 0 nothing
    follows.
    """

    def script(request: AddRequest) -> Iterator[RequestOutput]:
        token_ids = ids(text) if request.sampling.max_tokens else []
        num_top = request.sampling.prompt_logprobs
        if num_top is not None:
            for position, token_id in enumerate(unpack_ints(request.prompt)[1:], start=1):
                score = prompt_score(token_id, position, num_top)
                yield output(request, [], prompt_logprobs=(score,))
        for index, token_id in enumerate(token_ids):
            entry = TokenLogprobs(
                logprob=-0.5, top_ids=(token_id, ids("z")[0]), top_logprobs=(-0.5, float("-inf"))
            )
            finish: FinishReason | None = "length" if index == len(token_ids) - 1 else None
            yield output(request, [token_id], index=index, logprobs=(entry,), finish_reason=finish)
        if not token_ids:
            yield output(request, [], finish_reason="length")

    return script


def prompt_score(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    """Return the score of a token of the prompt: `z` is likelier, all others are less likely."""
    likeliest = ids("zyxwvutsrqponmlkjihgf")
    ranked = list(dict.fromkeys([likeliest[0], token_id, *likeliest]))
    logprobs = [-position - rank / 4 for rank in range(1, num_top + 2)]
    rank = ranked.index(token_id) + 1
    return TokenLogprobs(
        -position - rank / 4, tuple(ranked[:num_top]), tuple(logprobs[:num_top]), rank
    )


def head_of(size_bytes: int, *, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    lines = (
        f"POST {path} HTTP/{version}",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {size_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def http_request(
    body: dict[str, Any], *, path: str = "/v1/completions", version: str = "1.1"
) -> bytes:
    data = json.dumps({"model": "tiny", **body}).encode()
    return head_of(len(data), path=path, version=version) + data
