"""The check of named GPUs: the questions, the messages, and when there is no message."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from app.launch import gpu_check
from app.launch.gpu_check import TorchBuild, check_gpus, driver_answer, torch_build
from topspin.errors import ConfigError

FOR_GPUS, FOR_CPUS = TorchBuild("2.13.0+cu130", "13.0"), TorchBuild("2.13.0+cpu", None)


def test_torch_is_asked_without_importing_it() -> None:
    ask = (
        "import sys; from app.launch.gpu_check import torch_build; "
        "print(*torch_build(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [torch.__version__, str(torch.version.cuda), "False"]


def test_a_torch_that_cannot_be_read_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_build() is None


def test_the_driver_is_asked() -> None:
    answer = driver_answer()
    if torch.cuda.is_available():
        assert answer == str(torch.cuda.device_count())
    else:  # a torch for CPUs does not see existing GPUs
        assert answer == "none" or answer.isdecimal() or answer.startswith("error")


# Replaces the driver's library in the asking process.
FAKE_DRIVER = """
import ctypes

class Driver:
    def __init__(self, name):
        assert name == "libcuda.so.1"

    def cuInit(self, flags):
        return {status}

    def cuDeviceGetCount(self, count):
        count._obj.value = 3
        return {count_status}

ctypes.CDLL = Driver
"""


@pytest.mark.parametrize(
    ("status", "count_status", "answer"),
    [(0, 0, "3"), (100, 0, "0"), (804, 0, "error 804"), (0, 3, "error 3")],
)
def test_what_a_driver_answers(
    monkeypatch: pytest.MonkeyPatch, status: int, count_status: int, answer: str
) -> None:
    fake = FAKE_DRIVER.format(status=status, count_status=count_status)
    monkeypatch.setattr(gpu_check, "_ASK_DRIVER", fake + gpu_check._ASK_DRIVER)
    assert driver_answer() == answer


def test_a_driver_that_does_not_come_back_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_ASK_DRIVER", "raise SystemExit(7)")
    assert driver_answer().startswith("error ")


@pytest.mark.parametrize(
    ("devices", "build", "driver", "reason"),
    [
        ("cuda:1 cpu", FOR_CPUS, "8", "cuda:1: torch 2.13.0.cpu is"),
        ("cuda:0", FOR_GPUS, "none", "cuda:0: this machine has no NVIDIA driver"),
        ("cuda:0", FOR_GPUS, "0", "cuda:0: the driver shows 0 GPUs"),
        ("cuda:0 cuda:10 cuda:9", FOR_GPUS, "10", "cuda:10: the driver shows 10 GPUs"),
        ("cuda:2", None, "1", "cuda:2: the driver shows 1 GPUs"),
        # Those that may be there are left to the nodes.
        ("cuda:0 cuda:1 cpu", FOR_GPUS, "2", None),
        ("cuda:0", FOR_GPUS, "error 999", None),
        ("cuda:0", None, "", None),
        ("cpu cpu", FOR_CPUS, "none", None),
        ("", FOR_CPUS, "none", None),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    devices: str, build: TorchBuild | None, driver: str, reason: str | None
) -> None:
    refused = pytest.raises(ConfigError, match=f"^device {reason}") if reason else nullcontext()
    with refused:
        check_gpus(devices.split(), build=lambda: build, driver=lambda: driver)
