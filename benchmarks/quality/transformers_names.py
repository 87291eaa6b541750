"""Names of transformers' arguments that differ among the releases that we run on.

Owns these names. Knows no model. Used by benchmarks and tests, whose oracle transformers is.
"""

from __future__ import annotations

import importlib.metadata
from typing import Final

# Without an import of the library, which takes seconds.
_RELEASE: Final = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))

CACHE: Final = "cache" if _RELEASE >= (5, 24) else "past_key_values"
"""The argument of a model, and of generate(), that takes a Cache."""
