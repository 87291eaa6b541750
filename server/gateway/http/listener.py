"""The certificates and uvicorn's settings.

Owns the limits that hold for every connection. Knows no route and no engine; called by
server.gateway.service.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from server.gateway.http.fairness import Room, Turns, allowed_connections
from server.gateway.http.protocol import HttpProtocol
from topspin.errors import ConfigError
from topspin.plan.settings import GatewaySection

KEEP_ALIVE_S = 65
BACKLOG = 2048
# At shutdown, failed requests get this long to send their error; then connections are cut.
CUT_S = 1


class HttpServer(uvicorn.Server):
    """A uvicorn server that passes signals to `on_stop`; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT; runs in the main thread between two bytecodes."""
        if self._stopping:
            self.force_exit = True
            self.should_exit = True
        self._stopping = True
        self._on_stop()


def check_tls(section: GatewaySection) -> None:
    """Raise ConfigError for a certificate and a key that cannot be used together."""
    certificate, key = section.ssl_certfile, section.ssl_keyfile
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ConfigError("--ssl-certfile and --ssl-keyfile: give both, or none")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--ssl-certfile {certificate}, --ssl-keyfile {key}: not used: {reason}"
        ) from error


def http_config(app: ASGIApp, section: GatewaySection) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`."""
    return uvicorn.Config(
        app,
        ssl_certfile=section.ssl_certfile,
        ssl_keyfile=section.ssl_keyfile,
        http=partial(  # type: ignore[arg-type]
            HttpProtocol, room=Room(allowed_connections()), turns=Turns()
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        # Whoever connects could claim any address.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_S,
        backlog=BACKLOG,
    )
