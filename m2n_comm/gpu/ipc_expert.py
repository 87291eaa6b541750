"""The expert side of cuda_ipc: implements ExpertNet; ipc_attention.py describes the method.

A batch has, for every participant of the ticket, the rows of the ticket's bucket (or of a
window, if fewer), so the positions of rows are known before they arrive. Rows that do not
arrive have slots -1, and replies to them are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.m2n_windows import step_words
from m2n_comm.gpu.ipc_life import IpcLife, parts_of
from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.net import ExpertBatch
from m2n_comm.pairing.hello import Identity
from m2n_comm.rules import ExpertRules
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Stamps


class IpcExpertNet:
    """The expert side, for the attention nodes of its pairs."""

    def __init__(self, me: Identity, *, table: ExpertTable, pairs: IpcPairs) -> None:
        from kernels.triton.m2n.expert_port import ExpertPort

        shape = me.shape
        self.shape = shape
        self.trace: Stamps | None = None
        self._pairs = pairs
        self._rules = ExpertRules(
            me.index, shape, peers=pairs.peers, on_failure=pairs.control.abort
        )
        self._life = IpcLife(self._rules, pairs)
        num_slots = torch.tensor(self._rules.set_table(table), dtype=torch.int64)
        self._version = table.version
        self._limits = num_slots.to(pairs.runtime.device)
        places = [
            (place, each)
            for place in range(len(pairs.peers))
            for each in range(shape.num_micro_batches)
        ]
        self._port = ExpertPort(
            pairs.windows,
            [pairs.request(*place) for place in places],
            [pairs.answer(*place) for place in places],
            control=pairs.control,
            step=pairs.step,
            limits=self._limits,
            incarnation=me.incarnation,
            peers=pairs.incarnations,
            compute=shape.compute or shape.payload,
        )
        self._parts: tuple[int, ...] = (1,)
        self.epoch = 0

    @property
    def is_graph_safe(self) -> bool:
        """Say whether each micro-batch of the current step fits into one window."""
        return max(self._parts) == 1

    @property
    def local(self) -> frozenset[int]:
        """Return the MoE layers that attention nodes compute in this step."""
        return self._rules.local

    @property
    def busy_s(self) -> float:
        """Return 0: the host only enqueues, so nothing is measured."""
        return 0.0

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close."""
        return self._pairs.registered_bytes + self._port.nbytes

    def set_table(self, table: ExpertTable) -> None:
        """Serve tickets of `table` too, as well as of the newest earlier one.

        Raises ProtocolError if it does not fit.
        """
        self._rules.set_table(table)

    def begin(self, ticket: StepTicket) -> None:
        """Open a step. Enqueues its words. Raises ProtocolError."""
        self._life.look()
        self._rules.begin(ticket)
        version, known = ticket.table_version, self._pairs.peers
        if version != self._version:
            self._limits.copy_(torch.tensor(self._rules.num_slots))
            self._version = version
            self.epoch += 1  # a recording uses the weights of one version
        self._parts = parts_of(ticket, self.shape.window_rows)
        self._pairs.begin(
            step_words(
                patience_ns=int(self.shape.deadline_s * 1e9),
                step=ticket.step,
                version=version,
                participants=tuple(known.index(each) for each in ticket.participants),
            )
        )

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        """Yield the parts of that micro-batch, each joined over the ticket's participants.

        All have each participant's bucket of rows; rows beyond its count have slots -1.
        """
        return self._rounds(self._rules.check_gather(micro_batch), micro_batch, layer)

    def _rounds(self, ticket: StepTicket, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        parts, count = self._parts[micro_batch], len(ticket.participants)
        bucket = min(max(ticket.row_buckets[micro_batch], 1), self.shape.window_rows)
        for part in range(parts):
            self._rules.check_gather(micro_batch)
            joined = self._port.gather(
                micro_batch,
                layer=layer,
                num_participants=count,
                bucket=bucket,
                part=part,
                parts=parts,
            )
            self._life.look_if_done()
            batch = self._rules.open = ExpertBatch(
                micro_batch, layer, part, *joined, (bucket,) * count, ticket.table_version
            )
            yield batch

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        """Enqueue sending partial [R, H] (any float dtype) back, each row to its sender.

        Raises FrameError for a partial that does not fit.
        """
        with self._rules:
            self._rules.check_reply(batch, partial, len(batch.hidden))
        self._port.reply(partial, batch.micro_batch, num_participants=len(batch.row_counts))
        self._rules.open = None
        self._life.look_if_done()

    def check(self) -> None:
        """Raise the first error so far; see IpcAttentionNet.check."""
        self._life.look()

    def finish(self) -> None:
        """Wait until all enqueued work has completed, checking meanwhile."""
        self._life.settle()

    def close(self) -> None:
        """Release all memory and connections; safe to call twice."""
        self._life.close()
