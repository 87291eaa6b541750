"""A runtime that computes on the host and records the order that streams and events give.

Work on one stream is in order; work on two is ordered only by events. `StreamGraph.check()` finds
pairs of operations on the same memory, one of which writes, that no event orders, and memory that
its stream's allocator may reuse while another stream still uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.runtime import HostRuntime

Clock = dict[int, int]


@dataclass
class Op:
    """One operation: its place in its stream, and the operations known to come before it."""

    name: str
    label: tuple[Any, ...]
    stream: int
    place: int
    before: Clock

    def follows(self, other: Op) -> bool:
        """Say whether `other` has ended before this begins."""
        return self.before.get(other.stream, 0) >= other.place


@dataclass
class _Memory:
    """A storage: the stream of its allocation (None: before the recording) and its last uses.

    `uses` has the last read and the last write of each stream: earlier ones are ordered before
    these.
    """

    ref: StorageWeakRef
    born_on: int | None
    uses: dict[tuple[int, bool], Op] = field(default_factory=dict)


class _Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def seconds_since(self, earlier: _Event) -> float:
        return 0.0


class RecordedStream:
    """A stream whose waits can be left out, to show that the check finds missing waits."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock: Clock = {number: 0}
        self.ignores_waits = False

    def record(self, *, timed: bool = False) -> _Event:
        return _Event(dict(self.clock))

    def wait_for(self, event: _Event) -> None:
        if self.ignores_waits:
            return
        for stream, place in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), place)


class StreamGraph(HostRuntime):
    """Implements kernels.runtime.Runtime; record with `with graph.recording():`."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.streams = [RecordedStream(0)]
        self.ops: list[Op] = []
        self.problems: list[str] = []
        self._current = self.streams[0]
        self._label: tuple[Any, ...] = ()
        self._memories: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []

    def current_stream(self) -> RecordedStream:
        return self._current

    def new_stream(self) -> RecordedStream:
        self.streams.append(RecordedStream(len(self.streams)))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def label(self, *label: Any) -> Iterator[None]:
        """Label the operations enqueued inside."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def recording(self) -> TorchDispatchMode:
        """Return the context in which operations are recorded."""
        return _Recorder(self)

    def depends(self, later: tuple[Any, ...], earlier: tuple[Any, ...]) -> bool:
        """Say whether any operation of `later` has to wait for one of `earlier`."""
        late = [op for op in self.ops if op.label == later]
        early = [op for op in self.ops if op.label == earlier]
        assert late, later
        assert early, earlier
        return any(b.follows(a) for b in late for a in early)

    def add(self, name: str, reads: list[Any], writes: list[Any], made: list[Any]) -> None:
        """Record one operation, and check it against all before it."""
        stream = self._current
        stream.clock[stream.number] += 1
        op = Op(name, self._label, stream.number, stream.clock[stream.number], dict(stream.clock))
        self.ops.append(op)
        self._find_freed()
        if made:
            self._check_reuse(op)
        for is_write, storages in ((False, reads), (True, writes + made)):
            for storage in storages:
                self._use(op, storage, is_write, born_here=storage in made)

    def _use(self, op: Op, storage: Any, is_write: bool, *, born_here: bool) -> None:
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = _Memory(StorageWeakRef(storage), op.stream if born_here else None)
            self._memories[storage._cdata] = memory
        for (_, was_write), other in memory.uses.items():
            if (is_write or was_write) and not op.follows(other) and op is not other:
                self.problems.append(f"{op.name} {op.label} races {other.name} {other.label}")
        memory.uses[op.stream, is_write] = op

    def _find_freed(self) -> None:
        for key in [key for key, each in self._memories.items() if each.ref.expired()]:
            self._freed.append(self._memories.pop(key))

    def _check_reuse(self, op: Op) -> None:
        """Check an allocation: it may get any memory freed to its stream's pool so far."""
        mine = [each for each in self._freed if each.born_on == op.stream]
        self._freed = [each for each in self._freed if each.born_on not in (None, op.stream)]
        for other in (other for memory in mine for other in memory.uses.values()):
            if not op.follows(other):
                self.problems.append(
                    f"{op.name} {op.label} may get memory that {other.name} {other.label} uses"
                )


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: StreamGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        reads, writes = [], []
        schema = func._schema.arguments
        named = [(schema[idx], each) for idx, each in enumerate(args)]
        by_name = {argument.name: argument for argument in schema}
        named += [(by_name[name], each) for name, each in kwargs.items()]
        for argument, value in named:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    (writes if is_written else reads).append(leaf.untyped_storage())
        known = {storage._cdata for storage in reads + writes}
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        made = [
            each.untyped_storage() for each in results if each.untyped_storage()._cdata not in known
        ]
        # A view computes nothing.
        if made or writes:
            self._graph.add(str(func), reads, writes, made)
        return out


def call(body: Callable[[], None], graph: StreamGraph) -> None:
    """Run `body` as a step: recorded, without autograd's references."""
    with torch.inference_mode(), graph.recording():
        body()
