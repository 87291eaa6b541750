"""Replacements of the scheduler, the checkpoint and the network for gateway tests.

FakeEngine is a control connection whose other end is the test: it answers AddRequest by a script or
leaves the test to emit outputs itself. `gateway` runs the application around it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import httpx
import msgspec
import tokenizers
import uvicorn
from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from server.gateway.app import create_app
from server.gateway.bodies.sampling_defaults import SamplingDefaults
from server.gateway.engine_client import EngineClient
from server.gateway.generation.served_model import ServedModel
from server.gateway.http.listener import http_config
from server.gateway.parsing.formats import MessageFormats, message_formats
from topspin.messages import (
    AbortRequest,
    AddRequest,
    AnyMessage,
    EngineState,
    FinishReason,
    Message,
    Outputs,
    RequestFailed,
    RequestOutput,
    RequestQueued,
    Stats,
    StatsQuery,
)
from topspin.plan.settings import GatewaySection

MODEL_NAME = "tiny"
MAX_REQUEST_TOKENS = 100
# A wait that would never end fails the test instead.
DEADLINE_S = 20.0
SPECIAL_TOKENS = ("<|eos|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("w", "o"), ("o", "r"))


@cache
def backend() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer: 256 bytes, a few merges, the specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in MERGES)]
    made = tokenizers.Tokenizer(
        models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=list(MERGES))
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return made


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer as the gateway loads it."""
    return Tokenizer(backend(), special_tokens={"eos_token": "<|eos|>"}, source="test")


def adding(special: str) -> Tokenizer:
    """Return the tokenizer, with `special` before each text."""
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    made.post_processor = processors.TemplateProcessing(
        single=f"{special} $A", special_tokens=[(special, made.token_to_id(special))]
    )
    return Tokenizer(made, special_tokens={}, source="test")


def ids(text: str) -> list[int]:
    """Return the tokens of `text`."""
    return tokenizer().encode(text, add_special_tokens=False)


EOS_ID = ids("<|eos|>")[0]


TEMPLATE = (
    "{% if prefix is defined %}{{ prefix }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def template() -> ChatTemplate:
    """Return a chat template: a variable, then `role: content` per line."""
    return template_of(TEMPLATE)


# Of a model that was trained with tools and reasoning.
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
    "{% if message.role == 'tool' %}({{ message.tool_call_id }}){% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if think %}<think>\n{% endif %}{% endif %}"
)


@cache
def tool_template() -> ChatTemplate:
    """Return a template with tools and reasoning."""
    return template_of(TOOL_TEMPLATE)


Script = Callable[[AddRequest], Iterable[RequestOutput | RequestFailed]]


def output(
    request: AddRequest | str, token_ids: Sequence[int], *, index: int = 0, **members: Any
) -> RequestOutput:
    """Return an output of `request`, or of the one with this id, with its other `members`."""
    request_id = request if isinstance(request, str) else request.request_id
    return RequestOutput(request_id=request_id, index=index, token_ids=tuple(token_ids), **members)


def saying(text: str, *, finish_reason: FinishReason = "length") -> Script:
    """Return a script that generates `text`, one token per output."""

    def script(request: AddRequest) -> Iterator[RequestOutput]:
        *before, last = ids(text)
        for index, token_id in enumerate(before):
            yield output(request, [token_id], index=index)
        yield output(request, [last], index=len(before), finish_reason=finish_reason)

    return script


def refusing(code: str, status: int, message: str, *, param: str = "", **more: Any) -> Script:
    """Return a script that fails each request; `more` are other members of RequestFailed."""

    def script(request: AddRequest) -> Iterator[RequestFailed]:
        why = {"code": code, "status": status, "message": message, "param": param}
        yield RequestFailed(request_id=request.request_id, **why, **more)

    return script


