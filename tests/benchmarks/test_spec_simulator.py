"""The simulator: a draft node that works meanwhile beats one in turns, as the formula says."""

from __future__ import annotations

import pytest

from benchmarks.spec_simulator import RATIOS, SYNC, World, compare, play_parallel, play_serial


@pytest.mark.parametrize(
    ("ratio", "gain"),
    [(RATIOS[0], 1.3), pytest.param(RATIOS[-1], 1.4, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_parallel_beats_serial_at_its_best_depth(ratio: float, gain: float) -> None:
    row = compare(0.8, ratio, num_steps=250)
    assert row["parallel_over_serial"] >= gain
    assert row["round_over_formula"] == pytest.approx(1.0, abs=0.05)


def test_a_serial_round_is_its_passes_and_a_step() -> None:
    played = play_serial(World(0.8, 1), 0.25, passes=2, num_steps=200)
    assert played.round_time == pytest.approx(1.5, abs=0.01)
    # Chains of two first choices alone would give 1 + 0.8 + 0.64.
    assert 2.44 < played.tokens_per_round < 3.0
    assert played.speed == pytest.approx(played.tokens_per_round / played.round_time)


def test_free_drafts_never_make_rounds_longer_than_a_step() -> None:
    played = play_parallel(World(1.0 - 1e-9, 1), 1e-3, num_steps=100)
    assert played.round_time == pytest.approx(1.0 + SYNC, abs=0.01)
    assert played.tokens_per_round > 8


def test_the_same_seed_gives_the_same_run() -> None:
    first = compare(0.6, 0.25, num_steps=20)
    assert first == compare(0.6, 0.25, num_steps=20)
    assert first != compare(0.6, 0.25, num_steps=20, seed=2)
