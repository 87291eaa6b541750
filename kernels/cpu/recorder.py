"""Records a step on the CPU while it runs, to be replayed as one program.

Owns what a recording holds: every launch of a compiled kernel, and the few torch operations that
have a kernel here; allocations and views need none. Any other torch operation ends the
recording, and such steps run as before (kernels.recordings then calls the body again each time).
Tensors that are made while recording lie in memory that the runtime's recordings share
(`kernels.cpu.step_memory`), all else that is made belongs to the recording; so do the places at
which its thread stamps the flight recorder (`topspin.trace.Ring`). Knows no layer and no kind of
stamp.
`CpuRuntime` is the host's runtime of `kernels.runtime` with such recordings.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.compiled import rows
from kernels.cpu.compiled.program import Op, Program, Team
from kernels.cpu.compiled.python_calls import call_again, call_python
from kernels.cpu.compiled.runtime import (
    Kernel,
    float_word,
    is_recording,
    offsets,
    record,
    recording,
)
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.system import now_ns
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from kernels.cpu.step_memory import StepMemory
from kernels.runtime import HostRuntime, Replay
from topspin.trace import RECORD_BYTES, Ring, Stamps

WORDS, BUFFER, CAPACITY, KIND_AND_PLACE = offsets(4)
"""The arguments of `stamp`: addresses of a ring's words and buffer; a record's last 8 bytes."""


_PLACE, _SIGNED = Struct("<HHHH"), Struct("<q")


class RecordedRing:
    """A ring whose stamps are part of recordings."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._buffer = addressof(c_char.from_buffer(ring.buffer))

    @property
    def step(self) -> int:
        """The step of the next stamps."""
        return self._ring.step

    @step.setter
    def step(self, step: int) -> None:
        self._ring.step = step

    def stamp(self, kind: int, layer: int = 0, micro_batch: int = 0, peer: int = 0) -> None:
        """Record that an event of the current `step` has ended now."""
        ring = self._ring
        ring.stamp(kind, layer, micro_batch, peer)
        (place,) = _SIGNED.unpack(_PLACE.pack(kind, layer, micro_batch, peer))
        record(stamp, (ring.words.buffer_info()[0], self._buffer, ring.capacity, place))


@Kernel
def stamp(block: int) -> None:
    """Write one record; one task."""
    if claim_task(block, 0) == 0:
        words = simd.read_i64(block + WORDS)
        count = simd.read_i64(words)
        place = count % simd.read_i64(block + CAPACITY) * RECORD_BYTES
        record_at = simd.read_i64(block + BUFFER) + place
        simd.write_i64(record_at, now_ns())
        simd.write_i64(record_at + 8, simd.read_i64(words + 8))
        simd.write_i64(record_at + 16, simd.read_i64(block + KIND_AND_PLACE))
        simd.write_i64(words, count + 1)
        finish_task(block, 0)
    wait_for_tasks(block, 0, 1)


_log = logging.getLogger("recordings")


class Recorder:
    """The ops of one step, in order, and the tensors that they use."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self.ops: list[Op] = []
        self.kept: list[object] = []
        self.obstacle: str | None = None
        """The first reason why no program can hold this step."""

    def add(
        self,
        kernel: Kernel,
        arguments: Sequence[int],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Append an op."""
        self.ops.append(Op(kernel, tuple(arguments), otherwise))

    def refuse(self, reason: str) -> None:
        """Give up this recording; the first reason is kept."""
        self.obstacle = self.obstacle or reason


class CpuRuntime(HostRuntime):
    """The host, whose recordings are programs."""

    def __init__(self) -> None:
        self._team: Team | None = None
        self.programs: weakref.WeakSet[Program] = weakref.WeakSet()
        """Those in use, for who measures them."""
        self.step_memory = StepMemory()

    def capture(self, body: Callable[[], None]) -> Replay:
        """Run `body` and record it; the first call of the result does nothing: the work is done.

        What `body` makes keeps its content until another recording is made or replayed.
        """
        self.synchronize()
        self.step_memory.begin()
        recorder = Recorder(self.step_memory)
        with recording(recorder), _Watch(recorder):
            body()
        if recorder.obstacle is not None:
            _log.info("steps of this kind are not recorded: %s", recorder.obstacle)
            return _after_first(body)
        program = Program(recorder.ops, self._threads(), recorder.kept)
        self.programs.add(program)
        return _after_first(program.run)

    def prepare_capture(self) -> None:
        self._threads()
        for kernel in (*_KERNELS, stamp, call_python):
            kernel.address  # noqa: B018, compiles it

    def synchronize(self) -> None:
        """Wait until no thread is in a program any more: what programs read may change then."""
        if self._team is not None:
            self._team.wait_until_left()

    def _threads(self) -> Team:
        """Return the team of as many threads as torch has now."""
        if self._team is None or self._team.num_threads != torch.get_num_threads():
            self._team = Team(torch.get_num_threads())
        return self._team

    def stamps_of(self, ring: Ring | None) -> Stamps | None:
        return None if ring is None else RecordedRing(ring)

    def call_again(self, action: Callable[[], None]) -> None:
        call_again(action)


