"""The number of passes of a round: what fits into a step, or one more if that is faster."""

from __future__ import annotations

import pytest

from spec_decode.round_depth import ROUNDS, RoundDepth


def play(depth: RoundDepth, *, target_s: float, tokens: dict[int, int], rounds: int) -> list[int]:
    """Run rounds of a target and passes of 1 s each; `tokens` are found by passes per round."""
    now_s, used = 0.0, []
    for _ in range(rounds):
        passes = depth.passes
        used.append(passes)
        for _ in range(passes):
            depth.passed(1.0)
        now_s += max(target_s, float(passes))
        depth.heard(now_s, target_s=target_s, num_tokens=tokens.get(passes, 1))
    return used


@pytest.mark.parametrize(("tokens", "best"), [({3: 4, 4: 4}, 3), ({3: 4, 4: 9}, 4)])
def test_the_depth_is_what_fits_or_one_more_whichever_is_faster(
    tokens: dict[int, int], best: int
) -> None:
    depth = RoundDepth(most=8)
    used = play(depth, target_s=3.5, tokens=tokens, rounds=4 * ROUNDS)
    assert used[0] == 1, "nothing is known"
    assert {3, 4} <= set(used[ROUNDS:])
    assert used[-1] == best
    assert max(play(RoundDepth(most=2), target_s=100.0, tokens={}, rounds=3 * ROUNDS)) == 2
