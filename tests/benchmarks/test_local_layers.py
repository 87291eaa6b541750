"""The prediction of what layers without a hop gain, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from benchmarks.local_layers import predicted_s


@pytest.mark.parametrize(("share", "step_s"), [(0.0, 0.031), (0.5, 0.0235), (1.0, 0.016)])
def test_a_step_without_hops_computes_the_experts_itself(share: float, step_s: float) -> None:
    phases = {"attention": 0.008, "wait": 0.02, "expert": 0.005, "sample": 0.002, "prepare": 0.001}
    assert predicted_s(phases, share) == pytest.approx(step_s)
