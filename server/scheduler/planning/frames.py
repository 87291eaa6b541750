"""How many cache blocks of a node must be in memory at once, where a file holds the others.

Owns the arithmetic: what a sequence needs while its prompt is computed, and while it decodes with
retrieval. Which blocks these are, the node decides. Called by attention_replica.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.scheduler.planning.sequence import Request, Sequence
from topspin.retrieval import RetrievalPolicy


class FrameBudget:
    """The `num_frames` blocks that one node has in memory."""

    def __init__(self, num_frames: int, *, block_size: int, policy: RetrievalPolicy) -> None:
        self.num_frames = num_frames
        self._block_size = block_size
        self._policy = policy

    def need(self, seq: Sequence) -> int:
        """Return how many frames a running sequence may need in a step."""
        num_blocks = len(seq.blocks)
        if seq.num_committed < seq.length:
            return num_blocks
        return min(num_blocks, self._most(seq.request))

    def _most(self, request: Request) -> int:
        """Return how many frames a sequence may need while it decodes."""
        asked = request.sampling.kv_retrieval_tokens
        if asked == 0:
            return request.max_blocks
        policy = self._policy if asked is None else self._policy.with_tokens(asked)
        # Of each of the runs that these tokens are, the first and the last block may be shared.
        return -(-policy.num_resident // self._block_size) + 4

    def left(self, seqs: Iterable[Sequence]) -> int:
        """Return how many frames running sequences leave; negative: they need too many."""
        return self.num_frames - sum(map(self.need, seqs))

    def grows(self, seq: Sequence) -> bool:
        """Say whether one more block of a sequence needs one more frame."""
        return seq.num_committed < seq.length or len(seq.blocks) < self._most(seq.request)
