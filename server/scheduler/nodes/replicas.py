"""Attention replicas: an attention node, and its stages if it has some.

Owns that grouping, by place. A replica serves only with all of its nodes, so the loss of one is the
loss of all. Pure. Called by side.py, recovery.py, failover.py and
service.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.scheduler.nodes.roster import Member


class Replicas:
    """The replicas of one engine. `stages` are the attention nodes of its stages, by index."""

    def __init__(self, stages: Sequence[int] = ()) -> None:
        self._of = {Member("stage", index): of for index, of in enumerate(stages)}

    def stages(self, attention: int) -> list[Member]:
        """Return the stages of an attention node, in the order of their layers."""
        return [stage for stage, of in self._of.items() if of == attention]

    def index(self, member: Member) -> int | None:
        """Return the attention node of a node of its replica; None for other nodes."""
        return member.index if member.role == "attention" else self._of.get(member)

    def together(self, member: Member) -> list[Member]:
        """Return all nodes that serve only together with `member`, and itself."""
        index = self.index(member)
        if index is None:
            return [member]
        return [Member("attention", index), *self.stages(index)]
