"""The time of each layer, as a node's flight recorder has it.

Owns the reading of stamps: which events are a node's own work, and the statistic. A step has many
layers, so its stamps are many short samples, most of which another process's turn on a core did
not hit; the whole step is one long sample, which it did. Knows no node. Called by solo.py and
rally.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from topspin.trace import Kind, Ring, Stamp, read_stamps

ATTENTION_WORK: Final = (Kind.ATTENTION, Kind.DISPATCHED, Kind.LOCAL, Kind.COMBINED)
EXPERT_WORK: Final = (Kind.JOINED, Kind.COMPUTED, Kind.REPLIED)
CAPACITY: Final = 2**15

Durations = dict[int, list[float]]
"""By kind of event, the seconds that each took."""


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the statistic of all measurements: other load on the machine only adds time."""
    return float(np.quantile(samples, 0.25))


def add_durations(found: Durations, ring: Ring, kinds: Iterable[Kind]) -> None:
    """Add to `found` how long each event of these kinds took, and empty the ring.

    The first layer is left out: the end of the step before is in its caches.
    """
    wanted = {int(kind) for kind in kinds}
    before: Stamp | None = None
    for stamp in read_stamps(ring.dump()):
        if before is not None and stamp.kind in wanted and stamp.layer > 0:
            found.setdefault(stamp.kind, []).append((stamp.t_ns - before.t_ns) * 1e-9)
        before = stamp
    ring.words[0] = 0


def work_s(found: Durations) -> float:
    """Return the seconds of one layer and micro-batch: the sum of its events' lower quartiles."""
    return sum(lower_quartile(samples) for samples in found.values())
