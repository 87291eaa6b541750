"""The cache blocks of a node that must be in memory at once, where a file holds the others.

Owns the arithmetic: what a sequence needs while its prompt is computed, and while it decodes with
retrieval. Which blocks these are, the node decides. Called by attention_replica.py.
"""

from __future__ import annotations

from server.scheduler.planning.sequence import Request, Sequence
from topspin.plan.retrieval import RetrievalPolicy


class FrameBudget:
    """The `num_frames` blocks that one node has in memory."""

    def __init__(self, num_frames: int, *, block_size: int, policy: RetrievalPolicy) -> None:
        self.num_frames = num_frames
        self._block_size = block_size
        self._policy = policy

    def need(self, seq: Sequence) -> int:
        """Return how many frames a running sequence may need in a step.

        It grows only with its blocks, so that what fits when it is admitted fits when it decodes.
        """
        return self._need(seq, len(seq.blocks))

    def growth(self, seq: Sequence) -> int:
        """Return how many more frames a sequence with one more block needs."""
        return self._need(seq, len(seq.blocks) + 1) - self.need(seq)

    def need_of(self, request: Request, num_blocks: int) -> int:
        """Return how many a request needs while its prompt of so many blocks is computed."""
        return max(num_blocks, self._to_decode(request, num_blocks))

    def _need(self, seq: Sequence, num_blocks: int) -> int:
        if seq.num_committed < seq.length:
            return self.need_of(seq.request, num_blocks)
        return self._to_decode(seq.request, num_blocks)

    def _to_decode(self, request: Request, num_blocks: int) -> int:
        asked = request.sampling.kv_retrieval_tokens
        if asked == 0:
            return num_blocks
        policy = self._policy if asked is None else self._policy.with_tokens(asked)
        if num_blocks * self._block_size <= policy.num_resident:
            return num_blocks
        # These tokens are three runs: of each, the blocks at both ends may be used in part. A
        # sequence that has all frames for itself needs no copies.
        return min(-(-policy.num_resident // self._block_size) + 4, self.num_frames)
