"""Layers whose routed experts stay on the attention nodes: what a plan says of them.

Owns the structure of that part of the plan. Which of the layers are local at a time is in the
expert table (topspin.expert_table); the scheduler decides.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class LocalExperts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decoder layers (counted from 0) whose routed experts every attention node holds too.

    `when` "always": expert nodes hold nothing of these layers. "measured": they do, and the layers
    are local, all at once, while that has been measured to be faster.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    when: Literal["always", "measured"] = "measured"
