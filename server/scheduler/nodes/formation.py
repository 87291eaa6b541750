"""The generation and the expert table of one engine: every step is stamped with both.

Owns both: code that plans steps, checks answers or counts pairs reads them here and keeps no
copy. recovery.py begins generations and takes absent nodes out of the table;
experts/balancer.py changes it while every node serves. Pure.
"""

from __future__ import annotations

import msgspec

from topspin.expert_table import ExpertTable

# The number of tables kept, since reports that name an older one may still be on their way.
NUM_RECENT_TABLES = 8


class Formation:
    """The state common to all nodes: `generation` counts formings, `table` is the one in use.

    `full_table` gives experts to every place, the absent ones too: a node that comes (back)
    loads its share of it.
    """

    def __init__(self, table: ExpertTable) -> None:
        self._generation = 1
        self._seen_generation = 0
        self._table = table
        self._full_table = table
        self._recent = {table.version: table}

    @property
    def generation(self) -> int:
        """Return the generation of the steps in flight and of the next step."""
        return self._generation

    @property
    def table(self) -> ExpertTable:
        """Return the expert table by which the next step is routed."""
        return self._table

    @property
    def full_table(self) -> ExpertTable:
        """Return the table of all places."""
        return self._full_table

    def saw(self, generation: int) -> None:
        """Note a generation of an earlier scheduler, in which a node was.

        Later ones come after it: nodes that kept their weights hold sequences of that time.
        """
        self._seen_generation = max(self._seen_generation, generation)

    def begin(self) -> None:
        """Begin the first generation."""
        self._generation = self._seen_generation + 1

    def begin_generation(self) -> None:
        """Begin the next generation; late messages of earlier ones are ignored."""
        self._generation = max(self._generation, self._seen_generation) + 1

    def use(self, table: ExpertTable) -> None:
        """Use a table from the next step on; a node without experts in it keeps its share."""
        self._full_table = _filled(table, self._full_table)
        self.use_part(table)

    def use_part(self, table: ExpertTable) -> None:
        """Use a table that may leave absent nodes without experts."""
        self._table = table
        self._recent[table.version] = table
        for version in sorted(self._recent)[:-NUM_RECENT_TABLES]:
            del self._recent[version]

    def recent_table(self, version: int) -> ExpertTable | None:
        """Return the table of that version, None if it was never in use, or long ago."""
        return self._recent.get(version)


def _filled(table: ExpertTable, full: ExpertTable) -> ExpertTable:
    """Return `table` with the slots of `full` for each node that holds nothing in any layer."""
    absent = [node for node in range(table.num_nodes) if not any(table.experts_of(node))]
    if not absent:
        return table
    slots = tuple(
        tuple(before[node] if node in absent else held for node, held in enumerate(now))
        for now, before in zip(table.slots, full.slots, strict=True)
    )
    return msgspec.structs.replace(table, slots=slots)
