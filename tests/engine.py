"""A whole engine inside the test process: every part real, with threads for processes.

Owns the wiring: server.scheduler's Service, attention and expert workers, the control channel over
an abstract socket and any transport run as they do in production, so that a matrix of layouts costs
seconds. tests/system starts the same parts as processes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from app.cli.serve import plan_of
from app.launch.engine import with_draft_addresses
from app.launch.local_node import LocalNode
from attention_nodes.command import connect_worker
from attention_nodes.stages.command import run_worker as run_stage_worker
from draft_nodes.command import run_worker as run_draft_worker
from draft_nodes.drafter import make_drafter
from expert_nodes.command import run_worker
from m2n_comm.pairing.addresses import Between
from models.description.config import load_model_config
from server.scheduler.engine_facts import read_facts
from server.scheduler.service import Service
from topspin.expert_table import ExpertTable
from topspin.messages import (
    AbortRequest,
    AddRequest,
    EngineState,
    Hello,
    Message,
    Outputs,
    RequestFailed,
    RequestQueued,
    SamplingParams,
    Stats,
    StatsQuery,
    TokenLogprobs,
    Trace,
    TraceRequest,
    pack_ints,
)
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import OFF
from topspin.processes.channel import (
    FAILOVER_HEARTBEAT,
    RELAXED_HEARTBEAT,
    ControlClient,
    ControlServer,
)
from topspin.processes.node_life import run_node

# Kernels may have to be compiled first, or are interpreted, on a busy machine.
TIMEOUT_S = 110.0


@dataclass
class Collected:
    """The outputs received for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    failed: RequestFailed | None = None
    num_cached_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.failed is not None


# Windows are small on purpose.
TINY: dict[str, Any] = {
    "transport": "local",
    "micro_batches": 1,
    "num_threads": 1,
    "dtype": "float32",
    "speculation": OFF,
    "block_size": 4,
    "kv_cache_bytes": 8 * 2**20,
    "window_rows": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
    "deadline_s": TIMEOUT_S,
    # Nobody is refused for the wait on a busy machine.
    "max_ttft_s": 0.0,
    "restart": False,
    "layout": "shared",
}


def engine_config(path: Path, **asked: Any) -> EnginePlan:
    """Return the plan of equal nodes for a tiny model, with settings as in topspin.plan.flags."""
    if load_model_config(path, asked.get("hf_overrides")).moe is None:
        asked["expert_nodes"] = 1  # more would be refused; this one is not started
    return plan_of(path, **{**TINY, **asked})


