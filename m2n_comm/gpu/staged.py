"""Staged nets: a node whose tensors are on a device, over a transport that reads host memory.

Owns pinned buffers and the order of copies: rows that leave the device are in host memory before
the transport reads them (the host waits for one event, never the device), and copies of answers to
the device are enqueued without waiting. Knows no frame: the inner net keeps every rule of
m2n_comm.net. Serves hybrid layouts (attention on a GPU, experts on CPUs, or the other way) and GPUs
of several hosts without GPUDirect. The host takes part in every layer, so no graph can hold these
nets. Used by both nodes' start-up; belongs to the node's one busy thread.

`StagedNet.dispatch` only enqueues its copies; the frame leaves at the next call of dispatch() or
combine(), after the copies' event. So the host enqueues the next work (a shared expert) while the
device still computes the rows. Buffers are kept by micro-batch: one's copies overlap another's
wait. They start at the size of balanced micro-batches and grow to the largest seen. A net's calls
are all made on one stream: a wait for its last copy is a wait for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.runtime import Event, Runtime
from m2n_comm.net import AttentionNet, ExpertBatch, ExpertNet, NetShape, NetTimes
from m2n_comm.rules import check_rows, check_sum
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Stamps

Net = TypeVar("Net", bound=AttentionNet | ExpertNet)


def pinned(runtime: Runtime, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return a pinned host tensor [rows, width], for asynchronous copies."""
    return runtime.host_buffer(rows * width * dtype.itemsize).view(dtype).view(rows, width)


class _StagedRows:
    """The pinned buffers of one micro-batch.

    hidden [R, H], experts i64[R, K], weights f32[R, K] leave the device; answer f32[R, H]
    comes back, for the first `rows` of them.
    """

    def __init__(self, runtime: Runtime, shape: NetShape, capacity: int) -> None:
        dtype = shape.payload if shape.compressed is None else shape.compute or shape.payload
        self.capacity = capacity
        self.hidden = pinned(runtime, capacity, shape.hidden_size, dtype)
        self.experts = pinned(runtime, capacity, shape.top_k, torch.int64)
        self.weights = pinned(runtime, capacity, shape.top_k, torch.float32)
        self.answer = pinned(runtime, capacity, shape.hidden_size, torch.float32)
        self.rows = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all four."""
        return sum(each.nbytes for each in (self.hidden, self.experts, self.weights, self.answer))


class _Staged(Generic[Net]):
    """A net over `inner`, which stamps the frames and knows the tables."""

    inner: Net

    def __init__(self, inner: Net, shape: NetShape) -> None:
        self.inner = inner
        self.shape = shape

    @property
    def trace(self) -> Stamps | None:
        """The ring of the inner net."""
        return self.inner.trace

    @trace.setter
    def trace(self, trace: Stamps | None) -> None:
        self.inner.trace = trace

    @property
    def local(self) -> frozenset[int]:
        """Return the inner net's local layers."""
        return self.inner.local

    def set_table(self, table: ExpertTable) -> None:
        """See m2n_comm.net."""
        self.inner.set_table(table)


class _Unsent(NamedTuple):
    """A dispatch whose frame is not sent; its copies are done when `copied` has completed."""

    micro_batch: int
    layer: int
    rows: int
    copied: Event


