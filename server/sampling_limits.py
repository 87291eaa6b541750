"""The ranges of a request's sampling parameters.

Owns the numbers alone, so that the gateway, which refuses by field of the HTTP body, and
the scheduler, which trusts no gateway, agree. Read by server.gateway.bodies.generation and
server.scheduler.planning.intake.
"""

from __future__ import annotations

from typing import Final

from topspin.plan.settings import MAX_LOGPROBS as MAX_LOGPROBS

MAX_TEMPERATURE: Final = 2.0
MAX_PENALTY: Final = 2.0
# A logit divided or multiplied by a penalty within these stays a finite fp32 number.
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
MAX_BIAS: Final = 100.0
# Each of a client's words may be two sequences: with and without a space before it.
MAX_BAD_WORDS: Final = 512
MAX_BAD_WORD_TOKENS: Final = 64
MAX_COUNT: Final = 2**31 - 1
MAX_SEED: Final = 2**64 - 1
