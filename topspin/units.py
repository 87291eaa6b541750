"""The text forms of values: sizes (`2GiB`), read and printed, switches, web origins, JSON objects.

Knows no configuration. Text that cannot be read raises a ConfigError without the option's name,
which the caller adds.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from topspin.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: str) -> int:
    """Return the number of bytes in `text`, e.g. `2GiB`, `512MiB` or `1000000`.

    Raises ConfigError when the text is not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size; write for example 2GiB or 512MiB")
    size_bytes = int(float(match.group(1)) * factor)
    if size_bytes <= 0:
        raise ConfigError(f"{text!r} is not a positive size")
    return size_bytes


def parse_switch(text: str) -> bool:
    """Return whether `text` is `on`; raises ConfigError if it is not `off` either."""
    if text not in ("on", "off"):
        raise ConfigError(f"{text!r} is neither on nor off")
    return text == "on"


# Lower case, as a browser sends it: the comparison is literal.
_ORIGIN = re.compile(
    r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:[0-9]+)?|https?://\[[0-9a-f:]+\](:[0-9]+)?"
)


def parse_origins(text: str) -> tuple[str, ...]:
    """Return the origins in a JSON list or a list with commas, as browsers write them."""
    try:
        listed = json.loads(text) if text.startswith("[") else text.split(",")
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a JSON list: {error}") from None
    origins = tuple(str(origin).strip() for origin in listed)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{origin!r} is not an origin such as https://ui.example.com (nothing follows the "
                "host and port), nor *"
            )
    return origins


def parse_root_path(text: str) -> str:
    """Return the path of a URL that begins all others; raises ConfigError."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", text):
        raise ConfigError(f"{text!r} is not a path such as /llm or /team/llm")
    return text.rstrip("/")


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object `text`; raises ConfigError if it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{text!r}: {error}; it must be a JSON object") from None


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest binary unit that keeps at least one whole digit."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
