"""The gateway process: command line, control connection, HTTP server, shutdown.

Owns the life of the process and its shutdown after a signal: new requests are refused, those
in flight get a short grace period and then end with EngineUnavailable, at once after a second
signal. A lost control connection is replaced for as long as the process lives. Knows no route.
Started by app.launch.engine as `python -m server.gateway`, with a listening socket that outlives
it, or by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from models.checkpoints.checkpoint_index import file_or_directory
from models.description.config import load_model_config
from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from server.gateway.app import create_app
from server.gateway.bodies.sampling_defaults import load_sampling_defaults
from server.gateway.engine_client import EngineClient
from server.gateway.generation.served_model import ServedModel
from server.gateway.http.auth import keys_of
from server.gateway.http.listener import BACKLOG, HttpServer, check_tls, http_config
from server.gateway.operations.otlp import SpanSender, span_sender
from server.gateway.parsing.formats import message_formats
from topspin import __version__
from topspin.errors import ConfigError, EngineUnavailable, TopspinError
from topspin.logs import start_logging
from topspin.messages import Hello
from topspin.plan.settings import GatewaySection
from topspin.plan.spec import ServeConfig, load_serve_config
from topspin.process import CONFIG_ERROR_STATUS, follow_parent, new_incarnation
from topspin.processes.channel import AsyncControlClient
from topspin.processes.listening import bind
from topspin.processes.node_network import add_key_arguments, read_keys_of

# The pause before Hello is sent on a new control connection, after the last one was lost.
RECONNECT_DELAY_S = 0.1
# While a thread prepares a large request, the event loop waits this long for the interpreter's
# lock at each wake-up.
SWITCH_INTERVAL_S = 0.001
# The scheduler's own deadline passes first; /health reports a stall only if that one failed.
PROGRESS_MARGIN_S = 10.0
# How long clients that connected while no gateway lived wait for the engine's state, too.
FIRST_STATE_S = 5.0

Connect = Callable[[], AsyncControlClient]

_log = logging.getLogger("gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway; returns the exit status."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m server.gateway", description=__doc__)
    parser.add_argument("--config", required=True, help="the ServeConfig, JSON")
    parser.add_argument("--control", required=True, help="address of the scheduler")
    add_key_arguments(parser)
    parser.add_argument("--index", type=int, default=0, help="which gateway of the engine")
    parser.add_argument("--listen-fd", type=int, help="inherited socket, bound to the address")
    args = parser.parse_args(argv)
    start_logging("gateway")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        config = load_serve_config(args.config)
        check_tls(config.gateway)
        with (
            contextlib.closing(_listener(config.gateway, args.listen_fd)) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            connect = partial(AsyncControlClient, args.control, keys=read_keys_of(args))
            runner.run(serve(config, listener, connect=connect, index=args.index))
    except TopspinError as error:
        _log.error("gateway: %s", error)
        return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else 1
    return 0


def _listener(section: GatewaySection, fd: int | None) -> socket.socket:
    return bind(section) if fd is None else socket.socket(fileno=fd)


async def serve(
    config: ServeConfig, listener: socket.socket, *, connect: Connect, index: int = 0
) -> None:
    """Serve at a bound socket until a signal comes; `connect` opens a control connection.

    Raises ConfigError if the model's files cannot be used, VersionMismatch if the scheduler
    refuses this gateway. A scheduler that is lost does not end the gateway: it answers 503 until
    it is connected again or its supervisor stops it.
    """
    with span_sender(config.gateway.otlp_traces_endpoint) as spans:
        plan = config.plan
        engine = EngineClient(
            connect(),
            replay_deadline_s=plan.failover.restart_deadline_s if plan.failover.restart else None,
            limits=plan.scheduling,
        )
        try:
            app = build_app(config, engine, spans)
            engine.connection.send(_hello(index))
            is_replacement = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            listener.listen(BACKLOG)
            port = listener.getsockname()[1]
            _log.info("gateway: listens on %s port %d", config.gateway.host, port)
            reading = _stay_connected(engine, connect=connect, index=index)
            await _serve_http(
                app,
                engine,
                listener,
                reading=reading,
                section=config.gateway,
                first_state_s=FIRST_STATE_S if is_replacement else 0.0,
            )
        finally:
            engine.connection.close()


def _hello(index: int) -> Hello:
    return Hello(
        role="gateway",
        index=index,
        incarnation=new_incarnation(),
        revision=__version__,
        pid=os.getpid(),
    )


async def _stay_connected(engine: EngineClient, *, connect: Connect, index: int) -> None:
    """Read from the scheduler until cancelled; after a loss, reconnect and send Hello again.

    Between the loss and the scheduler's answer nothing is sent: the engine counts as failed, or
    requests wait. Raises VersionMismatch if the scheduler refuses this gateway.
    """
    while True:
        await engine.run()
        engine.connection.close()
        engine.connection = connect()
        await asyncio.sleep(RECONNECT_DELAY_S)
        engine.connection.send(_hello(index))


def build_app(
    config: ServeConfig, engine: EngineClient, spans: SpanSender | None = None
) -> ASGIApp:
    """Return the application; reads the checkpoint's configuration, tokenizer and template."""
    path = Path(config.plan.model.path)
    model_config = load_model_config(path, config.plan.model.hf_overrides)
    file = config.gateway.chat_template
    template = ChatTemplate.find(path) if file is None else ChatTemplate.from_file(path, file)
    model = ServedModel(
        names=config.gateway.served_names,
        root=file_or_directory(path),
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        created_at_s=int(time.time()),
        defaults=load_sampling_defaults(
            path, config.gateway.generation_config, config.gateway.override_generation_config
        ),
        ignores_unknown=config.gateway.unknown_fields == "ignore",
        max_logprobs=config.gateway.max_logprobs,
        tokenizer=Tokenizer.from_directory(path),
        template=template,
        formats=message_formats(config.gateway, template),
        retrieval=config.plan.kv_cache.retrieval,
    )
    return create_app(
        engine,
        model=model,
        progress_deadline_s=config.plan.link.deadline_s + PROGRESS_MARGIN_S,
        allowed_origins=config.gateway.allowed_origins,
        access_log=config.gateway.access_log,
        keys=keys_of(config.gateway),
        spans=spans,
        request_timeout_s=config.gateway.request_timeout_s,
        root_path=config.gateway.root_path,
        keep_alive_s=config.gateway.sse_keep_alive_interval_s,
    )


async def _serve_http(
    app: ASGIApp,
    engine: EngineClient,
    listener: socket.socket,
    *,
    reading: Coroutine[None, None, None],
    section: GatewaySection,
    first_state_s: float,
) -> None:
    """Serve HTTP while `reading` goes on, from when the engine serves or `first_state_s` passed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = HttpServer(http_config(app, section), lambda: loop.call_soon_threadsafe(stop.set))
    reader = asyncio.create_task(reading)
    await _until(lambda: engine.accepts or reader.done(), first_state_s)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((http, reader, stopping), return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            reader.result()  # always raises: it ends only by an error
        engine.drain()
        await _until(
            lambda: not engine.num_in_flight or server.force_exit, section.shutdown_timeout_s
        )
        engine.fail_all(EngineUnavailable("the server is shutting down"))
        server.should_exit = True
        await http
    finally:
        server.should_exit = True
        for task in (reader, stopping):
            task.cancel()
        await asyncio.gather(http, reader, stopping, return_exceptions=True)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until something is so, at most `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.02)
