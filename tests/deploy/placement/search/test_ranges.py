"""Cuts of layers over devices, against trying all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.placement.search.ranges import Chain, Ends, all_cuts, num_cuts, quickest, some_cuts


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Return up to four devices for up to seven layers."""
    num_layers, num_devices = draw(st.integers(1, 7)), draw(st.integers(1, 4))

    def table(low: int, high: int) -> list[list[float]]:
        row = st.lists(st.integers(low, high), min_size=num_layers, max_size=num_layers)
        return [[float(each) for each in draw(row)] for _ in range(num_devices)]

    free = [float(draw(st.integers(0, 60))) for _ in range(num_devices)]
    return Chain(table(1, 20), table(1, 20), free, draw(st.sampled_from((0.5, 1.0, 2.0))))


def room_of(chain: Chain, ends: Ends) -> float:
    """Return the tokens for which all ranges have room; negative: not even for the weights."""
    return min(
        (free - sum(sizes[begin:end])) / ((end - begin) * chain.token_bytes)
        for free, sizes, begin, end in zip(
            chain.free, chain.sizes, (0, *ends[:-1]), ends, strict=True
        )
    )


def seconds_of(chain: Chain, ends: Ends) -> float:
    """Return the sum of all ranges."""
    return sum(
        sum(seconds[begin:end])
        for seconds, begin, end in zip(chain.seconds, (0, *ends[:-1]), ends, strict=True)
    )


@given(chains(), st.sampled_from((0.0, 1.0, 2.5, 6.0)))
def test_the_quickest_cut_is_that_of_trying_all(chain: Chain, tokens: float) -> None:
    cuts = list(all_cuts(len(chain.sizes[0]), len(chain.free)))
    assert len(cuts) == len(set(cuts)) == num_cuts(len(chain.sizes[0]), len(chain.free))
    fitting = [ends for ends in cuts if room_of(chain, ends) >= tokens]
    found = quickest(chain, tokens)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert seconds_of(chain, found) == min(seconds_of(chain, each) for each in fitting)


@given(chains())
def test_some_cuts_go_from_the_quickest_to_the_roomiest(chain: Chain) -> None:
    found = some_cuts(chain, 1.0)
    rooms = [room_of(chain, ends) for ends in all_cuts(len(chain.sizes[0]), len(chain.free))]
    most = max(rooms, default=-1.0)
    assert bool(found) == (most >= 1.0)
    if found:
        assert found[0] == quickest(chain, 1.0)
        assert room_of(chain, found[-1]) == pytest.approx(most, rel=0.02)
        assert seconds_of(chain, found[0]) <= seconds_of(chain, found[-1])


def test_a_device_twice_as_large_and_fast_gets_more_layers() -> None:
    chain = Chain([[2.0] * 9, [1.0] * 9], [[10.0] * 9] * 2, [50.0, 100.0], 1.0)
    assert some_cuts(chain, 1.0) == [(1, 9), (2, 9), (3, 9)]
