"""Shared by all tests: an interpreted Triton without a GPU, time limits, a terminal's signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings


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
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    spare_the_interpreter()

# An example takes as long as a busy machine makes it take; pytest's timeout finds one that hangs.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

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