class StagedNet(_Staged[AttentionNet]):
    """AttentionNet for tensors on `runtime`'s device, over `inner`, which takes host tensors.

    `max_rows` is the maximum of all micro-batches' rows in a step together.
    Invariant: `_unsent` is the dispatch not yet passed to `inner`, if there is one.
    """

    is_graph_safe: Final = False

    def __init__(
        self, inner: AttentionNet, runtime: Runtime, *, shape: NetShape, max_rows: int
    ) -> None:
        super().__init__(inner, shape)
        self._runtime = runtime
        # Micro-batch i exists if there are at least i + 1, all of about the same size.
        self._rows = [
            _StagedRows(runtime, shape, -(-max_rows // (micro_batch + 1)))
            for micro_batch in range(shape.num_micro_batches)
        ]
        self._unsent: _Unsent | None = None

    @property
    def epoch(self) -> int:
        """Return the inner net's epoch."""
        return self.inner.epoch

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of host memory that are pinned now."""
        return sum(rows.nbytes for rows in self._rows)

    def begin(self, ticket: StepTicket) -> None:
        """See m2n_comm.net."""
        self._send()
        self.inner.begin(ticket)

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None = None,
    ) -> None:
        """Enqueue the copies of device tensors; see m2n_comm.net and the module's docstring.

        The tensors may be overwritten on their stream after return, for any number of rows.
        """
        assert num_rows is None, "only graph-safe nets take padded rows"
        self._send()
        check_rows(self.shape, hidden, experts, weights)
        rows = hidden.shape[0]
        staged = self._room(micro_batch, rows)
        staged.rows = rows
        staged.hidden[:rows].copy_(hidden, non_blocking=True)
        staged.experts[:rows].copy_(experts, non_blocking=True)
        staged.weights[:rows].copy_(weights, non_blocking=True)
        copied = self._runtime.current_stream().record()
        self._unsent = _Unsent(micro_batch, layer, rows, copied)

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        """Fill out [T, H] fp32, on the device, in the order of its stream; see m2n_comm.net."""
        self._send()
        staged = self._rows[micro_batch]
        check_sum(out, (staged.rows, self.shape.hidden_size))
        # Its last copy to the device precedes the copies that _send() has waited for.
        answer = staged.answer[: staged.rows]
        out.copy_(self.inner.combine(micro_batch, layer, answer), non_blocking=True)
        return out

    def wait_s(self) -> float:
        """Return the seconds spent waiting for answers since begin(); copies do not count."""
        return self.inner.wait_s()

    def times(self) -> NetTimes:
        """Return the inner net's times since begin()."""
        return self.inner.times()

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._unsent = None
        self.inner.close()

    def _send(self) -> None:
        """Send the frame whose rows are being copied to the host."""
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            return
        unsent.copied.wait()
        staged, rows = self._rows[unsent.micro_batch], unsent.rows
        self.inner.dispatch(
            unsent.micro_batch,
            unsent.layer,
            staged.hidden[:rows],
            staged.experts[:rows],
            staged.weights[:rows],
        )

    def _room(self, micro_batch: int, rows: int) -> _StagedRows:
        """Return a micro-batch's buffers, of at least `rows` rows.

        torch's allocator keeps replaced ones until no copy needs them.
        """
        staged = self._rows[micro_batch]
        if rows > staged.capacity:
            staged = _StagedRows(self._runtime, self.shape, max(rows, 2 * staged.capacity))
            self._rows[micro_batch] = staged
        return staged


class ExpertStaging:
    """Copies an expert node's batches to the device and its answers back.

    A batch's device tensors are the same at every call: valid until the next one. Its pinned
    buffers need no separate event: to_host() waits for work enqueued after their copies.
    """

    def __init__(self, runtime: Runtime, shape: NetShape, *, num_attention: int) -> None:
        self._runtime = runtime
        self._hidden_size = shape.hidden_size
        rows, device = shape.window_rows * num_attention, runtime.device
        compute = shape.compute or shape.payload
        fields = (
            (shape.hidden_size, compute),
            (shape.top_k, torch.int32),
            (shape.top_k, torch.float32),
        )
        self._host = [pinned(runtime, rows, width, dtype) for width, dtype in fields]
        self._device = [
            torch.zeros(rows, width, dtype=dtype, device=device) for width, dtype in fields
        ]
        answers = shape.answer_rows * num_attention
        self._answer = pinned(runtime, answers, shape.hidden_size, shape.payload)

    def to_device(self, batch: ExpertBatch) -> ExpertBatch:
        """Return `batch` with its tensors on the device, for work enqueued afterwards."""
        rows = batch.hidden.shape[0]
        moved = []
        found = (batch.hidden, batch.slots, batch.weights)
        for source, host, device in zip(found, self._host, self._device, strict=True):
            host[:rows].copy_(source)
            device[:rows].copy_(host[:rows], non_blocking=True)
            moved.append(device[:rows])
        return batch._replace(hidden=moved[0], slots=moved[1], weights=moved[2])

    def to_host(self, partial: Tensor) -> Tensor:
        """Return `partial` [R, H] on the host, in the payload's dtype, once it is computed.

        Valid until the next call. Raises FrameError for a size that no answer can have.
        """
        most = self._answer.shape[0]
        fits = partial.ndim == 2 and partial.shape[1] == self._hidden_size
        if not fits or partial.shape[0] > most or not partial.is_floating_point():
            raise FrameError(
                f"reply: partial is {tuple(partial.shape)} {partial.dtype}, expected up to "
                f"{most} rows of {self._hidden_size}"
            )
        answer = self._answer[: partial.shape[0]]
        answer.copy_(partial, non_blocking=True)
        self._runtime.current_stream().record().wait()
        return answer


class StagedExpertNet(_Staged[ExpertNet]):
    """ExpertNet for experts on `runtime`'s device, over `inner`, which uses host memory.

    Invariant: `_open` is the inner net's batch without a reply and its copy on the device, if
    there is one.
    """

    is_graph_safe: Final = False
    epoch: Final = 0

    def __init__(
        self, inner: ExpertNet, runtime: Runtime, *, shape: NetShape, num_attention: int
    ) -> None:
        super().__init__(inner, shape)
        self.staging = ExpertStaging(runtime, shape, num_attention=num_attention)
        self._open: tuple[ExpertBatch, ExpertBatch] | None = None

    @property
    def busy_s(self) -> float:
        """The inner net's."""
        return self.inner.busy_s

    def begin(self, ticket: StepTicket) -> None:
        """See m2n_comm.net."""
        self.inner.begin(ticket)

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield batches whose tensors are on the device; see m2n_comm.net."""
        return self._stage(self.inner.gather(micro_batch, layer))

    def _stage(self, batches: Iterator[ExpertBatch]) -> Iterator[ExpertBatch]:
        for batch in batches:
            staged = self.staging.to_device(batch)
            self._open = batch, staged
            yield staged

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        """Wait for `partial`, on the device, and send it back; see m2n_comm.net."""
        assert self._open is not None, "gather() first"
        found, staged = self._open
        assert batch is staged, "reply() to the batch that gather() yielded last"
        self._open = None
        self.inner.reply(found, self.staging.to_host(partial))

    def finish(self) -> None:
        """See m2n_comm.net."""
        self.inner.finish()

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""
        self._open = None
        self.inner.close()
