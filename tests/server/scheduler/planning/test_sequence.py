"""The tokens that end a request, and the blocks that a node must be told."""

from __future__ import annotations

from array import array

import pytest

from server.scheduler.planning.block_pool import HashChain
from server.scheduler.planning.sequence import Request, Sequence
from topspin.messages import SamplingParams


def make_request(output: list[int], *, min_tokens: int = 0, max_length: int = 10) -> Request:
    """Return a request with a prompt of two tokens and the given output; 9 is its stop token."""
    return Request(
        request_id="r",
        peer=b"gateway",
        arrival=0,
        sampling=SamplingParams(max_tokens=8, seed=0, min_tokens=min_tokens),
        tokens=array("i", [9, 9, *output]),
        num_prompt_tokens=2,
        max_length=max_length,
        position_limit=max_length - 1,
        max_blocks=3,
        stop_ids=frozenset({9}),
        hashes=HashChain("", 4),
    )


@pytest.mark.parametrize(
    ("output", "min_tokens", "max_length", "reason"),
    [
        ([1], 0, 10, None),
        ([1, 9], 0, 10, "stop"),
        ([9], 0, 10, "stop"),
        ([9], 1, 10, None),  # position 0 is before the minimum of one token
        ([1, 9], 1, 10, "stop"),
        ([1, 2], 0, 4, "length"),
        ([1, 9], 0, 4, "stop"),
        ([9], 1, 3, "length"),
    ],
)
def test_finish_reason(
    output: list[int], min_tokens: int, max_length: int, reason: str | None
) -> None:
    request = make_request(output, min_tokens=min_tokens, max_length=max_length)
    assert request.finish_reason() == reason
    assert request.num_output_tokens == len(output)


def test_a_block_is_sent_once_when_a_position_needs_it() -> None:
    seq = Sequence(
        request=make_request([]),
        seq_id=1,
        replica_idx=0,
        blocks=[7, 8, 5],
        block_size=4,
        num_planned=4,
        num_committed=4,
        length=9,
        position_limit=20,
        num_sent=1,
    )
    assert (seq.capacity, seq.sent_capacity, seq.publish_at) == (12, 4, 8)
    seq.num_planned = 8
    assert seq.blocks_to_send() == [8]
    assert seq.sent_capacity == 8
    seq.num_planned = 9
    assert seq.blocks_to_send() == [5]
    assert seq.blocks_to_send() == []
    seq.add_block(3)
    assert seq.capacity == 16
