"""Two steps under way on a device that is late, against steps that run one by one.

The ops are the reference's, and so are the sizes of batches: tokens are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attention_nodes.grammars.processes import Grammars
from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from kernels.dispatch import select_ops
from kernels.runtime import HostRuntime, Runtime
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from tests.attention_nodes.delayed_runtime import DelayedRuntime
from tests.attention_nodes.plans import BLOCK_SIZE, Planner, ahead, one_by_one, tokens_of
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from tests.pairwise import few
from tests.structs import changed
from tests.weights import load_attention_weights
from topspin.messages import StepResult
from topspin.plan.spec import NodeConfig

NUM_BLOCKS = 64


@pytest.fixture(scope="module", params=few(["llama", "llama_dynamic_ntk"], "llama"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def config_of(path: Path, kernels: str, **settings: Any) -> NodeConfig:
    fields = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 32, **settings}
    plan = engine_config(path, **fields)
    return changed(plan.for_node(), {"node.kernels": kernels})


def runner_on(path: Path, runtime: Runtime, kernels: str, **settings: Any) -> ModelRunner:
    """Return a runner with the reference's ops and the executor of `kernels`."""
    model, config = load_model_config(path), config_of(path, kernels, **settings)
    weights = load_attention_weights(Checkpoint(path), model, dtype=torch.float32)
    layers = kv_cache.layer_specs(model, torch.float32, config.kv_cache)
    cache = kv_cache.of_blocks(layers, NUM_BLOCKS, block_size=config.kv_cache.block_size)
    decoder = Decoder(model, weights, select_ops("reference", torch.float32), cache)
    grammars = Grammars(path, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
    return ModelRunner(model, decoder, NUM_BLOCKS, config, runtime, grammars=grammars)


@pytest.fixture
def expected(checkpoint: Path) -> ModelRunner:
    return runner_on(checkpoint, HostRuntime(), "reference")


@pytest.fixture
def runtime() -> Iterator[DelayedRuntime]:
    with DelayedRuntime() as runtime:
        yield runtime


@pytest.fixture
def late(checkpoint: Path, runtime: DelayedRuntime) -> ModelRunner:
    return runner_on(checkpoint, runtime, "triton")


def joining_and_leaving(**sampling: Any) -> Planner:
    planner = Planner()
    planner.add(1, [5, 9, 200, 31], **sampling)
    planner.add(2, [17, 3])
    planner.step({1: 4, 2: 2})
    planner.decode([1, 2])
    planner.add(3, list(range(40, 53)), **sampling)
    planner.step({1: 1, 2: 1, 3: 7})
    planner.step({2: 1}, {1: 1, 3: 6})
    planner.decode([1, 2, 3], m=2)
    planner.step({1: 1, 3: 1}, finished=[2])
    planner.decode([1, 3])
    return planner


def same(results: list[StepResult], expected: list[StepResult]) -> None:
    assert [each.step for each in results] == [each.step for each in expected]
    assert [each.tokens for each in results] == [each.tokens for each in expected]
    assert [each.seq_ids for each in results] == [each.seq_ids for each in expected]
    assert [each.logprobs for each in results] == [each.logprobs for each in expected]
    assert [each.errors for each in results] == [each.errors for each in expected]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.9, "top_k": 20, "logprobs": 3}, {"min_tokens": 4, "logit_bias": {7: 2}}],
)
def test_two_steps_under_way_give_the_tokens_of_one(
    late: ModelRunner, expected: ModelRunner, runtime: DelayedRuntime, sampling: dict[str, Any]
) -> None:
    plans = joining_and_leaving(**sampling).plans
    same(ahead(late, plans), one_by_one(expected, plans))
    assert runtime.num_waits == len(plans)  # waits nowhere but in collect()


