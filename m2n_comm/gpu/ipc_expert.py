"""The expert side of cuda_ipc: implements ExpertNet; ipc_attention says how it works.

A batch has, for every participant of the ticket, as many rows as the ticket's bucket says (or a
window, if that is less): where rows lie is known before they come. Those that do not come have
slots -1, and what is replied for them goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.m2n_windows import step_words
from m2n_comm.gpu.ipc_pairs import IpcPairs
from m2n_comm.gpu.ipc_rules import Life, check_ticket, parts_of
from m2n_comm.net import ExpertBatch, NetShape
from topspin.errors import FrameError, ProtocolError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Ring


class IpcExpertNet:
    """The expert side. Invariant: `_open` is the batch that reply() owes an answer to."""

    def __init__(
        self,
        *,
        shape: NetShape,
        index: int,
        incarnation: int,
        table: ExpertTable,
        pairs: IpcPairs,
    ) -> None:
        """Serve the attention nodes of `pairs` as expert node `index`."""
        from kernels.triton.m2n.expert_port import ExpertPort

        self.shape = shape
        self.trace: Ring | None = None
        self._index = index
        self._pairs = pairs
        self._life = Life(f"expert {index}", pairs)
        self._num_slots: dict[int, Tensor] = {}
        self.set_table(table)
        self._version = table.version
        self._limits = self._num_slots[table.version].to(pairs.runtime.device, copy=True)
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
            incarnation=incarnation,
            peers=pairs.incarnations,
            compute=shape.compute or shape.payload,
        )
        self._ticket: StepTicket | None = None
        self._parts: tuple[int, ...] = (1,)
        self._epoch = 0
        self._open: ExpertBatch | None = None

    @property
    def is_graph_safe(self) -> bool:
        """Say whether the step that has begun fits into one window for each micro-batch."""
        return max(self._parts) == 1

    @property
    def epoch(self) -> int:
        """Return a number that changes whenever what was recorded is no longer right."""
        return self._epoch

    @property
    def registered_bytes(self) -> int:
        """Return the bytes held from start to close."""
        return self._pairs.registered_bytes + self._port.nbytes

    def set_table(self, table: ExpertTable) -> None:
        """Serve tickets of `table` too, beside the newest one known before it.

        Raises ProtocolError if it does not fit.
        """
        table.validate()
        if len(table.slots) != self.shape.num_layers or not self._index < table.num_nodes:
            raise ProtocolError(
                f"expert table {table.version}: {len(table.slots)} layers over "
                f"{table.num_nodes} nodes; this is expert {self._index} of "
                f"{self.shape.num_layers} layers"
            )
        held = [len(each) for each in table.experts_of(self._index)]
        self._num_slots[table.version] = torch.tensor(held, dtype=torch.int64)
        for version in sorted(self._num_slots)[:-2]:
            del self._num_slots[version]

    def begin(self, ticket: StepTicket) -> None:
        """Open a step. Enqueues its words. Raises ProtocolError."""
        self._life.look()
        assert self._open is None, "reply() to the last batch first"
        known = self._pairs.peers
        ascending = tuple(sorted(set(ticket.participants))) == ticket.participants
        if not ascending or any(index not in known for index in ticket.participants):
            raise ProtocolError(f"step {ticket.step}: participants {ticket.participants}")
        check_ticket(ticket, self.shape)
        version = ticket.table_version
        if version not in self._num_slots:
            raise ProtocolError(
                f"step {ticket.step}: expert table {version}, expert {self._index} "
                f"has {sorted(self._num_slots)}"
            )
        if version != self._version:
            self._limits.copy_(self._num_slots[version])
            self._version = version
            self._epoch += 1  # a recording has the weights of one version
        self._ticket = ticket
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

        All have a participant's bucket of rows, those beyond its count with slot -1.
        """
        self._life.check_usable()
        assert self._ticket is not None, "begin() first"
        assert micro_batch < self._ticket.num_micro_batches, "not a micro-batch of the ticket"
        assert self._open is None, "reply() to the last batch first"
        return self._rounds(self._ticket, micro_batch, layer)

    def _rounds(self, ticket: StepTicket, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        parts, count = self._parts[micro_batch], len(ticket.participants)
        bucket = min(max(ticket.row_buckets[micro_batch], 1), self.shape.window_rows)
        for part in range(parts):
            assert self._open is None, "reply() to the last batch first"
            joined = self._port.gather(
                micro_batch,
                layer=layer,
                num_participants=count,
                bucket=bucket,
                part=part,
                parts=parts,
            )
            self._life.look_if_done()
            self._open = ExpertBatch(
                micro_batch, layer, part, *joined, (bucket,) * count, ticket.table_version
            )
            yield self._open

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        """Enqueue sending partial [R, H] (any float dtype) back, each row to where it came from.

        Raises FrameError for a partial that does not fit.
        """
        self._life.check_usable()
        assert batch is self._open, "reply() to the batch that gather() yielded last"
        wanted = batch.hidden.shape
        if partial.shape != wanted or not partial.is_floating_point():
            error = FrameError(
                f"reply: partial is {tuple(partial.shape)} {partial.dtype}, expected "
                f"{tuple(wanted)}"
            )
            self._life.fail(error)
            raise error
        self._port.reply(partial, batch.micro_batch, num_participants=len(batch.row_counts))
        self._open = None
        self._life.look_if_done()

    def check(self) -> None:
        """Raise what has gone wrong so far; see IpcAttentionNet.check."""
        self._life.look()

    def finish(self) -> None:
        """Wait until all that was enqueued so far has happened, checking meanwhile."""
        self._life.settle()

    def close(self) -> None:
        """Release all memory and connections; safe to call twice."""
        self._life.close()
