"""A GPU's clocks, power and temperature while a benchmark runs, by nvidia-smi if it is there.

Owns a thread that asks every few seconds. A clock that fell is why a figure did. Called by
benchmarks.gpu.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

FIELDS: Final = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "celsius": "temperature.gpu",
    "busy_percent": "utilization.gpu",
}
BUSY_PERCENT: Final = 50.0
"""Clocks are those of a device that is this busy, if it ever was: an idle one's are low."""
INTERVAL_S: Final = 5.0
PATIENCE_S: Final = 10.0

Sample = dict[str, float]
Ask = Callable[[Sequence[str]], str | None]


def smi_name(device: str, visible: str | None) -> str:
    """Give what nvidia-smi calls "cuda" or "cuda:N", where CUDA_VISIBLE_DEVICES is `visible`.

    nvidia-smi sees all GPUs, and counts them otherwise than a process that is shown some.
    """
    number = device.partition(":")[2] or "0"
    shown = [each.strip() for each in (visible or "").split(",") if each.strip()]
    return shown[int(number)] if int(number) < len(shown) else number


def ask_nvidia_smi(name: str, fields: Sequence[str]) -> str | None:
    """Give nvidia-smi's line of these fields for a GPU; None if it does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [
        command,
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        "-i",
        name,
    ]
    try:
        found = subprocess.run(
            query, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def read_sample(line: str | None) -> Sample | None:
    """Give the numbers of a line; None for one that has others (a GPU may not tell)."""
    if line is None:
        return None
    try:
        values = [float(value) for value in line.split(",")]
    except ValueError:
        return None
    return dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else None


def summarise(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Give the least, median and greatest of each while the device was busy; None without any."""
    if not samples:
        return None
    taken = [each for each in samples if each["busy_percent"] >= BUSY_PERCENT] or samples
    columns = {name: [sample[name] for sample in taken] for name in FIELDS}
    return {
        "samples": len(taken),
        **{
            name: {"least": min(c), "median": statistics.median(c), "greatest": max(c)}
            for name, c in columns.items()
        },
    }


def describe(summary: Mapping[str, Any] | None) -> str:
    """Say the clocks in a line; "" without any."""
    if summary is None:
        return ""
    sm, watts = summary["sm_mhz"], summary["power_w"]
    return (
        f"SM clock {sm['median']:.0f} MHz ({sm['least']:.0f} to {sm['greatest']:.0f}), "
        f"power up to {watts['greatest']:.0f} W"
    )


class Clocks:
    """Samples from entering until leaving."""

    def __init__(self, ask: Ask, interval_s: float = INTERVAL_S) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.is_set():
            sample = read_sample(self._ask(tuple(FIELDS.values())))
            if sample is None:
                return
            self._samples.append(sample)
            self._over.wait(self._interval_s)

    def __enter__(self) -> Clocks:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def summary(self) -> dict[str, Any] | None:
        """Give what was seen; None if nothing was."""
        return summarise(self._samples)
