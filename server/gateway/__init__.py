"""The HTTP gateway: OpenAI-compatible requests in, tokens to the scheduler, text out.

`service` starts the process, `app` holds the routes, `handler` runs one request. It parses,
validates, applies the chat template, tokenises and streams; it knows no tensors and no
scheduling. Any number of gateways may serve one engine.
"""

from __future__ import annotations
