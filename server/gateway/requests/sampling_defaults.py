"""The sampling parameters that apply unless a request sets them.

Owns their types with ranges, and reading them from a checkpoint's generation_config.json.
Knows no request. topspin.cli.serve reads the file to refuse a bad one at the start,
server.gateway.service to serve it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from models.config_fields import read_json
from server.sampling_limits import (
    MAX_COUNT,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from topspin.errors import ConfigError

Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]

_FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a request that sets none.

    `max_tokens` None: a chat may use the rest of the context.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_tokens: PositiveCount | None = msgspec.field(name="max_new_tokens", default=None)


def load_sampling_defaults(checkpoint: Path, source: str) -> SamplingDefaults:
    """Return the defaults of `source`: "auto" (the checkpoint's file), "none" or a directory.

    `do_sample: false` means greedy decoding, as in transformers. A checkpoint may have no
    file, a directory must have one. Raises ConfigError naming the file and the value.
    """
    if source == "none":
        return SamplingDefaults()
    file = (checkpoint if source == "auto" else Path(source).expanduser()) / _FILE
    if source == "auto" and not file.exists():
        return SamplingDefaults()
    if not file.exists():
        raise ConfigError(f"--generation-config {source}: there is no {file}")
    given = {name: value for name, value in read_json(file).items() if value is not None}
    if given.get("do_sample") is False:
        given["temperature"] = 0
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error} (--generation-config none ignores the file)") from None
