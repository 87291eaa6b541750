"""The cache of compiled kernels, and their launch on several threads.

A kernel is a function of one address that numba compiles to machine code. `Kernel` compiles
it when it is first needed, logs that, and keeps the code in the user's cache directory, under a
name that changes with the sources: the modules of the kernel and of the functions that it inlines,
those of `kernels.cpu.simd` and this one, and the constants that they have from other modules.
`launch` runs it on the threads of torch's own OpenMP pool (GOMP_parallel of the library that
torch has loaded), so that no second pool competes for the cores; that takes about 2 us on two
threads and half a microsecond on one.

Every thread of a launch gets the same address, of a block: the header of its tasks
(`kernels.cpu.simd.tasks`), then the kernel's arguments, 8 bytes each. Results do not depend on the
number of threads.

Knows no tensor and no kernel. Safe for several launching threads: each has a separate team and
block. Used by the modules of `kernels.cpu.compiled`; a node's warm-up runs
each kernel once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import struct
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

import numba
import numpy as np
import torch
from numba.core import types
from numba.core.dispatcher import Dispatcher

from kernels.cpu.simd.lanes import HIDDEN_VARIABLE, STACK_BYTES
from kernels.cpu.simd.tasks import HEADER_BYTES, IS_UNDONE

PREPARED_VARIABLE = "TOPSPIN_PREPARED_KERNELS"
"""A folder like numba's cache, which an image has; it may be read-only."""

Function = TypeVar("Function", bound=Callable[..., Any])