class FakeEngine:
    """The scheduler as seen by the gateway. Invariant: an aborted request gets nothing more."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        required = [each.name for each in msgspec.structs.fields(Stats) if each.required]
        self.stats = Stats(**{**dict.fromkeys(required, 0), "num_blocks": 8})
        self.answers_stats = True
        self.queues = True
        self.request_came = asyncio.Event()
        self.abort_came = asyncio.Event()
        self._incoming: asyncio.Queue[AnyMessage | Exception] = asyncio.Queue()

    async def recv(self) -> AnyMessage:
        """Return the next message; an exception in its place is raised."""
        message = await self._incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: Message) -> None:
        """Take a message of the gateway."""
        if isinstance(message, AddRequest):
            self.added.append(message)
            self.request_came.set()
            if self.queues:
                self.say(RequestQueued(request_ids=(message.request_id,)))
            if self.script is not None:
                self.run(self.script)
        elif isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
            self.abort_came.set()
        elif isinstance(message, StatsQuery) and self.answers_stats:
            self.say(msgspec.structs.replace(self.stats, query_id=message.query_id))

    def run(self, script: Script) -> None:
        """Answer the last request by `script`."""
        for item in script(self.added[-1]):
            self.emit(item) if isinstance(item, RequestOutput) else self.say(item)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def say(self, message: AnyMessage | Exception) -> None:
        """Have the gateway receive `message`."""
        self._incoming.put_nowait(message)

    async def settle(self) -> None:
        """Wait until the gateway has read all messages."""
        while not self._incoming.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def emit(self, *outputs: RequestOutput) -> None:
        """Have the gateway receive the outputs of one step."""
        self.say(Outputs(outputs=outputs))

    def become_ready(self, max_request_tokens: int = MAX_REQUEST_TOKENS) -> None:
        """Announce a ready engine."""
        self.say(EngineState(state="ready", max_request_tokens=max_request_tokens))


@cache
def template_of(source: str) -> ChatTemplate:
    """Return a chat template."""
    return ChatTemplate({"default": source}, special_tokens={}, source="test")


def served_model(**own: Any) -> ServedModel:
    """Return the tiny model; `own` replaces some of its fields."""
    facts: dict[str, Any] = {
        "names": (MODEL_NAME, "org/alias"),
        "root": "/models/tiny",
        "vocab_size": tokenizer().vocab_size,
        "eos_token_ids": (EOS_ID,),
        "created_at_s": 1_700_000_000,
        "defaults": SamplingDefaults(),
        "tokenizer": tokenizer(),
        "template": template(),
    }
    facts |= own
    if "formats" not in facts:
        facts["formats"] = formats_of(facts["template"])
    return ServedModel(**facts)


@cache
def formats_of(template: ChatTemplate | None) -> MessageFormats:
    """Return the formats of a template."""
    return message_formats(GatewaySection(), template)


def make_app(engine: EngineClient, **options: Any) -> ASGIApp:
    """Return the application over `engine` and the tiny model.

    `options` are create_app's, and fields of the model.
    """
    names = options.keys() & set(ServedModel.__slots__)
    model = served_model(**{name: options.pop(name) for name in names})
    return create_app(engine, model=model, **{"progress_deadline_s": 5.0, **options})


@asynccontextmanager
async def reading(engine: EngineClient) -> AsyncIterator[asyncio.Task[None]]:
    """Have `engine` read what its scheduler sends."""
    reader = asyncio.create_task(engine.run())
    try:
        yield reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


@asynccontextmanager
async def gateway(
    fake: FakeEngine,
    *,
    ready: bool = True,
    max_request_tokens: int = MAX_REQUEST_TOKENS,
    replay_deadline_s: float | None = None,
    address: tuple[str, int] = ("127.0.0.1", 123),
    **options: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run the application in this loop, without a network; yields a client at `address`.

    `options` are those of make_app.
    """
    engine = EngineClient(fake, replay_deadline_s)
    transport = httpx.ASGITransport(
        make_app(engine, **options), raise_app_exceptions=False, client=address
    )
    async with (
        asyncio.timeout(DEADLINE_S),
        reading(engine),
        httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
    ):
        if ready:
            fake.become_ready(max_request_tokens)
            while engine.state.state != "ready":
                await asyncio.sleep(0)
        yield client


class LoopbackServer(uvicorn.Server):
    """uvicorn for tests: leaves the process's signals alone, and ends at once when told.

    uvicorn looks for its end, and at its connections when it ends, every tenth of a second.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def main_loop(self) -> None:
        """Serve until stop()."""
        await self.on_tick(0)
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, and close all connections."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.001)
        await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture signals."""
        yield


@asynccontextmanager
async def loopback(
    fake: FakeEngine,
    *,
    max_request_tokens: int = MAX_REQUEST_TOKENS,
    deadline_s: float | None = DEADLINE_S,
    section: GatewaySection | None = None,
    **options: Any,
) -> AsyncIterator[int]:
    """Serve over real sockets, in this loop; yields the port. `options` are those of make_app."""
    engine = EngineClient(fake)
    fake.become_ready(max_request_tokens)
    config = http_config(make_app(engine, **options), section or GatewaySection())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with reading(engine):
            server = LoopbackServer(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                async with asyncio.timeout(deadline_s):
                    yield listener.getsockname()[1]
            finally:
                server.stop()
                await serving


@asynccontextmanager
async def opened(
    fake: FakeEngine, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve as loopback does, and yield the two ends of a connection, which is then closed."""
    async with loopback(fake, **options) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()
        await writer.wait_closed()
