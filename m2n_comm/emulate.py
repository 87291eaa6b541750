"""Gives any transport the latency and bandwidth of a link that the machine does not have.

The sender stamps each frame with the time at which the emulated link would have delivered it and
continues; the receiver does not read a frame before its time. Works between processes of one host,
whose CLOCK_MONOTONIC is the same. Knows no sockets; the two sides of M2N call it. Used to measure
pipelines for networks that the machine lacks.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from topspin.errors import ConfigError

# time.sleep() wakes late by the kernel's timer slack (50 us); the rest is spun.
_SLACK_NS = 60_000


@dataclass(frozen=True, slots=True)
class LinkEmulation:
    """One-way latency, and bandwidth of each direction of each pair (None: unlimited)."""

    latency_us: float = 0.0
    gbps: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for an impossible link."""
        if not 0 <= self.latency_us < 1e9:
            raise ConfigError(f"link latency {self.latency_us} us: must be in [0, 1e9)")
        if self.gbps is not None and not self.gbps > 0:
            raise ConfigError(f"link bandwidth {self.gbps} Gbit/s: must be positive")

    @property
    def shaper(self) -> LinkShaper | None:
        """Return the sending end of a new link, or None if it would delay nothing."""
        if self.latency_us == 0 and self.gbps is None:
            return None
        return LinkShaper(self)


class LinkShaper:
    """The sending end of one direction of one pair: frames leave one after the other.

    `address` is that of three i64, which compiled code (host.frames.hops) reads and writes too:
    when the link is free, its latency, and its picoseconds per byte.
    """

    def __init__(self, link: LinkEmulation) -> None:
        ps_per_byte = 0 if link.gbps is None else round(8000.0 / link.gbps)
        self._words = array("q", (0, round(link.latency_us * 1000), ps_per_byte))
        self.address = self._words.buffer_info()[0]

    def deliver_ns(self, size_bytes: int, *, now_ns: int) -> int:
        """Return the delivery time of a frame of `size_bytes` sent now; occupies the link."""
        free_ns, latency_ns, ps_per_byte = self._words
        self._words[0] = max(now_ns, free_ns) + size_bytes * ps_per_byte // 1000
        return self._words[0] + latency_ns


def wait_delivery(deliver_ns: int, *, deadline_s: float, spins: bool = False) -> bool:
    """Wait until `deliver_ns`; return False at `deadline_s` if that comes first.

    A node that `spins` does so here too: a core that sleeps for milliseconds wakes up slow, a cost
    that a real link would not cause.
    """
    end_ns = min(deliver_ns, round(deadline_s * 1e9))
    while (left_ns := end_ns - time.monotonic_ns()) > 0:
        if left_ns > _SLACK_NS and not spins:
            time.sleep((left_ns - _SLACK_NS) / 1e9)
    return deliver_ns <= end_ns
