"""The origin data of every benchmark result, and the writing of results.

Owns the JSON envelope (commit, machine, versions, date) and the results folder. Knows
no benchmark.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "transformers", "pyzmq", "msgspec", "numpy")


def machine() -> dict[str, Any]:
    """Return the processor's name, usable cores and memory of this machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that matter to speed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the working tree, with `+` if it has uncommitted changes.

    TOPSPIN_COMMIT gives it for a tree copied without its history.
    """
    root = Path(__file__).parent.parent
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TOPSPIN_COMMIT", "unknown")
    return name.stdout.strip()


def write(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write `result` with its envelope to NAME.json in `folder` (RESULTS) and return the path."""
    folder = RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    envelope = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **result,
    }
    path.write_text(json.dumps(envelope, indent=2) + "\n")
    return path