_logger = logging.getLogger("kernels")
_compiling = threading.Lock()
_local = threading.local()
_NEW_HEADER: Final = (0,) * (HEADER_BYTES // 8)


def offsets(count: int) -> range:
    """Return the offsets inside a block of a kernel's `count` arguments, in their order."""
    return range(HEADER_BYTES, HEADER_BYTES + 8 * count, 8)


def inlined(function: Function) -> Function:
    """Let numba compile a function that kernels call; its code becomes part of each kernel.

    Without `forceinline` a kernel just compiled would call this process's copy of the function, and
    one from the cache its own: tests, which mostly compile, would test other code than users run.
    """
    return cast("Function", numba.njit(error_model="numpy", forceinline=True)(function))


class Kernel:
    """A function (block: int) -> None, compiled at the first use of its address.

    `runs_here`: whether this processor has the instructions that it is written in; LLVM ends the
    process that compiles others.
    """

    def __init__(self, function: Callable[[int], None], *, runs_here: bool = True) -> None:
        self.name = function.__name__
        self.runs_here = runs_here
        self._function = function

    @cached_property
    def address(self) -> int:
        """Return the address of the machine code, from the cache if it is there."""
        with _compiling, _code_cache(_sources(self._function)) as keeps:
            started = time.monotonic()
            compiled = numba.cfunc(types.void(types.int64), cache=keeps, error_model="numpy")
            self._compiled = compiled(self._function)
            if not self._compiled.cache_hits:
                # app.launch.display counts these lines.
                name, elapsed_s = self.name.strip("_"), time.monotonic() - started
                _logger.info("compiled kernel %s for this processor (%.1f s)", name, elapsed_s)
            return self._compiled.address or 0


def compiled(num_arguments: int) -> Callable[[Function], Function]:
    """Return a decorator: Python and kernels call the function with unsigned 64-bit numbers.

    It is compiled at once, or comes from the cache, and returns a signed number. The interpreter's
    lock is not released: for calls of microseconds, after which getting it back may take longer.
    """
    signature = types.int64(*(types.uint64,) * num_arguments)

    def compile_it(function: Function) -> Function:
        with _compiling, _code_cache(_sources(function)) as keeps:
            made = numba.njit(signature, error_model="numpy", cache=keeps)(function)
        return cast("Function", made)

    return compile_it


def launch(kernel: Kernel, arguments: Sequence[int], *, num_threads: int) -> None:
    """Run `kernel` with `arguments` on `num_threads` threads, including this one.

    If this thread is recording(), its recorder gets them too.
    """
    record(kernel, arguments)
    # An array of ctypes takes several times as long to fill.
    block = array("q", (*_NEW_HEADER, *arguments))
    address, _ = block.buffer_info()
    openmp = _openmp()
    if num_threads == 1 or openmp is None:
        make_callable(kernel.address)(address)
        return
    openmp.parallel(kernel.address, address, num_threads, 0)


def launch_alone(kernel: Kernel, arguments: Sequence[int], otherwise: Callable[[], None]) -> None:
    """Run `kernel` on this thread; `otherwise` does its work if it leaves that undone.

    If this thread is recording(), its recorder gets both, and nothing of `otherwise`.
    """
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.add(kernel, arguments, otherwise)
    block = array("q", (*_NEW_HEADER, *arguments))
    address, _ = block.buffer_info()
    make_callable(kernel.address)(address)
    if not block[IS_UNDONE // 8]:
        return
    if recorder is None:
        otherwise()
    else:
        with recording(None):
            otherwise()


class LaunchRecorder(Protocol):
    """Gets the launches of a thread."""

    def add(
        self,
        kernel: Kernel,
        arguments: Sequence[int],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Take a launch, which also happens. With `otherwise` it is one of launch_alone()."""

    def refuse(self, reason: str) -> None:
        """Take notice that something happens that no recording can hold."""


@contextmanager
def recording(recorder: LaunchRecorder | None) -> Iterator[None]:
    """Give `recorder` the launches of this thread; None: nobody."""
    outer = getattr(_local, "recorder", None)
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = outer


def is_recording() -> bool:
    """Return whether this thread records."""
    return getattr(_local, "recorder", None) is not None


def record(
    kernel: Kernel, arguments: Sequence[int], otherwise: Callable[[], None] | None = None
) -> None:
    """Give the launch of a kernel to the recorder of this thread, if there is one."""
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.add(kernel, arguments, otherwise)


def refuse_recording(reason: str) -> None:
    """Tell the recorder of this thread, if there is one, what a recording cannot hold."""
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.refuse(reason)


def float_word(value: float) -> int:
    """Return the word of a block that `kernels.cpu.simd.lanes.read_f32` reads as `value`."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class _OpenMP:
    """The OpenMP library that torch uses (GNU's names)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.parallel = library.GOMP_parallel
        self.parallel.restype = None
        self.parallel.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
        )


@cache
def _openmp() -> _OpenMP | None:
    """Find torch's OpenMP library; None: not found, and launches use one thread."""
    try:
        # Symbols are also looked up in the libraries that this one is linked to.
        return _OpenMP(ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")))
    except (OSError, AttributeError):
        return None


@cache
def make_callable(address: int) -> Callable[[int], None]:
    """Make machine code callable; the interpreter's lock is released while it runs."""
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


class _Sources(NamedTuple):
    """What machine code is made of: `files`, and the `constants` that functions name, as text."""

    files: tuple[str, ...]
    constants: tuple[str, ...]


def _sources(function: Callable[..., Any]) -> _Sources:
    """Return what a function and the compiled functions that it names are made of."""
    files: set[str] = set()
    constants: set[str] = set()
    seen, waiting = {function}, [function]
    while waiting:
        current = waiting.pop()
        files.add(current.__code__.co_filename)
        found = set()
        for name in current.__code__.co_names:
            value = current.__globals__.get(name)
            if isinstance(value, Dispatcher):
                found.add(value.py_func)
            elif isinstance(value, int | float | str | tuple | np.generic):
                constants.add(f"{current.__module__}.{name} = {value!r}")
            elif num_bytes := getattr(value, STACK_BYTES, None):
                constants.add(f"{current.__module__}.{name} = {num_bytes} bytes")
        waiting += found - seen
        seen |= found
    return _Sources(tuple(sorted(files)), tuple(sorted(constants)))


@contextmanager
def _code_cache(sources: _Sources) -> Iterator[bool]:
    """Set numba's cache directory for code from `sources`; yields False if none is usable.

    It is $NUMBA_CACHE_DIR, else `numba` in Topspin's cache, and in it a directory named
    by a digest of the sources that the code comes from: numba compares the time of one
    file only. What $TOPSPIN_PREPARED_KERNELS has of it is copied there first. Code in a place that
    cannot be written is used from a copy, since numba takes no other.
    """
    directory = _cache_root() / _digest(sources)
    ready = [directory, Path(os.environ.get(PREPARED_VARIABLE) or directory, directory.name)]
    with contextlib.ExitStack() as stack:
        if not _is_made(directory):
            found = next((each for each in ready if each.is_dir()), None)
            own = None if found is None else _temporary_directory(stack)
            if found is None or own is None:
                yield False
                return
            directory = Path(shutil.copytree(found, own / directory.name))
        setattr(numba.config, "CACHE_DIR", str(directory))  # noqa: B010, numba sets it so itself
        yield True


def _is_made(directory: Path) -> bool:
    """Return whether a cache directory is there now, and can be written."""
    try:
        _copy_prepared(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _temporary_directory(stack: contextlib.ExitStack) -> Path | None:
    """Return a directory until `stack` ends; None: there is no place, not even in memory."""
    for place in (None, "/dev/shm"):
        with contextlib.suppress(OSError):
            return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
    return None


def _copy_prepared(directory: Path) -> None:
    """Fill a cache directory that is not there yet from one that cannot be written, if there is."""
    prepared = os.environ.get(PREPARED_VARIABLE)
    if not prepared or directory.exists() or not Path(prepared, directory.name).is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as own:
        copy = Path(own, directory.name)
        shutil.copytree(Path(prepared, directory.name), copy)
        with contextlib.suppress(OSError):  # another process was faster
            copy.rename(directory)


def _cache_root() -> Path:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    if chosen := os.environ.get("TOPSPIN_CACHE"):
        return Path(chosen) / "numba"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "topspin" / "numba"


@cache
def _digest(sources: _Sources) -> str:
    digest = hashlib.sha256(f"{numba.__version__} {os.environ.get(HIDDEN_VARIABLE)}".encode())
    shared = sorted((Path(__file__).parents[1] / "simd").glob("*.py"))
    for source in (*shared, Path(__file__), *map(Path, sources.files)):
        digest.update(source.read_bytes())
    digest.update("\n".join(sources.constants).encode())
    return digest.hexdigest()[:16]
