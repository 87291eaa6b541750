"""The HTTP gateway: OpenAI-compatible requests in, tokens to the scheduler, text out.

`service` starts the process, `app` holds the routes, `handler` has the course of a request: its
dialect (`dialects`, over the fields of `bodies` and the grammars of `grammars`) prepares it,
`generation` runs it, and the dialect writes the answer. It knows no tensors and no scheduling. Any
number of gateways may serve one engine.
"""