def _after_first(action: Callable[[], None]) -> Replay:
    """Return a function that does nothing when it is called first, and then `action`."""
    calls = iter([lambda: None])
    return lambda: next(calls, action)()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch operation of a body while it runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first operation seen imports all of torch.compile, for seconds.
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_recording():
            return result
        recorder = self._recorder
        if recorder.obstacle is None and (func in _ALLOCATIONS or func in _GATHERS):
            result = recorder.memory.moved(result)
        recorder.kept.append((args, kwargs, result))
        if func in _ALLOCATIONS or _is_view(func):
            return result
        translate = _TRANSLATIONS.get(func)
        if translate is None or not translate(recorder, result, *args, **(kwargs or {})):
            recorder.refuse(_describe(func, args))
        return result


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _describe(func: Any, args: Sequence[Any]) -> str:
    shapes = ", ".join(
        f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
        for each in args
        if isinstance(each, Tensor)
    )
    return f"{func}({shapes})"


_aten: Final = torch.ops.aten
_ALLOCATIONS: Final = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


_GATHERS: Final = frozenset({_aten.index.Tensor, _aten.index_select.default})
"""Operations with a kernel here whose result is a new tensor."""


def _take_rows(recorder: Recorder, out: Tensor, table: Tensor, indices: Tensor) -> bool:
    if not (table.is_contiguous() and indices.is_contiguous() and indices.dtype == torch.int64):
        return False
    row_bytes = table.stride(0) * table.itemsize
    recorder.add(
        rows.copy_rows,
        (table.data_ptr(), row_bytes, indices.data_ptr(), indices.numel(), out.data_ptr()),
    )
    return row_bytes % 2 == 0


def _index(recorder: Recorder, out: Tensor, table: Tensor, indices: Sequence[Any]) -> bool:
    return len(indices) == 1 and _take_rows(recorder, out, table, indices[0])


def _index_select(
    recorder: Recorder, out: Tensor, table: Tensor, dim: int, indices: Tensor
) -> bool:
    if dim == 0:
        return _take_rows(recorder, out, table, indices)
    if not (table.dim() == 2 and table.dtype == torch.int32 and table.is_contiguous()):
        return False
    size = (len(table), table.shape[1])
    recorder.add(
        rows.look_up,
        (table.data_ptr(), *size, indices.data_ptr(), len(indices), out.data_ptr()),
    )
    return indices.is_contiguous() and indices.dtype == torch.int64


def _add(recorder: Recorder, out: Tensor, total: Tensor, term: object, *, alpha: float = 1) -> bool:
    if not (isinstance(term, Tensor) and term.shape == total.shape and alpha == 1):
        return False
    if not (total.is_contiguous() and term.is_contiguous()):
        return False
    return _combine(recorder, total, term, replaces=False)


def _copy(recorder: Recorder, out: Tensor, target: Tensor, source: Tensor, *_: bool) -> bool:
    if not (target.shape == source.shape and target.is_contiguous() and source.is_contiguous()):
        return False
    return _combine(recorder, target, source, replaces=True)


def _combine(recorder: Recorder, total: Tensor, term: Tensor, *, replaces: bool) -> bool:
    if any(each.dtype not in (torch.bfloat16, torch.float32) for each in (total, term)):
        return False
    recorder.add(
        rows.add_numbers,
        (
            total.data_ptr(),
            int(total.dtype == torch.bfloat16),
            term.data_ptr(),
            int(term.dtype == torch.bfloat16),
            total.numel(),
            int(replaces),
        ),
    )
    return True


def _clip(
    recorder: Recorder,
    out: Tensor,
    numbers: Tensor,
    lowest: float | None = None,
    greatest: float | None = None,
) -> bool:
    if lowest is None or greatest is None:
        return False
    if not (numbers.dtype == torch.bfloat16 and numbers.is_contiguous()):
        return False
    # torch rounds the bounds to the dtype of the numbers.
    bounds = torch.tensor([lowest, greatest], dtype=torch.bfloat16).tolist()
    words = [float_word(bound) for bound in bounds]
    recorder.add(rows.clip_numbers, (numbers.data_ptr(), numbers.numel(), *words))
    return True


_KERNELS: Final = (
    rows.copy_rows,
    rows.look_up,
    rows.add_numbers,
    rows.clip_numbers,
)

_TRANSLATIONS: Final[dict[Any, Callable[..., bool]]] = {
    _aten.index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.add_.Tensor: _add,
    _aten.copy_.default: _copy,
    _aten.clamp_.default: _clip,
}
"""By torch operation, a function that records the same work; False: it cannot."""
