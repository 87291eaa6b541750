"""The sums that the settings of retrieval amount to."""

from __future__ import annotations

import pytest

from topspin.plan.retrieval import RetrievalPolicy


@pytest.mark.parametrize(
    ("num_tokens", "num_searched", "num_segments"),
    [(512, 1024, 1), (512, 1025, 2), (2048, 1024, 2), (4096, 3 * 1024, 4)],
)
def test_the_segments_that_are_searched_hold_what_is_selected(
    num_tokens: int, num_searched: int, num_segments: int
) -> None:
    policy = RetrievalPolicy(num_tokens=num_tokens, num_searched=num_searched)
    assert policy.num_segments == num_segments


def test_requests_with_another_number_of_keys_search_enough_segments() -> None:
    policy = RetrievalPolicy(num_tokens=512, num_searched=1024).with_tokens(2048)
    assert policy.num_segments == 2
