"""The texts that a model is calibrated and judged with, as tokens.

Owns two texts of prose, dialogue, code and tables, one for each purpose, and cutting a text into
sequences. Called by deploy.quantisation's commands and by benchmarks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from models.description.config import load_model_config
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError

CALIBRATION: Final = Path(__file__).with_name("calibration.txt")
HELD_OUT: Final = Path(__file__).with_name("held_out.txt")
SEQUENCE: Final = 256
_FEWEST: Final = 8


def tokens_of(model: Path, text: Path, *, length: int = SEQUENCE) -> Tensor:
    """Return the tokens i64[S, T] of a text file, T being `length` at most; the rest is left out.

    A text that is shorter than `length` is one sequence. Raises ConfigError for a file that cannot
    be read or has fewer than 8 tokens.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text}: cannot be read as text: {error}") from error
    ids = Tokenizer.from_directory(model).encode(content, add_special_tokens=False)
    if len(ids) < _FEWEST:
        raise ConfigError(f"{text}: has {len(ids)} tokens; at least {_FEWEST} are needed")
    length = min(length, len(ids), load_model_config(model).context_length)
    count = len(ids) // length
    return torch.tensor(ids[: count * length]).view(count, length)
