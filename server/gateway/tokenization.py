"""POST /tokenize and /detokenize.

Owns the two routes: they read a bounded body, and convert a large one off the event loop. Knows no
fields (server.gateway.requests.tokenization) and asks the engine nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from server.gateway.engine_client import EngineClient
from server.gateway.http.body import Bodies
from server.gateway.requests.params import ServedModel
from server.gateway.requests.preparation import PreparationThreads
from server.gateway.requests.tokenization import detokenize, tokenize
from server.gateway.requests.tools import MessageFormats

MAX_BODY_BYTES = 2**20
INLINE_BODY_BYTES = 4 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizationHandler:
    """Serves both routes, also while the engine is not ready."""

    engine: EngineClient
    model: ServedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    formats: MessageFormats
    threads: PreparationThreads
    bodies: Bodies

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize."""
        convert = partial(
            tokenize,
            model=self.model,
            tokenizer=self.tokenizer,
            template=self.template,
            formats=self.formats,
            max_model_len=self.engine.state.max_request_tokens or None,
        )
        return await self._answer(request, convert)

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize."""
        convert = partial(detokenize, model=self.model, tokenizer=self.tokenizer)
        return await self._answer(request, convert)

    async def _answer(
        self, request: Request, convert: Callable[[bytes], msgspec.Struct]
    ) -> Response:
        async with self.bodies.read_json(request, max_bytes=MAX_BODY_BYTES) as data:

            def encoded() -> bytes:
                return msgspec.json.encode(convert(data))

            small = len(data) <= INLINE_BODY_BYTES
            body = encoded() if small else await self.threads.run(encoded)
        return Response(body, media_type="application/json")
