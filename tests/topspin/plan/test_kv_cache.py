"""Groups of layers by their windows, and the blocks of a sequence against counting them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topspin.plan.kv_cache import BlockNeeds, KvCacheSpec, KvLayerRule, kv_groups
from topspin.plan.retrieval import RetrievalPolicy

GPT_OSS = (128, None) * 12
MAX_LEN = 4096


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((), (None,)),
        ((None,) * 5, (None,)),
        (GPT_OSS, (None, 128)),
        ((512,) * 3, (512,)),
        # Beyond the context a window hides nothing.
        ((MAX_LEN, None, MAX_LEN + 1), (None,)),
        # As many layers in each group: five window layers to a full one.
        ((64, 64, 64, 64, 64, None) * 2, (None, 64, 64, 64, 64, 64)),
        # With at most eight groups: of 4 layers each, one of them with a single layer.
        ((None,) * 27 + (64,), (None,) * 7 + (64,)),
    ],
)
def test_layers_of_a_window_share_groups(
    windows: tuple[int | None, ...], expected: tuple[int | None, ...]
) -> None:
    assert kv_groups(windows, KvCacheSpec(), max_len=MAX_LEN).windows == expected


@given(st.lists(st.sampled_from([None, 16, 100]), max_size=40))
def test_every_layer_is_in_a_group_of_its_window(windows: list[int | None]) -> None:
    groups = kv_groups(windows, KvCacheSpec(), max_len=MAX_LEN)
    assert [groups.windows[each] for each in groups.of_layer] == windows
    sizes = [groups.of_layer.count(group) for group in range(len(groups.windows))]
    # Eight, and the last of each kind but one may have fewer layers.
    assert len(sizes) <= 7 + max(1, len(set(windows)))
    # The layers of a stage, any run of them, have about as many of each group of a kind.
    for begin in range(len(windows)):
        run = groups.of_layer[begin : begin + 10]
        for kind in set(groups.windows):
            own = [idx for idx, window in enumerate(groups.windows) if window == kind]
            counts = [run.count(group) for group in own]
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    "kept",
    [
        KvCacheSpec(retrieval=RetrievalPolicy(num_tokens=256)),
        KvCacheSpec(layers=(KvLayerRule(layers=(1,), dtype="fp8"),)),
    ],
)
def test_all_keys_are_kept_where_one_table_serves_all_layers(kept: KvCacheSpec) -> None:
    groups = kv_groups(GPT_OSS, kept, max_len=MAX_LEN)
    assert groups.windows == (None,)
    assert groups.of_layer == (0,) * len(GPT_OSS)


@given(
    window=st.integers(1, 70),
    block_size=st.integers(1, 20),
    step=st.integers(1, 40),
    committed=st.integers(0, 200),
)
def test_no_sequence_holds_more_than_its_needs(
    window: int, block_size: int, step: int, committed: int
) -> None:
    needs = BlockNeeds((window,), block_size=block_size, max_step_tokens=step)
    seen = range(max(0, committed - window + 1), committed + 2 * step)
    columns = {position // block_size for position in seen}
    assert len(columns) <= needs.of(1000)
    assert len({p // block_size for p in seen if p <= committed}) <= needs.behind(window)


def test_a_long_sequence_needs_little_behind_a_window() -> None:
    needs = BlockNeeds((None, 128), block_size=16, max_step_tokens=512)
    assert needs.of(6250) == 6250 + 9 + 64
    assert needs.of(3) == 6
    assert needs.columns_within(6250 + 73, 10_000) == 6250
    assert needs.columns_within(1, 10) == 0
    assert needs.columns_within(100, 10) == 10
