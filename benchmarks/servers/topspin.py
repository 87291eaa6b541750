"""`topspin serve` as benchmarks start it, its memory, and requests for random tokens.

Owns the command, a free port and a log. Knows nothing of what is measured. Called by the benchmarks
of whole engines.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.load.client.runner import check_complete, run_load
from benchmarks.load.client.targets import first_model
from benchmarks.load.contracts import BenchRequest, Load, Run, Target
from benchmarks.load.figures.series import decode_rate
from benchmarks.load.started_server import StartedServer, free_port
from models.sources.hub import DEFAULT_MODEL
from topspin.plan.file import print_plan
from topspin.plan.spec import EnginePlan

READY_TIMEOUT_S = 300.0
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


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

        Without a `log` the server's is thrown away.
        """
        self._plan = asked if isinstance(asked, EnginePlan) else None
        flags = () if isinstance(asked, EnginePlan) else asked
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

    def generate(self, prompts: Sequence[list[int]], output_len: int) -> Run:
        """Send all prompts at once, and return greedy answers of `output_len` tokens."""
        target = Target(self.url, self.model, extra_body=dict[str, Any](GREEDY))
        requests = [BenchRequest(prompt=prompt, max_tokens=output_len) for prompt in prompts]
        run = run_load(target, requests, Load(max_concurrency=len(prompts)))
        check_complete(run, self.url)
        return run

    def decode_rate(self, prompts: Sequence[list[int]], output_len: int) -> float:
        """Return tokens per second while all prompts' answers decoded."""
        rate = decode_rate(self.generate(prompts, output_len).records, streams=len(prompts))
        if rate is None:
            raise SystemExit("the requests never decoded all at once; take longer outputs")
        return rate


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


def random_prompts(seed: int, *, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random token ids: new ones for every seed, so that no cache helps."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def descendants(pid: int) -> list[int]:
    """Return `pid` and all its descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += descendants(int(child))
    return found


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
