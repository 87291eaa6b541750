"""Has the CPU's kernels compiled before an engine starts for the first time on a machine.

Owns which modules an engine's nodes on the CPU take kernels from. A node would compile them
itself, one after the other, while nobody sees how far it is; here two processes do
(kernels.precompile), and a bar shows it. Imports no kernel. Called by topspin.serve_command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from topspin.code_cache import KERNELS, is_missing
from topspin.config import EngineConfig
from topspin.process import PARENT_PID_VARIABLE

TITLE: Final = "compiling kernels for this processor, once"
_ATTENTION: Final = ("numba_attention", "numba_sampling", "numba_layer", "numba_matmul")
_EXPERTS: Final = ("numba_experts",)
_QUANTISED: Final = ("quantised_kernels",)


def needed_modules(config: EngineConfig) -> tuple[str, ...]:
    """Return the modules of kernels/ whose compiled code the nodes of `config` use."""
    nodes = config.nodes
    attends = nodes.attention.kernels == "cpu"
    has_experts = nodes.num_experts > 0 and nodes.experts.kernels == "cpu"
    modules = _ATTENTION if attends else ()
    if config.model.quantization != "none":
        return (*modules, *_QUANTISED) if attends or has_experts else ()
    return (*modules, *_EXPERTS) if has_experts else modules


def compile_ahead(config: EngineConfig) -> None:
    """Have what is not in the cache compiled; does nothing from the second start on.

    A failure is only told: nodes compile what they do not find.
    """
    names = [name for name in needed_modules(config) if is_missing(KERNELS / f"{name}.py")]
    if not names:
        return
    # Attention takes as long as the others together.
    shares = [names]
    if len(names) > 1 and len(os.sched_getaffinity(0)) > 1:
        shares = [names[:1], names[1:]]
    statuses = _compile(shares)
    if any(statuses):
        print(
            f"kernels were not compiled ahead (exit statuses {statuses}): the nodes will",
            file=sys.stderr,
            flush=True,
        )


def _compile(shares: Sequence[Sequence[str]]) -> list[int]:
    """Run a process for each share of modules and show progress; returns their exit statuses."""
    # Only now: the supervisor stays small, and this happens once.
    from rich.console import Console
    from rich.progress import track

    path = os.pathsep.join(filter(None, [str(KERNELS.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, PARENT_PID_VARIABLE: str(os.getpid())}
    reader, writer = os.pipe()
    with open(reader) as done:
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "kernels.precompile", *share],
                stdout=writer,
                env=environment,
            )
            for share in shares
        ]
        os.close(writer)
        console = Console(stderr=True)
        if not console.is_terminal:
            print(TITLE, file=sys.stderr, flush=True)
        # A line per module, and the end when all processes have ended.
        for _ in track(
            done,
            TITLE,
            total=sum(map(len, shares)),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        ):
            pass
    return [process.wait() for process in processes]
