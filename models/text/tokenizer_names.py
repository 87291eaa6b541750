"""The names of files that a tokenizer is made of, and whether a checkpoint has one of them.

Knows nothing in the files and imports no library, so that attention nodes and load tests may ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

TOKENIZER_FILE: Final = "tokenizer.json"
RANK_FILE: Final = "tiktoken.model"


def has_tokenizer(path: Path) -> bool:
    """Return whether the checkpoint directory `path` has a file that a tokenizer is made of."""
    return any((path / name).is_file() for name in (TOKENIZER_FILE, RANK_FILE))
