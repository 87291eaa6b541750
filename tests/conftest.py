"""Shared by all tests: threads that do not spin, interpreted Triton, garbage, limits, signals."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings


def load_torch() -> bool:
    """Import torch, whose threads wait without spinning here; say whether it has a GPU.

    Beside other tests on two cores a thread that spins takes the core of the one that it waits for:
    tests of two threads took up to ten times as long. OpenMP's library reads the variable once,
    when it is loaded; processes that tests start choose for themselves.
    """
    chosen = os.environ.get("GOMP_SPINCOUNT")
    os.environ["GOMP_SPINCOUNT"] = chosen or "0"
    import torch

    if chosen is None:
        del os.environ["GOMP_SPINCOUNT"]
    return torch.cuda.is_available()


def spare_the_interpreter() -> None:
    """Take from Triton's interpreter what takes more than half of its time and tests nothing.

    It patches Triton's language at every launch and again at every call of a helper; once is enough
    for the life of this process. And it computes whether an integer operation overflows, but
    asserts it in debug mode only.
    """
    from triton import language
    from triton.runtime import interpreter

    everything = {"tl": language, "core": language.core}
    interpreter._patch_lang(SimpleNamespace(__globals__=everything))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


# Triton reads the variable once, at import. transformers imports Triton too, so it is set here and
# not next to the tests of kernels.
if not load_torch():
    os.environ["TRITON_INTERPRET"] = "1"
    spare_the_interpreter()

# An example takes as long as a busy machine makes it take; pytest's timeout finds one that hangs.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without garbage collections, and keep what they import out of later ones.

    With torch, transformers and all tests that is a million objects: a collection takes half a
    second, and pytest, nodes and tests ask for some. Others come a tenth as often as by default.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(7_000, 10, 10)
        gc.enable()


# A soak test has its own limit. On a GPU a kernel's first launch compiles it.
LONG_LIMIT_S = 300


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))


@pytest.fixture
def terminal_signals() -> Iterator[None]:
    """Handle SIGINT and SIGHUP as a program in the foreground of a terminal does.

    A background job (`make test &`, nohup) inherits them ignored: a test that sends one to its own
    process would never receive it.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
