"""Detection of a node that is much slower than its peers: those of its role on the same device.

Owns the rule, and which nodes are slow now. Nothing is done about such a node but telling: work is
shared by speed anyhow (planning/load_balancing.py, experts/balance.py). Pure: whoever asks has the
nodes' times for the same work. Called by service.py about every second in which steps run.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from server.scheduler.nodes.roster import Member
from topspin.plan.spec import EnginePlan

# As many times slower than the median of its peers is slow, and below the other is not, any more.
SLOW = 3.0
EVEN = 2.0
# So many times in a row, a second apart: a moment's load of a host is none of a node's.
NUM_TIMES = 30


class Slowness:
    """The slow nodes of one engine; `slow` says how many times slower each is."""

    def __init__(self, plan: EnginePlan) -> None:
        self._device = {
            Member(each.role, each.index): each.device for each in (*plan.attention, *plan.experts)
        }
        self._num_times: dict[Member, int] = {}
        self.slow: dict[Member, float] = {}

    def heard(self, times: Mapping[Member, float]) -> list[str]:
        """Note how long each node takes for the same work; returns what is new, to be logged."""
        news = []
        ratios = {member: self._ratio(member, times) for member in times}
        self._num_times = {
            member: self._num_times.get(member, 0) + 1
            for member, ratio in ratios.items()
            if ratio >= SLOW
        }
        for member, ratio in ratios.items():
            if member in self.slow and ratio < EVEN:
                del self.slow[member]
                news.append(f"{member} is not slow any more")
            elif member in self.slow:
                self.slow[member] = ratio
            elif self._num_times.get(member, 0) >= NUM_TIMES:
                self.slow[member] = ratio
                news.append(f"{member} is {ratio:.1f} times slower than its peers")
        for member in self.slow.keys() - times.keys():
            del self.slow[member]
        return news

    def _ratio(self, member: Member, times: Mapping[Member, float]) -> float:
        """Return how many times slower a node is than its peers; 1 without any."""
        peers = [
            time
            for other, time in times.items()
            if other != member
            and other.role == member.role
            and self._device[other] == self._device[member]
        ]
        return times[member] / median(peers) if peers and median(peers) > 0 else 1.0
