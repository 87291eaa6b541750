"""Settings of speculative decoding that contradict one another."""

from __future__ import annotations

import pytest

from topspin.errors import ConfigError
from topspin.plan.speculation import parse_speculation


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '{"method":"suffix","adaptive":false,"disable_by_batch_size":4}',
            "disable_by_batch_size needs adaptive",
        ),
        ('{"method":"suffix","disable_by_batch_size":0}', "disable_by_batch_size"),
        ('{"method":"ngram","prompt_lookup_min":3,"prompt_lookup_max":2}', "is more than"),
        ('{"method":"suffix","draft_width":2}', "draft_width has no meaning"),
    ],
)
def test_a_contradiction_is_told(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_speculation(text)
