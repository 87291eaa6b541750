"""Lost nodes whose processes may live: their connections have ended, and nobody has said why.

On a busy host a process may get no time for as long as a heartbeat waits. It keeps its weights, and
comes back as soon as it runs: that is much sooner than another one would have started. One that
does not come is taken for dead. Owns their process ids and the time that they have. Pure. Called by
failover.py.
"""

from __future__ import annotations

from server.scheduler.nodes.roster import Member

# As long as the supervisor waits for a silent scheduler.
COMES_BACK_S = 5.0
# The same while the others cannot serve, so that another one can start in time.
COMES_BACK_AWAITED_S = 2.0


class Unheard:
    """The processes of one engine whose end is not certain, by place in `lost`."""

    def __init__(self) -> None:
        self.lost: dict[Member, tuple[int, float]] = {}

    def lose(self, member: Member, pid: int, now: float) -> None:
        """Note that the connection of a node has ended."""
        self.lost[member] = pid, now

    def take(self, member: Member) -> int | None:
        """Return, once, the process that was lost in a place which is taken again."""
        pid, _ = self.lost.pop(member, (None, 0.0))
        return pid

    def take_overdue(self, now: float, *, waiting_since_s: float | None) -> list[int]:
        """Return, once, the processes that have not come back in time.

        `waiting_since_s`: the others cannot serve since then; None: they can.
        """
        overdue = []
        for member, (_, lost_s) in self.lost.items():
            end_s = lost_s + COMES_BACK_S
            if waiting_since_s is not None:
                end_s = min(end_s, max(lost_s, waiting_since_s) + COMES_BACK_AWAITED_S)
            if now > end_s:
                overdue.append(member)
        return [self.lost.pop(member)[0] for member in overdue]
