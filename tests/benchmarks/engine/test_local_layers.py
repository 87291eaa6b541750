"""The planner's cost model of layers without a hop."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.local_layers import predicted_s
from benchmarks.servers.topspin import Streams
from deploy.placement.devices import DeviceProfile, LinkProfile, ProcessMemory, Rates
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint

LAPTOP = DeviceProfile(
    name="laptop",
    kind="cpu",
    source="measured",
    memory_bytes=1e10,
    cores=2,
    formats=("none",),
    rates=(Rates(threads=2, read_bytes_per_s=2e10, flops={"none": 1e11}, launch_s=1e-6),),
    links=(LinkProfile(name="shm", alpha_s=1e-5, bytes_per_s=1e10, shares_cores=True),),
    process=ProcessMemory(attention=1e8, expert=1e8),
)


def test_a_local_layer_is_predicted_to_save_its_round_trip(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")
    num_layers = len(load_model_config(path).moe_layers)
    steps = [
        predicted_s(LAPTOP, path, latency_us=latency, num_local=count, load=Streams(4, 16, 8, 100))
        for latency, count in ((0, num_layers), (500, num_layers), (0, 1), (500, 1), (500, 0))
    ]
    here, still_here, one_near, one_far, all_far = steps
    assert here == pytest.approx(still_here)
    assert one_far - one_near == pytest.approx((num_layers - 1) * 2 * 500e-6, rel=0.01)
    assert all_far - one_far == pytest.approx(2 * 510e-6, rel=0.01)


def test_other_processes_take_the_cores_only_where_the_link_leaves_them_busy(
    tmp_path: Path,
) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")

    def step_s(latency_us: float, serving_s: float) -> float:
        load = Streams(4, 16, 8, 100)
        return predicted_s(
            LAPTOP, path, latency_us=latency_us, num_local=0, load=load, serving_s=serving_s
        )

    assert step_s(0, 4e-3) - step_s(0, 0) == pytest.approx(2e-3)
    assert step_s(9000, 4e-3) == step_s(9000, 0)
