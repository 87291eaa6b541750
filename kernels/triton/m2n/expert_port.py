"""The expert node's side of M2N between GPUs: gather after a wait, and reply.

Owns the device's side of all pairs: the sequences that were answered, the headers that came, and
the buffers in which the rows of all participants are joined. Each participant of a step has the
bucket's number of rows in the batch, first its rows and then padding with slot -1: so the host
knows the places of rows in advance. Knows no memory and
no weights; see `kernels.m2n_windows` and `kernels.triton.m2n.attention_port`. Called by
m2n_comm.gpu.ipc_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.m2n_windows import (
    HEADER_WORDS,
    AnswerWindow,
    Control,
    RequestWindow,
    WindowShape,
    signed,
)
from kernels.triton.m2n.attention_port import TYPES, address_table
from kernels.triton.m2n.expert_kernels import await_request, gather_row, send_row


class Joined(NamedTuple):
    """Rows of P participants, `bucket` each: hidden [P * bucket, H], slots, weights [.., K]."""

    hidden: Tensor
    slots: Tensor
    weights: Tensor


class ExpertPort:
    """The pairs of one expert node with all M attention nodes, B micro-batches each.

    `gather` and `reply` alternate, on one stream; neither waits on the host. Faults on the device
    are kept in `control`; after one no answers are sent.
    """

    def __init__(
        self,
        shape: WindowShape,
        requests: Sequence[RequestWindow],
        answers: Sequence[AnswerWindow],
        *,
        control: Control,
        step: Tensor,
        limits: Tensor,
        incarnation: int,
        peers: Sequence[int],
        compute: torch.dtype,
    ) -> None:
        """Windows are listed by peer, then micro-batch; `peers` are M incarnations.

        `step` i64[8 + M] holds m2n_windows.step_words on the device, the participants numbered
        as in `peers`; limits i64[L] the slots of each layer here. Raises ValueError for windows
        that are not aligned, or do not belong to M peers.
        """
        if len(requests) != len(answers) or not peers or len(requests) % len(peers):
            raise ValueError(
                f"{len(requests)} request windows, {len(answers)} answer windows, "
                f"{len(peers)} peers"
            )
        self.shape = shape
        self._control = control
        self._step = step
        self._limits = limits
        self._num_peers = len(peers)
        self._num_micro_batches = len(requests) // len(peers)
        device = step.device
        self._requests = address_table(requests, device)
        self._answers = address_table(answers, device)
        identity = [signed(each) for each in (incarnation, *peers)]
        self._identity = torch.tensor(identity, dtype=torch.int64, device=device)
        self._consumed = torch.zeros(len(requests), dtype=torch.int64, device=device)
        headers = (self._num_peers, HEADER_WORDS)
        self._headers = torch.zeros(headers, dtype=torch.int64, device=device)
        self._done = torch.zeros(self._num_peers, dtype=torch.int32, device=device)
        rows = self._num_peers * shape.rows
        self._joined = Joined(
            torch.zeros(rows, shape.hidden_size, dtype=compute, device=device),
            torch.full((rows, shape.top_k), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, shape.top_k, dtype=torch.float32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of its device memory, without windows."""
        counters = (self._consumed, self._headers, self._done, self._identity)
        tables = (self._requests, self._answers)
        return sum(each.nbytes for each in (*self._joined, *counters, *tables))

    def gather(
        self,
        micro_batch: int,
        *,
        layer: int,
        num_participants: int,
        bucket: int,
        part: int = 0,
        parts: int = 1,
    ) -> Joined:
        """Return the rows of all participants, valid until the next gather().

        Raises ValueError for more rows or participants than there are windows for.
        """
        self._check(num_participants, bucket)
        rows = num_participants * bucket
        joined = Joined(*(each[:rows] for each in self._joined))
        shape = self.shape
        await_request[(num_participants,)](
            self._requests,
            self._consumed,
            self._identity[1:],
            self._step,
            self._headers,
            self._control.failed,
            self._control.addresses,
            self._num_micro_batches,
            bucket,
            micro_batch,
            layer,
            part,
            parts,
            num_warps=4,
        )
        gather_row[(num_participants, bucket)](
            self._requests,
            self._limits,
            self._step,
            self._headers,
            self._control.failed,
            self._control.addresses,
            *joined,
            shape.hidden_size,
            self._num_micro_batches,
            bucket,
            micro_batch,
            layer,
            WIRE=TYPES[shape.wire],
            COMPUTE=TYPES[joined.hidden.dtype],
            COMPRESSED=shape.is_compressed,
            K=shape.top_k,
            K_PAD=triton.next_power_of_2(shape.top_k),
            H_PAD=triton.next_power_of_2(shape.hidden_size),
            num_warps=4,
        )
        return joined

    def reply(self, partial: Tensor, micro_batch: int, *, num_participants: int) -> None:
        """Send partial [P * bucket, H] of the last gather() back, each row to its sender.

        Raises ValueError for a partial that does not fit.
        """
        bucket, odd = divmod(len(partial), max(num_participants, 1))
        self._check(num_participants, bucket)
        if odd or partial.shape[1] != self.shape.hidden_size or not partial.is_floating_point():
            raise ValueError(f"reply: partial is {partial.dtype} {tuple(partial.shape)}")
        if partial.stride(1) != 1:
            partial = partial.contiguous()
        send_row[(num_participants, bucket)](
            self._answers,
            self._consumed,
            self._step,
            self._identity,
            self._headers,
            self._done,
            self._control.failed,
            partial,
            self.shape.hidden_size,
            self._num_micro_batches,
            partial.stride(0),
            bucket,
            micro_batch,
            ANSWER=TYPES[self.shape.answer],
            H_PAD=triton.next_power_of_2(self.shape.hidden_size),
            num_warps=4,
        )

    def _check(self, num_participants: int, bucket: int) -> None:
        if not 0 < num_participants <= self._num_peers:
            raise ValueError(f"{num_participants} participants of {self._num_peers}")
        if not 0 < bucket <= self.shape.rows:
            raise ValueError(f"{bucket} rows, windows for 1 to {self.shape.rows}")