@pytest.mark.slow
def test_selections_of_steps_under_way_are_those_of_steps_one_by_one(
    tmp_path: Path, runtime: DelayedRuntime
) -> None:
    """Codebooks come into use, more keys are coded, and a sequence ends while a step runs."""
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=2048)
    settings: dict[str, Any] = {
        "block_size": 256, "max_num_batched_tokens": 2048, "kv_retrieval_tokens": 64,
    }  # fmt: skip
    planner = Planner()
    rng = torch.Generator().manual_seed(3)
    lengths = {1: 1035, 2: 1200, 3: 30, 4: 1140}
    for seq_id in (1, 2, 3):
        prompt = torch.randint(250, (lengths[seq_id],), generator=rng).tolist()
        planner.add(seq_id, prompt, max_length=2048)
        planner.step({seq_id: lengths[seq_id]})
    for _ in range(6):
        planner.decode([1, 2, 3], m=2)
    planner.add(4, torch.randint(250, (lengths[4],), generator=rng).tolist(), max_length=2048)
    planner.step({1: 1, 3: 1, 4: 1140}, finished=[2])
    for _ in range(4):
        planner.decode([1, 3, 4])
    late = runner_on(path, runtime, "triton", **settings)
    expected = runner_on(path, HostRuntime(), "reference", **settings)
    found = ahead(late, planner.plans)
    same(found, one_by_one(expected, planner.plans))
    assert runtime.num_waits == len(planner.plans)
    counted = [each.kv for each in found if each.kv is not None]
    assert sum(each.num_coded_segments for each in counted) == 3
    assert sum(each.num_selected_rows for each in counted) > 2 * 10
    without = one_by_one(
        runner_on(path, HostRuntime(), "reference", **settings | {"kv_retrieval_tokens": None}),
        planner.plans,
    )
    assert tokens_of(found) != tokens_of(without), "the selection matters"


def test_nothing_is_waited_for_while_a_step_is_launched(
    late: ModelRunner, runtime: DelayedRuntime
) -> None:
    plans = joining_and_leaving().plans
    with torch.inference_mode():
        late.launch(plans[0], None, index=0)
        late.launch(plans[1], None, index=0)
    assert (late.num_launched, late.is_done, runtime.num_waits) == (2, False, 0)
    runtime.synchronize()
    assert late.is_done


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 0.2},
        {"presence_penalty": -9.0},
        {"frequency_penalty": -9.0},
        {"grammar": "start: /([a-f][0-9])+/"},
    ],
)
def test_penalties_and_grammars_see_tokens_that_were_under_way(
    late: ModelRunner,
    expected: ModelRunner,
    setting: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These penalties reward repetition, so a missing token shows at once; as in the grammar."""
    # It is compiled by the step that finds it so, which a scheduler does only after an eviction.
    monkeypatch.setattr("attention_nodes.sampling.constraints.COMPILE_WAIT_S", 60.0)
    plans = joining_and_leaving(**setting).plans
    results = one_by_one(expected, plans)
    assert not any(each.refused for each in results)
    same(ahead(late, plans), results)
    without = one_by_one(expected, again(joining_and_leaving()).plans)
    assert tokens_of(results) != tokens_of(without)


def again(planner: Planner) -> Planner:
    """Return the same plans with the next generation."""
    planner.plans = [
        msgspec.structs.replace(
            plan, ticket=msgspec.structs.replace(plan.ticket, generation=planner.generation + 1)
        )
        for plan in planner.plans
    ]
    return planner


def test_a_row_is_taken_over_while_its_last_token_is_under_way(
    late: ModelRunner, expected: ModelRunner
) -> None:
    planner = Planner()
    planner.add(1, [5, 9, 200, 31])
    planner.step({1: 4})
    planner.decode([1])
    # Sequence 1 ends, as the scheduler knows, while its next token is being sampled.
    planner.add(2, [77, 12, 8])
    planner.step({2: 3}, finished=[1])
    planner.decode([2])
    planner.add(3, [6, 6, 6, 1])
    planner.step({2: 1, 3: 2})
    planner.step({3: 2}, finished=[2])
    planner.decode([3])
    same(ahead(late, planner.plans), one_by_one(expected, planner.plans))


def test_discarded_steps_have_ended_and_are_forgotten(
    late: ModelRunner, expected: ModelRunner, runtime: DelayedRuntime
) -> None:
    plans = joining_and_leaving().plans
    with torch.inference_mode():
        late.launch(plans[0], None, index=0)
        late.launch(plans[1], None, index=0)
    ended = late._launched[1].receipt.ended
    late.discard()
    assert ended.is_done()
    assert late.num_launched == 0
    plans = again(joining_and_leaving()).plans
    same(ahead(late, plans), one_by_one(expected, plans))


def test_timings_are_the_devices(late: ModelRunner) -> None:
    """The runtime's clock adds a second per event: began, sent, rallied, fetched."""
    for result in ahead(late, joining_and_leaving().plans):
        timings = result.timings
        assert timings.attention_s >= 1.0
        assert timings.sample_s >= 1.0
        parts = timings.prepare_s + timings.attention_s + timings.wait_s + timings.sample_s
        assert timings.total_s == pytest.approx(parts)
        assert timings.gap_s >= 0.0
