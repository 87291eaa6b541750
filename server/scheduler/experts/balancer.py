"""Changes of the expert table: from measured loads to a table that every node has prepared.

Owns the sequence of a change: the interval, a plan made layer by layer between the loop's other
work, PrepareTable to all nodes, their answers, and the moment from which steps name the new
version; then the table is formation.py's. Pure: no socket and no clock. service.py sends the
messages; placement.py decides where experts go.

Invariant: at most one table is being prepared, and none while a step of an older version
than the one in use is in flight; so a node never has to keep more than two tables plus the
one it prepares.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from server.scheduler.experts.balance import balance
from server.scheduler.experts.load import ExpertLoad
from server.scheduler.experts.placement import migrations, plan_table
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.roster import Member
from topspin.expert_table import ExpertTable
from topspin.plan.settings import BalancePolicy

MAX_DOUBLINGS: Final = 10
"""The most doublings of the time between plans, while nodes refuse tables."""


class BalanceStats(NamedTuple):
    """For Stats: the table in use, the experts moved so far, max/mean now and before.

    `num_local_layers` are those of the table in use.
    """

    table_version: int
    migrations: int
    balance: float
    balance_before: float
    num_local_layers: int


class ExpertBalancer:
    """The changes of one engine's expert table, and the measured load."""

    def __init__(
        self,
        formation: Formation,
        config: BalancePolicy,
        *,
        required: Sequence[int] | None = None,
    ) -> None:
        """The `required` expert nodes (None: all) together always keep every expert."""
        self._required = required
        self.load = ExpertLoad(formation, half_life_pairs=config.half_life_pairs)
        self._config = config
        self._formation = formation
        self._newest_version = formation.table.version
        self._pending: ExpertTable | None = None
        self._awaited: set[Member] = set()
        self._is_refused = False
        self._num_refused = 0
        self._plan: Generator[None, None, ExpertTable | None] | None = None
        self._wanted: ExpertTable | None = None
        self._local: tuple[int, ...] | None = None
        self._is_asked = False
        self._planned_s: float | None = None
        self._migrations = 0
        self._balance_before = 1.0

    @property
    def is_planning(self) -> bool:
        """Say whether turn() has more to do at once."""
        return self._plan is not None

    @property
    def is_changing(self) -> bool:
        """Say whether a table was asked for, or nodes have not all answered."""
        return any(each is not None for each in (self._wanted, self._local, self._pending))

    def ask(self, table: ExpertTable | None = None) -> None:
        """Plan a table at the next turn, regardless of the interval and the number of counts.

        A given `table` is used as it is, under the next version, regardless of its gain.
        """
        if table is None:
            self._is_asked = True
        else:
            self._wanted = table

    def keep_local(self, layers: tuple[int, ...]) -> None:
        """Make these the layers that are local, by a new table, at the next turn."""
        self._local = layers

    def turn(self, now: float, nodes: Iterable[Member]) -> ExpertTable | None:
        """Do a bounded piece of planning; returns a table that `nodes` must be told to prepare.

        Call it while all nodes serve, and no step in flight is of an older table than the one
        in use.
        """
        if self._pending is not None:
            return None
        if self._wanted is not None:
            table, self._wanted, self._plan = self._wanted, None, None
            return self._prepare(table, nodes)
        if self._local is not None:
            local, self._local, self._plan = self._local, None, None
            return self._prepare(msgspec.structs.replace(self._formation.table, local=local), nodes)
        if self._plan is None and not self._start(now):
            return None
        assert self._plan is not None
        try:
            next(self._plan)
        except StopIteration as stop:
            self._plan = None
            return None if stop.value is None else self._prepare(stop.value, nodes)
        return None

    def _start(self, now: float) -> bool:
        """Begin a plan if one is due and experts can move; returns whether it did."""
        if self._planned_s is None:
            self._planned_s = now
        interval_s = self._config.interval_s
        wait_s = interval_s * 2**self._num_refused
        is_time = interval_s > 0 and now - self._planned_s >= wait_s
        least_pairs = self._config.half_life_pairs / 2
        if not self._is_asked and (not is_time or self.load.pairs_per_expert < least_pairs):
            return False
        table = self._formation.table
        if table.num_nodes < 2:
            return False
        self._is_asked = False
        self._planned_s = now
        self._plan = plan_table(
            table,
            self.load.recent(),
            min_gain=self._config.min_gain,
            speeds=self.load.speeds(),
            required=self._required,
        )
        return True

    def _prepare(self, table: ExpertTable, nodes: Iterable[Member]) -> ExpertTable:
        self._newest_version = max(self._newest_version, self._formation.table.version) + 1
        self._pending = msgspec.structs.replace(table, version=self._newest_version)
        self._awaited = set(nodes)
        self._is_refused = False
        return self._pending

    def prepared(
        self, member: Member, version: int, *, is_refused: bool = False
    ) -> ExpertTable | None:
        """Note a node's answer; once all have come, use the table and return it.

        A table that any node refuses is given up when all have answered, and the next table
        gets its version: so no node keeps a table that others could not prepare, and no answer
        is taken for one to another table. Each refusal in a row doubles the time to the next plan.
        """
        pending = self._pending
        if pending is None or version != pending.version:
            return None  # one that was given up
        self._awaited.discard(member)
        self._is_refused |= is_refused
        if self._awaited:
            return None
        if self._is_refused:
            self._pending = None
            self._newest_version -= 1
            self._num_refused = min(self._num_refused + 1, MAX_DOUBLINGS)
            return None
        self._num_refused = 0
        self._migrations += migrations(self._formation.table, pending)
        self._balance_before = self._balance()
        self._formation.use(pending)
        self._pending = None
        return pending

    def cancel(self) -> None:
        """Give up the plan and the table being prepared: a node is lost."""
        self._pending = None
        self._plan = None
        self._local = None

    def stats(self) -> BalanceStats:
        """Return the figures of the table in use."""
        return BalanceStats(
            table_version=self._formation.table.version,
            migrations=self._migrations,
            balance=self._balance(),
            balance_before=self._balance_before,
            num_local_layers=len(self._formation.table.local),
        )

    def _balance(self) -> float:
        """Return the measured max/mean or, before there are counts, the expected one."""
        served = self.load.balance()
        if served is not None:
            return served
        return balance(self._formation.table, self.load.recent(), self.load.speeds())
