"""`topspin serve` as benchmarks start it, its metrics and memory, and requests for random tokens.

Owns the command, a free port and a log. Knows nothing of what is measured. Called by the benchmarks
of whole engines.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.experiment import ended_by_signals
from benchmarks.load.client.runner import check_complete, run_load
from benchmarks.load.client.targets import first_model
from benchmarks.load.contracts import BenchRequest, LoadPattern, LoadRun, Target
from benchmarks.load.figures.series import decode_rate
from benchmarks.load.started_server import StartedServer, free_port
from models.sources.hub import DEFAULT_MODEL
from topspin.errors import EngineUnavailable
from topspin.plan.file import print_plan
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import OFF

READY_TIMEOUT_S = 300.0
METRICS_TIMEOUT_S = 30.0
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Streams(NamedTuple):
    """Requests of random token ids that decode at the same time; lengths in tokens."""

    requests: int
    prompt_len: int
    output_len: int
    vocab_size: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the prompts: new ones for every seed, so that no cache helps."""
        rng = random.Random(seed)
        lengths = [self.prompt_len] * self.requests
        return [[rng.randrange(self.vocab_size) for _ in range(length)] for length in lengths]


class Metrics(dict[str, float]):
    """The samples of a server's /metrics by name, summed over their labels."""

    @classmethod
    def read(cls, text: str) -> Metrics:
        """Return the samples of /metrics' text."""
        sums = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def __missing__(self, name: str) -> float:
        raise EngineUnavailable(f"/metrics has no {name}")


class TopspinServer(StartedServer):
    """Runs `topspin serve` while its `with` block runs; `model` and `ready_s` are set inside."""

    def __init__(
        self,
        asked: Sequence[str] | EnginePlan,
        *,
        log: Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        tree: Path | None = None,
    ) -> None:
        """`asked`: the model and flags, or a plan; `tree`: a checkout with its .venv.

        Without a `log` the server's is thrown away. Nothing is drafted unless `asked` for: how fast
        drafts make an answer depends on its text.
        """
        self._plan = asked if isinstance(asked, EnginePlan) else None
        flags = [] if isinstance(asked, EnginePlan) else [*asked]
        if self._plan is None and not any("--speculative-config" in each for each in flags):
            flags += ["--speculative-config", OFF]
        self._has_log = log is not None
        port = free_port()
        python = sys.executable if tree is None else str(tree.resolve() / ".venv/bin/python")
        super().__init__(
            shlex.join([python, "-P", "-m", "topspin", "serve", *flags, "--port", str(port)]),
            url=f"http://127.0.0.1:{port}",
            log=log or Path("server.log"),
            ready_timeout_s=ready_timeout_s,
            cwd=tree,
        )

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        if self._plan is not None:
            (folder / "plan.yaml").write_text(print_plan(self._plan))
            self.words += ["--plan", str(folder / "plan.yaml")]
        if not self._has_log:
            self._log = folder / "server.log"
        begun_s = time.perf_counter()
        try:
            super().__enter__()
        except BaseException:
            self._folder.cleanup()
            raise
        self.ready_s = time.perf_counter() - begun_s
        try:
            self.model = first_model(self.url)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server; its log, if nobody asked for it, goes too."""
        super().stop()
        self._folder.cleanup()

    def pss_bytes(self) -> int:
        """Return the proportional set size of the supervisor and all its descendants."""
        return sum(pss_bytes(pid) for pid in descendants(self.pid))

    def serving_cpu_s(self) -> float:
        """Return the processor's seconds of gateway, scheduler and this client so far."""
        return time.process_time() + sum(
            cpu_s(pid)
            for pid in descendants(self.pid)
            if any(name in command_line(pid) for name in ("server.gateway", "server.scheduler"))
        )

    def metrics(self) -> Metrics:
        """Return the samples of /metrics; raises EngineUnavailable if it does not answer."""
        try:
            response = httpx.get(f"{self.url}/metrics", timeout=METRICS_TIMEOUT_S)
            return Metrics.read(response.raise_for_status().text)
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.url}/metrics: {error}") from error

    def generate(self, streams: Streams, turn: int) -> LoadRun:
        """Return the greedy answers of a turn."""
        requests = [
            BenchRequest(prompt=prompt, max_tokens=streams.output_len)
            for prompt in streams.prompts(turn)
        ]
        return ask_at_once(Target(self.url, self.model, extra_body=GREEDY), requests)

    def decode_rate(self, streams: Streams, turn: int) -> float:
        """Return tokens per second while the answers of all streams decoded."""
        rate = decode_rate(self.generate(streams, turn).records, streams=streams.requests)
        if rate is None:
            raise SystemExit("the requests never decoded all at once; take longer outputs")
        return rate


def ask_at_once(target: Target, requests: Sequence[BenchRequest]) -> LoadRun:
    """Send all requests at once; raises EngineUnavailable unless all are answered."""
    run = run_load(target, requests, LoadPattern(max_concurrency=len(requests)))
    check_complete(run, target.base_url)
    return run


@contextmanager
def running(
    asked: Mapping[str, Sequence[str] | EnginePlan],
) -> Iterator[dict[str, TopspinServer]]:
    """Run servers beside each other; signals end them too."""
    with ended_by_signals(), ExitStack() as started:
        yield {name: started.enter_context(TopspinServer(each)) for name, each in asked.items()}


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a benchmark that leaves flags which it does not know to `topspin serve`."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="name it first if flags of topspin serve follow (%(default)s)",
    )
    parser.add_argument("--start-timeout", type=float, default=READY_TIMEOUT_S, metavar="S")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def descendants(pid: int) -> list[int]:
    """Return `pid` and all its descendants."""
    return [pid, *(each for child in children_of(pid) for each in descendants(child))]


def children_of(pid: int) -> list[int]:
    """Return the processes that `pid` started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def command_line(pid: int) -> str:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def cpu_s(pid: int) -> float:
    """Return the processor's seconds of a process so far, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