class Engine:
    """A running engine and one gateway connection to it. Use as a context manager.

    The test starts the nodes named in `external`, with `address` or start_node(). With `--restart
    on` the others start again when they end, while `may_restart` is set; `dead` has the process ids
    of lost nodes, `states` and `details` the engine states sent to the gateway, `log` the
    scheduler's log lines, each with its monotonic time. `control_of` may give a node ("expert 0")
    another address by which it reaches the scheduler.
    """

    def __init__(
        self,
        config: EnginePlan,
        *,
        external: Sequence[str] = (),
        control_of: Callable[[str, str], str] = lambda name, address: address,
    ) -> None:
        self.address = self._address = f"ipc://@topspin-test-{secrets.token_hex(8)}"
        self.config = config = with_draft_addresses(config, self._address)
        self._path = Path(config.model.path)
        self._threads: list[threading.Thread] = []
        self.exit_statuses: dict[str, int] = {}
        self.dead: list[int] = []
        self.states: list[str] = []
        self.details: list[str] = []
        self._external = external
        self._control_of = control_of
        self.log: list[tuple[float, str]] = []
        self._is_stopping = False
        self.may_restart = threading.Event()
        self.may_restart.set()
        restarts = config.failover.restart
        self._heartbeat = FAILOVER_HEARTBEAT if restarts else RELAXED_HEARTBEAT
        self._channel = ControlServer(self._address, heartbeat=self._heartbeat)
        self.service = Service(
            self._channel,
            config,
            read_facts(config.model, 1),
            clock=time.monotonic,
            logger=_recorded(self.log),
            report_dead=self.dead.append,
        )
        self._start("scheduler", self._run_service)
        self._start_nodes()
        self._client = ControlClient(self._address)
        self._client.send(Hello(role="gateway", index=0, incarnation=1, revision=_revision()))
        self.requests: dict[str, Collected] = {}
        self._num_added = 0
        self._num_queries = 0
        self.state = EngineState(state="starting")
        if not external:
            self.wait_until_ready()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopping = True
        self.may_restart.set()
        self.service.request_stop("the test is over")
        self._client.send(StatsQuery(query_id=0))  # wakes the scheduler's poll
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} does not stop"
        self._client.close()
        assert set(self.exit_statuses.values()) == {0}, self.exit_statuses

    def _start(self, name: str, target: Any) -> None:
        def run() -> None:
            self.exit_statuses[name] = target()
            while self.exit_statuses[name] and self.config.failover.restart:
                self.may_restart.wait()
                if self._is_stopping or name == "scheduler":
                    return
                self.exit_statuses[name] = target()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_service(self) -> int:
        try:
            return self.service.run()
        finally:
            self._channel.close()

    def _start_nodes(self) -> None:
        for node in self.config.drafts:
            self._start(str(node), lambda index=node.index: self._run_draft(index))
        num_experts, num_attention = len(self.config.experts), len(self.config.attention)
        if self.config.is_one_process:
            node = LocalNode(
                address=self._address,
                model_path=self._path,
                attention_nodes=num_attention,
                expert_nodes=num_experts,
            )
            self._start("local", node.run)
            return
        for index in range(num_experts):
            if f"expert {index}" not in self._external:
                self._start(f"expert {index}", lambda index=index: self._run_expert(index))
        for index in range(num_attention):
            if f"attention {index}" not in self._external:
                self._start(f"attention {index}", lambda index=index: self._run_attention(index))
        for index in range(len(self.config.stages)):
            if f"stage {index}" not in self._external:
                self._start(f"stage {index}", lambda index=index: self._run_stage(index))

    def start_node(self, name: str) -> None:
        """Start an external attention or expert node ("expert 1") as a thread."""
        role, index = name.split()
        run = self._run_attention if role == "attention" else self._run_expert
        self._start(name, lambda: run(int(index)))

    def _run_stage(self, index: int) -> int:
        transport = self.config.link.transport
        assert transport in get_args(Between)
        between = cast(Between, transport)
        return run_node(
            "stage",
            index,
            self._control_of(f"stage {index}", self._address),
            logger=logging.getLogger("stage"),
            body=lambda control: run_stage_worker(
                control, index=index, model_path=self._path, transport=between
            ),
            heartbeat=self._heartbeat,
        )

    def _run_expert(self, index: int) -> int:
        def body(control: ControlClient) -> None:
            transport = self.config.link.transport
            assert transport in get_args(Between)
            between = cast(Between, transport)
            run_worker(control, index=index, model_path=self._path, transport=between)

        return run_node(
            "expert",
            index,
            self._control_of(f"expert {index}", self._address),
            logger=logging.getLogger("expert"),
            body=body,
            heartbeat=self._heartbeat,
        )

    def _run_attention(self, index: int) -> int:
        return run_node(
            "attention",
            index,
            self._control_of(f"attention {index}", self._address),
            logger=logging.getLogger("attention"),
            body=lambda control: connect_worker(
                control, index=index, model_path=self._path, make_drafter=make_drafter
            ),
            heartbeat=self._heartbeat,
        )

    def _run_draft(self, index: int) -> int:
        return run_node(
            "draft",
            index,
            self._control_of(f"draft {index}", self._address),
            logger=logging.getLogger("draft"),
            body=lambda control: run_draft_worker(control, index=index, model_path=self._path),
            heartbeat=self._heartbeat,
        )

    def wait_until_ready(self) -> None:
        """Wait until the engine serves; with external nodes the test calls it."""
        while self.state.state != "ready":
            message = self._receive()
            assert isinstance(message, EngineState), message
            assert message.state in ("starting", "ready", "recovering"), message
            self._take(message)

    def _receive(self, timeout_s: float = TIMEOUT_S) -> Message:
        message = self._client.recv(timeout_s)
        assert message is not None, "the engine is silent"
        return message

    # Calls of a gateway.

    def add(self, prompt: Sequence[int], *, cache_salt: str = "", **sampling: Any) -> str:
        """Send a request (greedy and seeded unless `sampling` says otherwise)."""
        request_id = f"r{self._num_added}"
        self._num_added += 1
        fields = {"max_tokens": 24, "seed": 1234, "temperature": 0.0, **sampling}
        self._client.send(
            AddRequest(
                request_id=request_id,
                prompt=pack_ints(prompt),
                sampling=SamplingParams(**fields),
                cache_salt=cache_salt,
            )
        )
        self.requests[request_id] = Collected()
        return request_id

    def abort(self, request_id: str) -> None:
        self._client.send(AbortRequest(request_id=request_id))
        del self.requests[request_id]

    def collect(self, *, until: Any = None) -> None:
        """Read outputs until every request has ended (or `until()` is true)."""
        done = until or (lambda: all(each.ended for each in self.requests.values()))
        while not done():
            self._take(self._receive())

    def _take(self, message: Message) -> None:
        if isinstance(message, EngineState):
            self.state = message
            self.states.append(message.state)
            self.details.append(message.detail)
            return
        if isinstance(message, RequestFailed):
            request = self.requests[message.request_id]
            assert not request.ended, f"{message.request_id} ended twice"
            request.failed = message
            return
        if isinstance(message, RequestQueued):
            assert set(message.request_ids) <= set(self.requests)
            return
        assert isinstance(message, Outputs), message
        for output in message.outputs:
            request = self.requests.get(output.request_id, Collected())
            assert not request.ended, f"{output.request_id} ended twice"
            assert output.index == len(request.tokens) or output.request_id not in self.requests
            request.tokens += output.token_ids
            request.logprobs += output.logprobs
            request.prompt_logprobs += output.prompt_logprobs
            request.finish_reason = output.finish_reason
            request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
        """Run all prompts at once until they end; returns their output tokens."""
        ids = [self.add(prompt, **sampling) for prompt in prompts]
        self.collect()
        failures = [self.requests[each].failed for each in ids if self.requests[each].failed]
        assert not failures, failures
        return [self.requests[each].tokens for each in ids]

    def generate_during(
        self, prompts: Sequence[Sequence[int]], event: Callable[[], object], **sampling: Any
    ) -> list[Collected]:
        """Run all prompts, with `event` once each has 4 tokens, until they end; none may fail."""
        requests = [self.requests[self.add(prompt, **sampling)] for prompt in prompts]
        self.collect(until=lambda: all(len(each.tokens) >= 4 for each in requests))
        event()
        self.collect()
        assert [each.failed for each in requests] == [None] * len(requests)
        return requests

    def generate_on(
        self, prompts: Sequence[Sequence[int]], tables: Iterator[ExpertTable], **sampling: Any
    ) -> list[Collected]:
        """Run all prompts until they end, while one of `tables` after the other comes into use."""
        requests = [self.requests[self.add(prompt, **sampling)] for prompt in prompts]

        def go_on() -> bool:
            if not self.service.balancer.is_changing:
                self.service.balancer.ask(next(tables))
            return all(each.ended for each in requests)

        self.collect(until=go_on)
        assert [each.failed for each in requests] == [None] * len(requests)
        return requests

    def wait_until_whole(self) -> None:
        """Wait until no node is missing; call after a loss."""
        self.collect(until=lambda: self.state.state == "ready" and not self.details[-1])

    def clear_tokens(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, margin: float
    ) -> list[list[int]]:
        """Return each greedy continuation up to its first token that leads by less than `margin`.

        The margin is in log-probabilities. Quantised rows, and the experts chosen from them, may
        change with the last bit of a sum, so that only clear tokens are the same in any batch.
        """
        clear = []
        for prompt in prompts:
            request = self.requests[self.add(prompt, max_tokens=max_tokens, logprobs=2)]
            self.collect()
            leads = [each.top_logprobs[0] - each.top_logprobs[1] for each in request.logprobs]
            count = next((idx for idx, lead in enumerate(leads) if lead < margin), len(leads))
            clear.append(request.tokens[:count])
        return clear

    def trace(self, seconds: float) -> Trace:
        """Return the stamps of all nodes; call when no request is open."""
        self._num_queries += 1
        self._client.send(TraceRequest(query_id=self._num_queries, seconds=seconds))
        message = self._receive()
        assert isinstance(message, Trace), message
        return message

    def stats(self) -> Stats:
        """Return the scheduler's counters; call when no request is open."""
        self._num_queries += 1
        self._client.send(StatsQuery(query_id=self._num_queries))
        message = self._receive()
        assert isinstance(message, Stats), message
        return message


def _recorded(log: list[tuple[float, str]]) -> logging.Logger:
    """Return a logger that keeps its messages unformatted."""

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append((time.monotonic(), record.getMessage()))

    logger = logging.Logger("scheduler", logging.INFO)
    logger.addHandler(Recorder())
    logger.parent = logging.getLogger()  # pytest shows it, and caplog keeps it
    return logger


def _revision() -> str:
    from topspin import __version__

    return __version__
