"""The settings of KV retrieval and of its spill, as plans hold them.

Owns what a row of a long sequence attends to, how codebooks are learnt, and how much of such a
sequence must be in memory. Knows no keys: attention nodes code them, kernels search them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from topspin.errors import ConfigError
from topspin.units import parse_size

MIN_TOKENS: Final = 64
MAX_TOKENS: Final = 2**24
"""The least and the most that a token may be let attend to."""
SEGMENT_TOKENS: Final = 1024
"""Aligned tokens of a sequence whose keys are coded together."""
NUM_SUBSPACES: Final = 8
"""Equal parts of a head's numbers, each coded by itself."""
_MOST_RECENT: Final = 128
_SEARCHED_SELECTIONS: Final = 24
_LEAST_SEARCHED: Final = 12 * SEGMENT_TOKENS
_HOT_SELECTIONS: Final = 4
# Keys behind the recent window are coded 64 at a time, and drafts have up to 64 tokens.
_MOST_NEW: Final = 128


class RetrievalPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Of a longer context a decoded token attends to `num_tokens` keys per key/value head.

    These are the first `num_sinks`, the last `num_recent` and the best of the others by their
    codes; at most 64 more, which have no codes yet. `num_iterations` of k-means learn a codebook.
    Codes are searched in the last segment and, of the full ones before it, in the best by their
    summaries, together of `num_searched` tokens; None: by the number of keys to select.
    """

    num_tokens: Annotated[int, Meta(ge=MIN_TOKENS, le=MAX_TOKENS)]
    num_sinks: Annotated[int, Meta(ge=0, le=1024)] = 16
    num_recent: Annotated[int, Meta(ge=1, le=2**20)] = _MOST_RECENT
    num_iterations: Annotated[int, Meta(ge=1, le=100)] = 4
    num_searched: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None

    def __post_init__(self) -> None:
        if self.num_selected < 1:
            raise ValueError(
                f"num_tokens {self.num_tokens} leaves none to select beside {self.num_sinks} "
                f"sinks and {self.num_recent} recent ones"
            )

    def with_tokens(self, num_tokens: int) -> RetrievalPolicy:
        """Return the policy of a request that asks for another number of keys.

        Raises ValueError if these leave none to select.
        """
        num_recent = min(self.num_recent, num_tokens // 4)
        return msgspec.structs.replace(self, num_tokens=num_tokens, num_recent=num_recent)

    @property
    def num_selected(self) -> int:
        """Return how many coded keys are selected."""
        return self.num_tokens - self.num_sinks - self.num_recent

    @property
    def num_segments(self) -> int:
        """Return how many full segments before the last are searched, at most."""
        searched = self.num_searched
        if searched is None:
            searched = max(_LEAST_SEARCHED, _SEARCHED_SELECTIONS * self.num_selected)
        return -(-max(searched, self.num_sinks + self.num_selected) // SEGMENT_TOKENS)

    @property
    def num_hot(self) -> int:
        """Return of how many spilled tokens each head keeps copies in memory.

        Several selections: most keys of one are in the one before.
        """
        return _HOT_SELECTIONS * self.num_selected

    @property
    def num_resident(self) -> int:
        """Return how many tokens of a decoded sequence must be in memory, at most.

        Sinks, hot tokens, and those from the beginning of the segment that the recent window
        reaches into; with what is not coded yet, and drafts.
        """
        tail = SEGMENT_TOKENS + self.num_recent + _MOST_NEW
        return self.num_sinks + self.num_hot + tail


HOST: Final = "host"
"""The directory that is the host's memory, for nodes on GPUs."""


class SpillSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file in `directory` for the keys and values that have no place in memory.

    It has room for `size_bytes`, all that sequences and the prefix cache have on a node. With the
    directory `host` it is pinned memory of the host, beside a GPU's.
    """

    directory: Annotated[str, Meta(min_length=1)]
    size_bytes: Annotated[int, Meta(ge=1)]

    @property
    def is_in_host_memory(self) -> bool:
        """Return whether it is no file."""
        return self.directory == HOST


def parse_spill(text: str) -> SpillSpec:
    """Return the spill of --kv-spill-dir, DIR:SIZE or host:SIZE; raises ConfigError."""
    directory, colon, size = text.rpartition(":")
    if not colon or not directory:
        raise ConfigError(f"{text!r} is not DIR:SIZE, for example /var/tmp:8GiB or host:8GiB")
    return SpillSpec(directory=directory, size_bytes=parse_size(size))


def policy_of(num_tokens: int | None) -> RetrievalPolicy | None:
    """Return the policy for --kv-retrieval-tokens: up to a quarter are recent ones."""
    if num_tokens is None:
        return None
    return RetrievalPolicy(num_tokens=num_tokens, num_recent=min(_MOST_RECENT, num_tokens // 4))
