"""The sampling parameters that apply unless a request sets them.

Owns their types with ranges, and reading them from a checkpoint's generation_config.json.
Knows no request. app.cli.serve reads the file to refuse a bad one at the start,
server.gateway.service to serve it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from models.description.config_fields import read_json
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
# Options that change what transformers' generate returns and that are not applied, with the values
# that mean "off"; null, too, does.
_NOT_APPLIED: Mapping[str, object] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": [],
    "diversity_penalty": 0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_length": 20,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "token_healing": False,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}


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


_NAMES = frozenset(
    {"do_sample", *(field.encode_name for field in msgspec.structs.fields(SamplingDefaults))}
)


def load_sampling_defaults(
    checkpoint: Path, source: str, overrides: Mapping[str, object] | None = None
) -> SamplingDefaults:
    """Return the defaults of `source`: "auto" (the checkpoint's file), "none" or a directory.

    `do_sample: false` means greedy decoding, as in transformers. A checkpoint may have no
    file, a directory must have one. `overrides` count more than the file. Raises ConfigError naming
    the file or the flag, and the value.
    """
    file = _file(checkpoint, source)
    read = {} if file is None else read_json(file)
    hint = f"{file}: {{}} (--generation-config none ignores the file)"
    found = _checked(read, hint)
    if not overrides:
        return found
    if unknown := sorted(set(overrides) - _NAMES):
        raise ConfigError(
            f"--override-generation-config: {', '.join(unknown)}: not applied here; "
            f"{', '.join(sorted(_NAMES))} are"
        )
    return _checked({**read, **overrides}, "--override-generation-config: {}")


def _checked(given: Mapping[str, object], told: str) -> SamplingDefaults:
    """Return the defaults that are `given`; raises ConfigError with the reason in `told`."""
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("do_sample") is False:
        values["temperature"] = 0
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(told.format(error)) from None


def unapplied_defaults(checkpoint: Path, source: str) -> list[str]:
    """Return a sentence that names the options of the file of `source` that are not applied.

    Arguments and errors are those of load_sampling_defaults; nothing is returned if there is none.
    """
    file = _file(checkpoint, source)
    raw = {} if file is None else read_json(file)
    found = [
        f"{name} = {raw[name]!r}"
        for name, off in _NOT_APPLIED.items()
        if name in raw and raw[name] not in (None, off)
    ]
    if not found:
        return []
    reason = "not applied; a request can set `stop`, `bad_words`, `min_tokens` and more"
    return [f"{file}: {', '.join(found)}: {reason}"]


def _file(checkpoint: Path, source: str) -> Path | None:
    """Return the file of `source`, None if it is to be none or the checkpoint has none."""
    if source == "none":
        return None
    file = (checkpoint if source == "auto" else Path(source).expanduser()) / _FILE
    if file.exists():
        return file
    if source == "auto":
        return None
    raise ConfigError(f"--generation-config {source}: there is no {file}")
