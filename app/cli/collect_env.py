"""`topspin collect-env`: the facts about machine and versions that a bug report needs.

Owns gathering and printing; reads no setting and changes nothing. torch is asked in a separate
process: the command line itself never imports it. Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec

import topspin
from topspin.units import format_size

TORCH_TIMEOUT_S = 120.0

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "gguf",
    "llguidance",
    "msgspec",
    "pyzmq",
    "fastapi",
    "uvicorn",
    "transformers",
    "triton",
)
# The flags that decide which matrix kernels torch can use.
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")

_ASK_TORCH = """
import json, torch

def describe(index):
    gpu = torch.cuda.get_device_properties(index)
    return (
        f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
        f"{gpu.total_memory / 2**30:.1f} GiB)"
    )

print(json.dumps({
    "build": torch.version.git_version[:10],
    "cuda": torch.version.cuda or "none",
    "hip": getattr(torch.version, "hip", None) or "none",
    "threads": torch.get_num_threads(),
    "interop threads": torch.get_num_interop_threads(),
    "cpu capability": torch.backends.cpu.get_cpu_capability(),
    "onednn": torch.backends.mkldnn.is_available(),
    "gpus": [describe(index) for index in range(torch.cuda.device_count())],
}))
"""


def collect() -> dict[str, str]:
    """Return the facts in printing order; one that cannot be found out says so."""
    settings = {name: value for name, value in sorted(os.environ.items()) if _is_relevant(name)}
    return {
        "topspin": topspin.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        **_machine(),
        "gpu driver": _gpu_driver(),
        **{name: _version(name) for name in PACKAGES},
        **_torch(),
        **settings,
    }


def _machine() -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", "").split()
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": fields.get("model name", "unknown"),
        "cpu flags": " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none of note",
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "cgroup cpu limit": _read(Path("/sys/fs/cgroup/cpu.max")).strip() or "unknown",
        "memory": format_size(page_bytes * os.sysconf("SC_PHYS_PAGES")),
        "memory free": format_size(page_bytes * os.sysconf("SC_AVPHYS_PAGES")),
    }


def _gpu_driver() -> str:
    """Return the version text of NVIDIA's kernel module, which needs neither torch nor CUDA."""
    for line in _read(Path("/proc/driver/nvidia/version")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "NVRM version":
            return " ".join(value.split())
    return "none loaded"


def _torch() -> dict[str, str]:
    """Return the facts about torch, asked in a separate process."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            capture_output=True,
            timeout=TORCH_TIMEOUT_S,
            check=True,
        )
        answers = msgspec.json.decode(asked.stdout, type=dict[str, str | int | bool | list[str]])
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"torch facts": f"not available: {' '.join(last)}"}
    except (subprocess.TimeoutExpired, OSError, ValueError, msgspec.DecodeError) as error:
        return {"torch facts": f"not available: {error}"}
    return {f"torch {name}": _format(value) for name, value in answers.items()}


def _format(value: str | int | bool | list[str]) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_relevant(name: str) -> bool:
    return name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "TRITON_")) or name in (
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TOPSPIN_CACHE",
        "TOPSPIN_LOG_LEVEL",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no flag."""


def run(parsed: argparse.Namespace) -> int:
    """Print the facts, one per line; returns the exit status."""
    facts = collect()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return 0
