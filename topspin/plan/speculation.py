"""The settings of speculative decoding, as users write them and as plans hold them.

Owns their keys, which are vLLM's where the meaning is the same, their ranges, and the reading of
`--speculative-config`. Knows no drafter. spec_decode makes one of them, server.scheduler plans by
them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from topspin.errors import ConfigError

MAX_TOKENS: Final = 32
MAX_MATCH: Final = 64
SELF_INT4: Final = "self-int4"
OFF: Final = "off"
"""The word for no drafts, where leaving the setting out means a default."""
CACHED_TOKENS_PER_SEQUENCE: Final = 1024
"""Tokens for which a draft model has room per request that it may draft for."""
MAX_CACHED_TOKENS: Final = 2**20

_Match = Annotated[int, Meta(ge=1, le=MAX_MATCH)] | None


class Speculation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How drafts are made, and how many tokens they have at most.

    Drafts follow what followed the longest suffix of a sequence that occurs elsewhere, of
    `prompt_lookup_min` to `prompt_lookup_max` tokens. Method "suffix" looks for it in the sequence
    and in recent outputs of requests with the same `cache_salt`; a match of k tokens gives at most
    `suffix_decoding_max_spec_factor` * k draft tokens, none of which has followed less often than
    `suffix_decoding_min_token_prob` of all times. Method "ngram" looks in the sequence only and
    knows no such limits. Drafts are chains; with `branches` trees of the likeliest continuations.

    Method "draft_model" asks another model: `model` is its directory, `quantization` the format of
    its weights; "self-int4" is the served model in 4 bits. Of a tree `draft_width` leaves are
    expanded in a pass of the model, in `draft_passes` passes at most. With "suffix+draft_model"
    both feed one tree, of which the likeliest tokens are verified.

    Method "mtp" asks the head of multi-token prediction that the checkpoint carries, in the
    attention node's process; trees grow as those of a draft model.

    `adaptive`: fewer tokens, or none, where measured times and acceptance say so.
    `disable_by_batch_size`: none in steps in which more sequences decode (None: no such limit).
    """

    method: Literal["suffix", "ngram", "draft_model", "suffix+draft_model", "mtp"]
    model: str | None = None
    quantization: Literal["int8", "int4"] | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 7
    adaptive: bool = True
    disable_by_batch_size: Annotated[int, Meta(ge=1)] | None = None
    branches: bool = False
    draft_width: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    draft_passes: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    prompt_lookup_min: _Match = None
    prompt_lookup_max: _Match = None
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=1000)] | None = None
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"prompt_lookup_min {low} is more than prompt_lookup_max {high}")
        if self.disable_by_batch_size is not None and not self.adaptive:
            raise ValueError("disable_by_batch_size needs adaptive: else all steps have drafts")
        for key in _MEANINGLESS[self.method]:
            if getattr(self, key) is not None:
                raise ValueError(f'{key} has no meaning for the method "{self.method}"')
        if self.draft_width is not None and not self.branches:
            raise ValueError("draft_width needs branches: a chain has one leaf")
        if not self.has_model:
            return
        if not self.model:
            raise ValueError(
                f'the method "{self.method}" needs a model: a directory or "{SELF_INT4}"'
            )
        if self.model == SELF_INT4 and self.quantization is not None:
            raise ValueError(f"quantization {self.quantization}: the model {SELF_INT4} has 4 bits")

    @property
    def has_model(self) -> bool:
        """Return whether a draft model takes part."""
        return self.method in ("draft_model", "suffix+draft_model")

    @property
    def computes(self) -> bool:
        """Return whether drafts are computed, by a model or by the checkpoint's own head."""
        return self.has_model or self.method == "mtp"

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


_METHODS: Final = '"suffix", "ngram", "draft_model", "suffix+draft_model" or "mtp"'
_SUFFIX_KEYS: Final = ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
_TEXT_KEYS: Final = (*_SUFFIX_KEYS, "prompt_lookup_min", "prompt_lookup_max")
_MODEL_KEYS: Final = ("model", "quantization", "draft_width", "draft_passes")
_MEANINGLESS: Final = {
    "suffix": _MODEL_KEYS,
    "ngram": (*_SUFFIX_KEYS, *_MODEL_KEYS),
    "draft_model": _TEXT_KEYS,
    "suffix+draft_model": (),
    "mtp": (*_TEXT_KEYS, "model", "quantization"),
}
"""By method, the keys that have none there."""
DEFAULT: Final = Speculation(method="suffix", disable_by_batch_size=4)
"""Of an engine whose attention is on CPUs: it needs no weights, and was not measurably slower there
with so few sequences (benchmarks/README.md); on GPUs nobody has measured it."""


def cached_tokens(num_requests: int, max_model_len: int) -> int:
    """Return the tokens for which a draft model of so many requests at once should have room.

    As long as most texts are, and one of the longest; whoever finds no room has no drafts.
    """
    tokens = num_requests * min(max_model_len, CACHED_TOKENS_PER_SEQUENCE)
    return min(max(max_model_len, tokens), MAX_CACHED_TOKENS)


def parse_speculation(text: str) -> Speculation | Literal["off"]:
    """Read the JSON object `text`; raises ConfigError naming the key that is wrong."""
    if text == OFF:
        return OFF
    try:
        return msgspec.json.decode(text, type=Speculation)
    except msgspec.DecodeError as error:
        _, *others = Speculation.__struct_fields__
        keys = ", ".join([f"method ({_METHODS})", *others])
        raise ConfigError(f"{text!r}: {error}; it is off, or a JSON object of {keys}") from None
