"""The check, before a process is started, that the GPUs named in a configuration exist.

Owns two quick questions: was torch built for CUDA (read from its version file, without importing
it), and how many GPUs does the driver show (asked by a short-lived process, so that this one never
talks to the driver). A question without an answer is left to the nodes, which check again
(kernels.runtime). Called by `topspin serve`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from topspin.devices import CPU
from topspin.errors import ConfigError

ASK_TIMEOUT_S = 30.0

# cuInit and cuDeviceGetCount of the CUDA driver API; 100 is CUDA_ERROR_NO_DEVICE.
_ASK_DRIVER = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("none")
else:
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    print(0 if status == 100 else count.value if status == 0 else f"error {status}")
"""


class TorchBuild(NamedTuple):
    """The content of torch's version file: `cuda` is the version it was built for, if any."""

    version: str
    cuda: str | None


def torch_build() -> TorchBuild | None:
    """Return the build of the installed torch; None if unknown."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    spec = importlib.util.spec_from_file_location(
        "topspin_torch_version", Path(package.origin).with_name("version.py")
    )
    if spec is None or spec.loader is None:
        return None
    facts = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(facts)
        return TorchBuild(str(facts.__version__), facts.cuda)
    except (OSError, AttributeError):
        return None


def driver_answer() -> str:
    """Return the number of visible GPUs, "none" without a driver, else the error."""
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-c", _ASK_DRIVER],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return f"error {error}"
    return asked.stdout.strip()


def check_gpus(
    devices: Iterable[str],
    *,
    build: Callable[[], TorchBuild | None] = torch_build,
    driver: Callable[[], str] = driver_answer,
) -> None:
    """Raise ConfigError if one of `devices` ("cpu", "cuda:N") is known to be missing here."""
    gpus = sorted({int(device.partition(":")[2]) for device in devices if device != CPU})
    if not gpus:
        return
    torch = build()
    if torch is not None and torch.cuda is None:
        raise ConfigError(
            f"device cuda:{gpus[0]}: torch {torch.version} is built without CUDA; install one of "
            "torch's builds for GPUs"
        )
    answer = driver()
    if answer == "none":
        raise ConfigError(
            f"device cuda:{gpus[0]}: this machine has no NVIDIA driver (libcuda.so.1)"
        )
    if answer.isdecimal() and gpus[-1] >= int(answer):
        raise ConfigError(
            f"device cuda:{gpus[-1]}: the driver shows {answer} GPUs (see CUDA_VISIBLE_DEVICES); "
            "cuda gives each node one of its own, cuda:N all nodes of a role that one"
        )
