"""The choice of an implementation, and that each satisfies the interface."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
import triton

from kernels import dispatch
from kernels.dispatch import Ops, select_ops
from topspin.errors import ConfigError
from topspin.plan.precision import Format

NAMES = ("cpu", "deterministic", "reference", "triton")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selects_by_name(name: str, dtype: torch.dtype) -> None:
    assert select_ops(name, dtype).name == name


@pytest.mark.parametrize(
    ("name", "formats"), [*((name, []) for name in NAMES), ("cpu", ["int4"]), ("cpu", ["int8"])]
)
def test_signatures_are_those_of_the_interface(name: str, formats: list[Format]) -> None:
    ops = select_ops(name, torch.float32, formats)
    names = [n for n, f in inspect.getmembers(Ops, inspect.isfunction) if not n.startswith("_")]
    assert len(names) > 10
    for op in names:
        wanted = list(inspect.signature(getattr(Ops, op)).parameters.values())[1:]
        assert list(inspect.signature(getattr(ops, op)).parameters.values()) == wanted, op


def test_unknown_kernels_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*cpu, deterministic, reference, triton"):
        select_ops("abacus", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype)):
        select_ops("cpu", dtype)


@pytest.mark.parametrize("name", ["cpu", "deterministic"])
def test_the_hosts_kernels_do_not_run_on_a_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels {name} do not run on cuda:1"):
        select_ops(name, torch.float32, device="cuda:1")


def test_triton_on_the_host_takes_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert select_ops("triton", torch.float32, device="cuda").name == "triton"
    with pytest.raises(ConfigError, match=r"kernels triton on the CPU: .*TRITON_INTERPRET=1"):
        select_ops("triton", torch.float32)


def test_a_gpu_is_not_given_to_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(ConfigError, match="triton on cuda:1: TRITON_INTERPRET=1 is in"):
        select_ops("triton", torch.float32, device="cuda:1")


def test_a_host_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package triton is not installed"):
        select_ops("triton", torch.float32, device="cuda")


@pytest.mark.slow
def test_what_is_not_chosen_is_not_imported() -> None:
    """A GPU's host needs no numba, one without a GPU no Triton, plain weights no others' code."""
    program = """
import sys, torch
from kernels.dispatch import select_ops
select_ops("reference", torch.float32)
assert not {"triton", "numba"} & sys.modules.keys(), "reference"
select_ops("triton", torch.float32, device="cuda")
assert "numba" not in sys.modules, "triton"
select_ops("cpu", torch.float32)
assert "kernels.cpu.quantised" not in sys.modules
"""
    compiled = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, check=False, env=compiled)
    assert (done.returncode, done.stderr) == (0, b"")
