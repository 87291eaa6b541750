"""A real `topspin serve` and its processes, for tests.

Owns starting the command on a free port, waiting for its output, and reading its process tree from
/proc. Knows no test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from app.cli.flags import read_engine
from app.cli.main import _parser
from app.cli.serve import plan_of
from models.sources.hub import resolve_model
from topspin.plan.file import print_plan
from topspin.plan.spec import EnginePlan

READY = re.compile(r"ready at (http://\S+)")
READY_TIMEOUT_S = 300.0
ROLES = {
    "attention_nodes": "attention",
    "attention_nodes.stages": "stage",
    "draft_nodes.beside_attention": "attention",
    "draft_nodes": "draft",
    "expert_nodes": "expert",
    "server.scheduler": "scheduler",
    "server.gateway": "gateway",
    "app.launch.local_node": "local",
}


Settings = Mapping[str, object]


def plan_flags(directory: Path, settings: Settings, *flags: str) -> list[str]:
    """Write the plan of `topspin serve` with `flags` and settings without a flag; return --plan."""
    parsed = _parser(["serve"]).parse_args(["serve", *flags])
    asked = {**read_engine(parsed), **settings}
    return write_plan(directory, plan_of(resolve_model(asked["path"]), **asked))


def write_plan(directory: Path, plan: EnginePlan) -> list[str]:
    """Write `plan`; return the flags that run it."""
    path = directory / f"plan-{time.monotonic_ns()}.yaml"
    path.write_text(print_plan(plan))
    return ["--plan", str(path)]


class Server:
    """`python -m topspin serve` with its output in a file. Use as a context manager.

    `module` may be another module with the same flags; with `settings`, which have no flags, it is
    started by a plan, as with a `plan`, which names the model itself; flags that a plan has no
    place for are in `gateway`. `env` is added to our environment. No layout is measured unless a
    flag asks for it.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        *flags: str,
        module: str = "topspin",
        settings: Settings | None = None,
        plan: EnginePlan | None = None,
        gateway: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        engine = [str(model), "--kv-cache-memory", "8MiB", "--layout", "shared", *flags]
        if settings is not None:
            engine = plan_flags(directory, settings, *engine)
        if plan is not None:
            engine = [*write_plan(directory, plan), *flags]
        engine += [*gateway, "--port", "0", "--served-model-name", "tiny"]
        self._start(directory, [module, "serve", *engine], env)

    def _start(
        self,
        directory: Path,
        command: list[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.output_path = directory / f"serve-{time.monotonic_ns()}.log"
        with self.output_path.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        self.url = self._wait_until_ready()
        self.pids = self.pids_by_role()

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            found = READY.search(self.output)
            if found:
                return found.group(1)
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"topspin serve exited: {self.output}")
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"not ready: {self.output}")

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def pids_by_role(self) -> dict[str, int]:
        pids: dict[str, int] = {}
        for pid in descendants(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            role = next((ROLES[word] for word in words if word in ROLES), None)
            if role is not None:
                index = words[words.index("--index") + 1] if "--index" in words else None
                pids[role if index is None else f"{role} {index}"] = pid
        return pids

    def kill(self, role: str) -> float:
        """SIGKILL a role; returns the time of it (monotonic seconds)."""
        os.kill(self.pids[role], signal.SIGKILL)
        return time.monotonic()

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def assert_nothing_left(self, timeout_s: float = 10.0) -> None:
        """Fail if a role process outlives the supervisor."""
        deadline = time.monotonic() + timeout_s
        while alive := {role for role, pid in self.pids.items() if is_running(pid)}:
            assert time.monotonic() < deadline, f"orphans: {alive}"
            time.sleep(0.01)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            status = self.wait()
            if error is None:
                assert status == 0, self.output
        if error is None:
            self.assert_nothing_left()


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below `pid`."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        for child in pids:
            found += [int(child), *descendants(int(child))]
    return found


def is_running(pid: int) -> bool:
    """Say whether `pid` exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that `pid` has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
