"""Preparing the next expert table while this one is served.

Owns the one change that is under way and how much of it is done at a time: a bounded piece
after each step, and consecutive pieces while the node is idle. So a step waits for one piece at
most, and no second thread competes for the interpreter. Knows no channel; worker.py passes the
tables in and sends the answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from expert_nodes.experts import Experts
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.description.config import load_model_config
from topspin.errors import CheckpointError
from topspin.expert_table import ExpertTable
from topspin.messages import TablePrepared
from topspin.plan.spec import NodeConfig

# Work stops after this time, so that a step can run; a piece that has begun is finished.
WORK_S = 0.001


class TableChange:
    """The preparation of a table (PrepareTable) by expert node `index`; one at a time."""

    def __init__(
        self,
        experts: Experts,
        *,
        model_path: Path,
        config: NodeConfig,
        index: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises CheckpointError if the files have other experts than those in use."""
        self._check = check
        self._experts = experts
        self._index = index
        self._reader = ExpertReader(
            Checkpoint(model_path),
            load_model_config(model_path, config.model.hf_overrides),
            dtype=getattr(torch, config.model.dtype),
            device=experts.runtime.device,
        )
        self._logger = logging.getLogger("expert")
        self._pieces: Iterator[None] | None = None
        self._version = 0
        # The reason for a refusal, until it is sent.
        self._refusal: str | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether work() has something to do."""
        return self._pieces is not None or self._refusal is not None

    def start(self, table: ExpertTable) -> None:
        """Begin to prepare `table`; an unfinished one is cancelled.

        A table that the device has no memory for, or whose experts another checkpoint has by now,
        is refused: the one in use stays. A table prepared under the same version is dropped first.
        """
        self.cancel()
        self._version = table.version
        self._experts.drop_from(table.version)
        held = tuple(table.experts_of(self._index))
        lacking = self._experts.lacking(held)
        if lacking is not None:
            self._refuse(lacking)
        else:
            self._pieces = self._experts.prepare(table.version, held, self._reader)

    def cancel(self) -> None:
        """Give up the change."""
        self._pieces = self._refusal = None
        self._reader.close()

    def work(self) -> TablePrepared | None:
        """Work for about a millisecond; returns the answer once the table is ready or refused.

        It is refused, too, if the checkpoint cannot be read any more.
        """
        if self._refusal is not None:
            return self._answer()
        assert self._pieces is not None, "start() first"
        until_s = time.monotonic() + WORK_S
        try:
            for _ in self._pieces:
                if time.monotonic() >= until_s:
                    return None
            self._check()
        except (torch.OutOfMemoryError, CheckpointError) as error:
            # Other processes have taken the device memory that was free at start(), or somebody
            # has replaced the files.
            self._refuse(str(error))
        self._pieces = None
        return self._answer()

    def _answer(self) -> TablePrepared:
        refusal, self._refusal = self._refusal or "", None
        return TablePrepared(
            role="expert", index=self._index, version=self._version, refusal=refusal
        )

    def _refuse(self, reason: str) -> None:
        self.cancel()
        self._experts.drop_from(self._version)
        self._refusal = reason
        self._logger.warning(
            "expert %d: table %d is not prepared, the one in use stays: %s",
            self._index,
            self._version,
            reason,
        )
