"""One runner in the test's process: steps in order, and refusal of plans that do not follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attention_nodes.loading import load_runner
from attention_nodes.step.model_runner import ModelRunner
from kernels.cpu.compiled import runtime
from kernels.cpu.compiled.runtime import Kernel
from tests.attention_nodes.plans import micro_batch, new_sequence, step_ticket
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.engine import engine_config
from tests.structs import changed
from topspin.errors import ConfigError, ProtocolError
from topspin.messages import (
    NewSequence,
    StepPlan,
    pack_ints,
    unpack_ints,
)

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("runner"), "llama")


@pytest.fixture
def runner(checkpoint: Path) -> ModelRunner:
    with torch.inference_mode():
        return load_runner(checkpoint, engine_config(checkpoint).for_node())


def sequence(tokens: list[int]) -> NewSequence:
    return new_sequence(1, tokens, blocks=pack_ints(range(8)))


def plan(step: int, *, ticket: dict[str, Any] | None = None, **changes: Any) -> StepPlan:
    fields = {"finished": b"", "new": (), "micro_batches": (micro_batch({1: 1}),), **changes}
    return StepPlan(ticket=step_ticket(step, **(ticket or {})), **fields)


def first(**changes: Any) -> StepPlan:
    begin = {"new": (sequence(PROMPT),), "micro_batches": (micro_batch({1: len(PROMPT)}),)}
    return plan(1, **{**begin, **changes})


@torch.inference_mode()
def run(runner: ModelRunner, step: StepPlan) -> list[int]:
    return list(unpack_ints(runner.execute(step, None, index=0).tokens))


def test_steps_continue_what_they_sampled(runner: ModelRunner, checkpoint: Path) -> None:
    tokens = run(runner, first())
    for step in range(2, 7):
        tokens += run(runner, plan(step))
    assert tokens == oracle_generate(checkpoint, [PROMPT], 6).tokens[0]


def test_a_request_that_fails_is_logged_under_its_clients_id(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        runner._decoder._final_norm.fill_(torch.nan)
        named = msgspec.structs.replace(sequence(PROMPT), request_id="from-client")
        result = runner.execute(first(new=(named,)), None, index=0)
    (reason,) = result.errors.values()
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert reason in record.getMessage()
    assert vars(record)["fields"] == {"request_id": "from-client"}


def test_a_new_generation_forgets_every_sequence(runner: ModelRunner) -> None:
    tokens = run(runner, first())
    with pytest.raises(ProtocolError, match="was admitted already"):
        run(runner, plan(2, new=(sequence(PROMPT),)))
    assert run(runner, first(ticket={"generation": 2})) == tokens


@pytest.mark.parametrize(
    ("following", "reason"),
    [
        (plan(1), "step 1 after step 1"),
        (plan(2, ticket={"generation": 0}), "generation 0 after 1"),
        (plan(2, ticket={"participants": (1,)}), "not for attention node 0"),
        (plan(2, ticket={"num_micro_batches": 2}), "1 micro-batches, not the ticket's"),
        (plan(2, finished=pack_ints([7])), "7 is finished but was never admitted"),
    ],
)
def test_plans_that_do_not_follow_are_refused(
    runner: ModelRunner, following: StepPlan, reason: str
) -> None:
    run(runner, first())
    with pytest.raises(ProtocolError, match=reason):
        run(runner, following)


def test_more_tokens_than_a_step_may_have_are_refused(checkpoint: Path) -> None:
    config = changed(engine_config(checkpoint).for_node(), {"node.max_num_batched_tokens": 3})
    with torch.inference_mode():
        small = load_runner(checkpoint, config)
    with pytest.raises(ProtocolError, match="4 tokens in a step, more than 3"):
        run(small, first())


def test_a_cache_that_holds_nothing_is_refused_with_the_numbers(checkpoint: Path) -> None:
    config = engine_config(checkpoint, kv_cache_bytes=5000).for_node()
    with pytest.raises(ConfigError, match=r"kv-cache-memory 4.9 KiB holds 1 blocks"):
        load_runner(checkpoint, config)


def test_a_cache_beyond_the_machines_memory_is_refused(checkpoint: Path) -> None:
    config = engine_config(checkpoint, kv_cache_bytes=2**50).for_node()
    with pytest.raises(ConfigError, match=r"kv-cache-memory 1024.0 TiB: this machine has .* free"):
        load_runner(checkpoint, config)


def test_timings_add_up(runner: ModelRunner) -> None:
    with torch.inference_mode():
        timings = runner.execute(first(), None, index=0).timings
    assert timings.wait_s == 0.0
    assert timings.attention_s > 0
    assert timings.sample_s > 0
    assert timings.attention_s + timings.sample_s <= timings.total_s


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("sampling", ["choose", "find_logprobs"]),
        ("compiled.gathered_rows", ["_gather", "_gather"]),
    ],
)
def test_kernels_of_requests_are_compiled_before_the_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, module: str, names: list[str]
) -> None:
    launched = []

    def launch(kernel: Kernel, arguments: Sequence[int], *, num_threads: int) -> None:
        launched.append(kernel.name)
        runtime.launch(kernel, arguments, num_threads=num_threads)

    monkeypatch.setattr(f"kernels.cpu.{module}.launch", launch)
    with torch.inference_mode():
        load_runner(checkpoint, engine_config(checkpoint, kv_cache_dtype="fp8").for_node())
    assert launched == names
