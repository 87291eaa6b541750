"""The fitted cost model against synthetic nodes whose coefficients are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from server.scheduler.micro_batching.cost import (
    CostFit,
    CostModel,
    LinearFit,
    StepLoad,
    linked_cost_model,
)
from topspin.messages import StepTimings

TRUE = CostModel(
    attention_fixed_s=1.5e-3,
    attention_token_s=2.0e-5,
    attention_pair_s=3.0e-8,
    expert_fixed_s=2.5e-3,
    expert_token_s=4.0e-5,
    link_s=3.0e-4,
)
NUM_LAYERS = 12


def attention_s(model: CostModel, load: StepLoad) -> float:
    return NUM_LAYERS * (
        model.attention_fixed_s * load.num_micro_batches
        + model.attention_token_s * load.num_tokens
        + model.attention_pair_s * load.num_pairs
    )


def expert_s(model: CostModel, num_micro_batches: int, num_tokens: int) -> float:
    per_layer = model.expert_fixed_s * num_micro_batches + model.expert_token_s * num_tokens
    return NUM_LAYERS * per_layer


def random_load(rng: random.Random) -> StepLoad:
    num_tokens = rng.choice((1, 4, 16, 64, 256))
    return StepLoad(rng.randint(1, 4), num_tokens, float(num_tokens * rng.randrange(1, 2000)))


def learn(fit: CostFit, model: CostModel, *, steps: int, seed: int, outliers: float = 0.0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        load = random_load(rng)
        noise = [rng.gauss(1.0, 0.05) for _ in range(2)]
        if rng.random() < outliers:
            noise = [20.0, 20.0]
        fit.add_attention(0, load, attention_s(model, load) * noise[0])
        m, tokens = load.num_micro_batches, load.num_tokens
        fit.add_expert(m, tokens, expert_s(model, m, tokens) * noise[1])
        fit.add_link(tokens, model.link_s * noise[0])


def assert_close(found: CostModel, model: CostModel, tolerance: float) -> None:
    rng = random.Random(99)
    for _ in range(50):
        load = random_load(rng)
        m, tokens = load.num_micro_batches, load.num_tokens
        assert attention_s(found, load) == pytest.approx(attention_s(model, load), rel=tolerance)
        assert expert_s(found, m, tokens) == pytest.approx(
            expert_s(model, m, tokens), rel=tolerance
        )


@pytest.mark.parametrize("seed", range(3))
def test_it_converges_to_the_true_coefficients(seed: int) -> None:
    fit = CostFit(CostModel(), NUM_LAYERS)
    learn(fit, TRUE, steps=300, seed=seed)
    assert_close(fit.of(0), TRUE, 0.05)
    found = fit.of(0)
    assert found.attention_fixed_s == pytest.approx(TRUE.attention_fixed_s, rel=0.1)
    assert found.attention_token_s == pytest.approx(TRUE.attention_token_s, rel=0.25)
    assert found.attention_pair_s == pytest.approx(TRUE.attention_pair_s, rel=0.1)
    assert found.expert_fixed_s == pytest.approx(TRUE.expert_fixed_s, rel=0.05)
    assert found.expert_token_s == pytest.approx(TRUE.expert_token_s, rel=0.1)
    assert found.link_s == pytest.approx(TRUE.link_s, rel=0.1)


def test_outliers_hardly_move_it() -> None:
    fit = CostFit(CostModel(), NUM_LAYERS)
    learn(fit, TRUE, steps=100, seed=1)
    learn(fit, TRUE, steps=300, seed=2, outliers=0.03)
    assert_close(fit.of(0), TRUE, 0.2)


def test_it_follows_a_machine_that_has_become_slower() -> None:
    fit = CostFit(CostModel(), NUM_LAYERS)
    learn(fit, CostModel(), steps=300, seed=1)
    learn(fit, TRUE, steps=1000, seed=2)
    assert_close(fit.of(0), TRUE, 0.1)


def test_coefficients_are_never_negative() -> None:
    rng = random.Random(4)
    fit = LinearFit((1.0, 1.0, 1.0))
    for _ in range(300):
        x = [rng.random() for _ in range(3)]
        # The best unconstrained fit has a negative second coefficient.
        fit.add(x, 2.0 * x[0] - 0.5 * x[1] + 1.0 * x[2] + 1.0)
        assert min(fit.coefficients) >= 0.0


def test_a_load_that_never_changes_scales_the_default() -> None:
    default = CostModel()
    fit = CostFit(default, NUM_LAYERS)
    load = StepLoad(1, 16, 16 * 160.0)
    for _ in range(100):
        fit.add_attention(0, load, 3 * attention_s(default, load))
        fit.add_expert(1, 16, 5 * expert_s(default, 1, 16))
    found = fit.of(0)
    assert found.attention_fixed_s == pytest.approx(3 * default.attention_fixed_s, rel=0.01)
    assert found.attention_pair_s == pytest.approx(3 * default.attention_pair_s, rel=0.01)
    assert found.expert_token_s == pytest.approx(5 * default.expert_token_s, rel=0.01)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan")])
def test_what_is_no_time_is_ignored(duration_s: float) -> None:
    fit = CostFit(CostModel(), NUM_LAYERS)
    fit.add_attention(0, StepLoad(1, 1, 1.0), duration_s)
    fit.add_expert(1, 1, duration_s)
    fit.add_attention(0, StepLoad(0, 0, 0.0), 1.0)
    assert fit.of(0) == CostModel()


def test_experts_of_an_attention_node_are_in_its_times() -> None:
    fit, step_s = CostFit(CostModel(), NUM_LAYERS), 0.02
    timings = StepTimings(total_s=step_s, attention_s=step_s, wait_s=0.0, sample_s=0.0)
    for _ in range(20):
        fit.add_step({0: StepLoad(1, 1, 8.0)}, {0: timings})
    assert fit.fixed_s(0) + fit.prompt_s(0, 1, 7) == pytest.approx(step_s, rel=0.01)


def test_a_links_bandwidth_is_not_counted_twice() -> None:
    model = linked_cost_model(latency_us=500.0, gbps=1.0, hidden_size=1000)
    fit = CostFit(model, NUM_LAYERS)
    for _ in range(200):
        fit.add_link(64, model.link_s + 64 * model.link_token_s)
    assert fit.of(0).link_s == pytest.approx(model.link_s)


def test_nodes_of_different_speed_have_their_own_times_and_common_experts() -> None:
    fit, slow = CostFit(CostModel(), NUM_LAYERS), replace(TRUE, attention_token_s=4e-5)
    rng = random.Random(1)
    for _ in range(80):
        load = random_load(rng)
        fit.add_attention(0, load, attention_s(TRUE, load))
        fit.add_attention(1, load, attention_s(slow, load))
        fit.add_expert(1, load.num_tokens, expert_s(TRUE, 1, load.num_tokens))
    assert_close(fit.of(0), TRUE, 0.05)
    assert_close(fit.of(1), slow, 0.05)
    assert fit.of(2).attention_token_s == CostModel().attention_token_s
    assert fit.of(2).expert_token_s == fit.of(0).expert_token_s
