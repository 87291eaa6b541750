"""An engine that computes nothing: it streams tokens to a gateway at a steady rate.

Takes the scheduler's place on the control plane, for benchmarks of the gateway. Every period it
sends each running request one token: all in one message, as one engine's step does, or in several
groups, evenly over the period, as engines that are out of step do. Reports the send time of each
token: at SIGTERM, or when its parent ends, it writes `{seed: [send times]}` as JSON to standard
output, in seconds of the machine's monotonic clock; the seed identifies the request. Run as
`python -m benchmarks.gateway.engine_stub --control ADDRESS --period-ms 51.2`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence

from topspin.messages import (
    AbortRequest,
    AddRequest,
    EngineState,
    Hello,
    Message,
    Outputs,
    RequestOutput,
    RequestQueued,
    Stats,
    StatsQuery,
)
from topspin.processes.channel import ControlServer, PeerGone, Received

TOKENS = range(300, 40_000)


class EngineStub:
    """Serves one gateway; `sent` are the send times of every token, by the request's seed."""

    def __init__(
        self,
        control: ControlServer,
        *,
        period_s: float,
        num_groups: int = 1,
        max_request_tokens: int = 4096,
    ) -> None:
        self._control = control
        self._max_request_tokens = max_request_tokens
        self._turn_s = period_s / num_groups
        self._num_groups = num_groups
        self._gateway: bytes | None = None
        self._running: dict[str, AddRequest] = {}
        self._rng = random.Random(0)
        self.sent: dict[int, list[float]] = {}
        self.is_stopping = False

    def serve(self) -> None:
        """Answer until is_stopping; a late step is sent at once and does not shift the schedule."""
        next_step_s = time.monotonic()
        group = 0
        while not self.is_stopping:
            timeout_s = max(0.0, next_step_s - time.monotonic()) if self._running else 0.1
            for event in self._control.poll(timeout_s):
                if isinstance(event, PeerGone):
                    self._gateway = None
                    self._running.clear()
                elif isinstance(event, Received):
                    self._handle(event.peer, event.message)
            now_s = time.monotonic()
            if not self._running:
                next_step_s = now_s
            elif now_s >= next_step_s:
                self._step(group)
                group = (group + 1) % self._num_groups
                next_step_s += self._turn_s

    def _handle(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            self._gateway = peer
            ready = EngineState(state="ready", max_request_tokens=self._max_request_tokens)
            self._control.send(peer, ready)
        elif isinstance(message, AddRequest):
            self._running[message.request_id] = message
            self.sent[message.sampling.seed] = []
            self._control.send(peer, RequestQueued(request_ids=(message.request_id,)))
        elif isinstance(message, AbortRequest):
            self._running.pop(message.request_id, None)
        elif isinstance(message, StatsQuery):
            self._control.send(peer, self._stats(message.query_id))

    def _stats(self, query_id: int) -> Stats:
        return Stats(
            query_id=query_id,
            num_waiting=0,
            num_running=len(self._running),
            kv_cache_usage=0.0,
            num_blocks=1,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
            num_steps=max(map(len, self.sent.values()), default=0),
            prompt_tokens=0,
            generation_tokens=sum(map(len, self.sent.values())),
            step_seconds=0.0,
        )

    def _step(self, group: int) -> None:
        outputs = []
        now_s = time.monotonic()
        for request_id, request in list(self._running.items()):
            if request.sampling.seed % self._num_groups != group:
                continue
            times = self.sent[request.sampling.seed]
            is_last = len(times) + 1 == request.sampling.max_tokens
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    index=len(times),
                    token_ids=(self._rng.choice(TOKENS),),
                    finish_reason="length" if is_last else None,
                )
            )
            times.append(now_s)
            if is_last:
                del self._running[request_id]
        if self._gateway is not None:
            self._control.send(self._gateway, Outputs(outputs=tuple(outputs)))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, then write the send times."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway.engine_stub", description=__doc__
    )
    parser.add_argument("--control", required=True, help="address to listen on")
    parser.add_argument("--period-ms", type=float, required=True, help="time between steps")
    parser.add_argument("--groups", type=int, default=1, help="of requests, one after another")
    parser.add_argument("--max-request-tokens", type=int, default=4096, help="as said to gateways")
    args = parser.parse_args(argv)
    control = ControlServer(args.control)
    stub = EngineStub(
        control,
        period_s=args.period_ms / 1e3,
        num_groups=args.groups,
        max_request_tokens=args.max_request_tokens,
    )

    def stop(*_: object) -> None:
        stub.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    stub.serve()
    json.dump(stub.sent, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
