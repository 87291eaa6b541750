"""The choice of an implementation, and that each satisfies the interface."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernels.dispatch import Ops, select_ops
from topspin.errors import ConfigError

NAMES = ("cpu", "deterministic", "reference")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selects_by_name(name: str, dtype: torch.dtype) -> None:
    assert select_ops(name, dtype).name == name


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_interface(name: str) -> None:
    ops = select_ops(name, torch.float32)
    names = [n for n, f in inspect.getmembers(Ops, inspect.isfunction) if not n.startswith("_")]
    assert len(names) > 10
    for op in names:
        wanted = list(inspect.signature(getattr(Ops, op)).parameters.values())[1:]
        assert list(inspect.signature(getattr(ops, op)).parameters.values()) == wanted, op


def test_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*cpu, deterministic, reference"):
        select_ops("abacus", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype)):
        select_ops("cpu", dtype)
