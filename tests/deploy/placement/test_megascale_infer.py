"""MegaScale-Infer's published gains of ping-pong (arXiv 2504.02263), from its published inputs.

Published: two micro-batches 1.9 times one, three 1.10 to 1.38 times two (by model), where
micro-batches stay as they are; hosts of 8 GPUs of the A800's class, each with a card of 200 Gb/s.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deploy.placement.cluster import HostLink
from deploy.placement.devices import load_profile
from deploy.placement.search.precision import Precisions
from deploy.placement.search.spans import spans_of
from deploy.placement.search.steps import EngineSetup, EngineSteps
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Lengths
from models.description.config import load_model_config
from tests.deploy.placement import samples

MODELS = Path(__file__).parent / "models"
CARDS = HostLink(transport="nixl", alpha_us=12, gbps=1600)


def test_micro_batches_gain_what_was_published() -> None:
    """Near the balance of both sides, with 256 tokens for each of 8 experts."""
    num_attention = 4
    shape = ModelShape.from_config(load_model_config(MODELS / "mixtral-8x22b"))
    gpu = load_profile("a100")
    hosts = [
        samples.host((gpu, num_attention), name="attention"),
        samples.host((gpu, 8), name="experts"),
    ]
    # The trace's medians.
    asked = samples.workload(prompt=Lengths(mean=571), output=Lengths(mean=159))
    inputs = dataclasses.replace(samples.inputs(hosts, shape, asked), between_hosts=CARDS)
    rater = inputs.rater()
    layout = next(
        each for each in spans_of(hosts, CARDS, num_experts=8) if each.used == (num_attention, 8)
    )
    (formats,) = Precisions(rater, None).of(layout)
    rows, rates = 1024, []
    for m in (1, 2, 3, 4):
        weights = (1 / num_attention,)
        engine = EngineSetup(layout, formats, (1,), weights, m, 4096)
        step = EngineSteps(engine, rater.clock).step(float(m * rows), None)
        assert step.micro_batches == m
        rates.append(m * rows / step.step_s)
    assert 1.75 < rates[1] / rates[0] <= 2.0
    assert 1.02 < rates[2] / rates[1] < 1.4
    # The card is hidden by then.
    assert rates[3] / rates[2] < 1.05
