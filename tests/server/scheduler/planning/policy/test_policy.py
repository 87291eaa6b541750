"""The policy's rules, one by one, on a virtual clock and nodes that check their plans."""

from __future__ import annotations

import pytest

from tests.server.scheduler.engine import (
    GATEWAY,
    Engine,
    first_stop,
    make_config,
    make_request,
    num_tokens_of,
)
from tests.server.scheduler.fake_nodes import VOCAB_SIZE
from tests.structs import changed
from topspin.errors import NodeLost
from topspin.messages import (
    NOT_NUMBERS,
    AddRequest,
    Progress,
    RequestFailed,
)

# The two steps in flight.


def test_a_third_step_waits_for_the_first() -> None:
    engine = Engine(make_config())
    engine.add(make_request("r", [1, 2, 3]))
    assert engine.schedule()
    assert engine.schedule()
    assert not engine.schedule()
    assert engine.answer(0)
    assert engine.schedule()
    assert [step.ticket.step for step in engine.steps] == [1, 2, 3]
    assert [step.ticket.previous for step in engine.steps] == [0, 1, 2]
    engine.finish()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_step_beyond_a_predicted_end(max_tokens: int) -> None:
    engine = Engine(make_config(max_model_len=6))
    engine.add(make_request("r", [1, 2, 3], max_tokens=max_tokens))
    engine.finish()
    assert len(engine.steps) == min(max_tokens, 3)


def test_what_is_sampled_past_a_stop_is_neither_emitted_nor_counted() -> None:
    prompt, seed = [1, 2, 3], 4
    stop = first_stop(prompt, seed, 2)
    engine = Engine(make_config())
    engine.add(make_request("r", prompt, max_tokens=20, seed=seed, stop_token_ids=(stop,)))
    engine.finish()
    assert len(engine.steps) == 4  # three tokens, and the step that ran meanwhile
    assert len(engine.clients["r"].tokens) == 3
    assert engine.clients["r"].outputs[-1].stop_token_id == stop
    stats = engine.policy.stats(1, (), engine.now)
    assert (stats.generation_tokens, stats.prompt_tokens) == (3, 3)
    assert (stats.num_steps, stats.query_id) == (4, 1)


# Batching.


def test_decodes_first_then_prefill_chunks_up_to_the_budget() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    engine.add(make_request("a", [1] * 3, max_tokens=20, seed=0))
    engine.add(make_request("b", [2] * 12, max_tokens=20, seed=1))
    for _ in range(3):
        engine.schedule()
        engine.answer(0)
    assert num_tokens_of(engine.steps[0]) == [3, 5]
    assert num_tokens_of(engine.steps[1]) == [1, 7]  # b's last chunk, and its first token
    assert num_tokens_of(engine.steps[2]) == [1, 1]
    assert list(engine.steps[1].plans[0].micro_batches[0].wanted) == [1, 1]
    assert list(engine.steps[0].plans[0].micro_batches[0].wanted) == [1, 0]
    engine.finish()


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_fixed_number_of_micro_batches(num_micro_batches: int) -> None:
    engine = Engine(make_config(micro_batches=num_micro_batches, num_nodes=2))
    for number in range(3):
        engine.add(make_request(f"r{number}", [number] * 3, seed=number))
    engine.finish()
    for step in engine.steps:
        assert step.ticket.num_micro_batches == num_micro_batches
        for plan in step.plans.values():
            assert len(plan.micro_batches) == num_micro_batches


def test_requests_spread_over_the_nodes() -> None:
    engine = Engine(make_config(num_nodes=3))
    for number in range(6):
        engine.add(make_request(f"r{number}", [number] * 3, seed=number))
    engine.schedule()
    assert [len(engine.steps[0].plans[node].new) for node in range(3)] == [2, 2, 2]
    engine.finish()


def test_a_step_is_done_when_all_participants_have_answered() -> None:
    engine = Engine(make_config(num_nodes=2))
    engine.add(make_request("a", [1] * 3, seed=0))
    engine.add(make_request("b", [2] * 3, seed=1))
    engine.schedule()
    engine.schedule()
    engine.answer(1)
    engine.answer(1)  # node 1 is one step ahead
    assert not engine.clients["b"].tokens
    oldest = engine.policy.oldest_step()
    assert oldest is not None
    assert oldest.unanswered == [0]
    engine.answer(0)
    assert len(engine.clients["a"].tokens) == len(engine.clients["b"].tokens) == 1
    engine.answer(0)
    assert len(engine.clients["a"].tokens) == len(engine.clients["b"].tokens) == 2
    engine.finish()


def test_a_step_runs_from_the_end_of_the_one_before() -> None:
    engine = Engine(make_config())
    engine.add(make_request("r", [1, 2, 3], max_tokens=3))
    engine.now = 10.0
    engine.schedule()
    engine.now = 12.0
    engine.schedule()
    engine.answer(0)  # at 12.01
    oldest = engine.policy.oldest_step()
    assert oldest is not None
    assert oldest.step == 2
    assert oldest.since_s == pytest.approx(12.01)
    assert engine.policy.stats(0, (), 15.01).progress_age_s == pytest.approx(3.0)
    for step, generation in ((1, 1), (3, 1), (2, 2)):  # none of them is the running one
        message = Progress(step=step, generation=generation, role="expert", index=0)
        engine.policy.progressed(message, 14.0)
    assert engine.policy.stats(0, (), 15.01).progress_age_s == pytest.approx(3.0)
    engine.policy.progressed(Progress(step=2, generation=1, role="expert", index=0), 14.0)
    assert engine.policy.stats(0, (), 15.01).progress_age_s == pytest.approx(1.01)
    assert engine.policy.stats(0, (), engine.now).step_seconds == pytest.approx(2.01)
    engine.finish()
    assert engine.policy.oldest_step() is None
    assert engine.policy.stats(0, (), 20.0).progress_age_s is None


# Refusals and ends.


def refusal(engine: Engine, message: AddRequest) -> tuple[str, int, str]:
    """Add a request that must be refused; returns code, status and message."""
    failed = engine.policy.add(message, peer=GATEWAY, now=0.0)
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == message.request_id
    return failed.code, failed.status, failed.message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (make_request("r", []), "empty"),
        (make_request("r", [VOCAB_SIZE]), "0..49"),
        (make_request("r", [-1]), "0..49"),
        (make_request("r", [1] * 64), "leaves no room"),
        (make_request("r", [1] * 20, max_tokens=13), "do not fit the cache of a node"),
        (changed(make_request("r", [1]), {"prompt": b"123"}), "not a multiple of 4"),
    ],
)
def test_what_cannot_be_served_is_refused(message: AddRequest, reason: str) -> None:
    engine = Engine(make_config(), num_blocks=8)
    code, status, text = refusal(engine, message)
    assert (code, status) == ("invalid_request_error", 400)
    assert reason in text
    assert engine.policy.num_waiting == 0


def test_the_longest_request_that_fits_is_served() -> None:
    engine = Engine(make_config(), num_blocks=8)
    assert engine.policy.max_request_tokens == 32
    engine.add(make_request("r", [1] * 20, max_tokens=12))
    engine.finish()
    assert len(engine.clients["r"].tokens) == 12


def test_a_request_id_is_used_once_at_a_time_and_gateway() -> None:
    engine = Engine(make_config())
    engine.add(make_request("r", [1], max_tokens=1))
    code, status, text = refusal(engine, make_request("r", [1]))
    assert (code, status) == ("invalid_request_error", 400)
    assert "'r'" in text
    assert engine.policy.abort("r", peer=b"other") is False
    assert engine.policy.add(make_request("r", [1]), peer=b"other", now=0.0) is None
    assert engine.policy.abort_peer(b"other") == 1
    engine.finish()
    assert engine.policy.add(make_request("r", [1]), peer=GATEWAY, now=0.0) is None


def test_the_queue_has_a_limit() -> None:
    engine = Engine(make_config(max_num_seqs=2, max_num_queued_reqs=3))
    for number in range(5):  # two seats and three places in the queue
        assert engine.add(make_request(f"r{number}", [1, number], seed=number)) is None
    code, status, text = refusal(engine, make_request("late", [1]))
    assert (code, status) == ("rate_limit_exceeded", 429)
    assert "3" in text
    engine.finish()
    assert engine.add(make_request("later", [1], seed=9)) is None
    engine.finish()


def test_a_preempted_request_is_not_subject_to_the_queue_limit() -> None:
    config = make_config(block_size=2, max_num_seqs=2, max_model_len=24, max_num_queued_reqs=0)
    engine = Engine(config, num_blocks=12)
    for number in range(2):
        engine.add(make_request(f"r{number}", [number] * 5, max_tokens=16, seed=number))
    engine.finish()
    assert engine.policy.stats(0, (), engine.now).num_preemptions > 0


def test_the_highest_priority_value_is_preempted_first() -> None:
    """The first to arrive gives way to the others, which is not so if all are equal."""
    config = make_config(block_size=2, max_num_seqs=2, max_model_len=24)
    for priority in (0, 1):
        engine = Engine(config, num_blocks=12)
        for number, each in enumerate((priority, 0)):
            message = make_request(
                f"r{number}", [number] * 5, max_tokens=16, seed=number, priority=each
            )
            engine.add(message)
        ended: list[str] = []
        while len(ended) < 2:
            engine.turn()
            for name, client in engine.clients.items():
                if name not in ended and client.outputs and client.outputs[-1].finish_reason:
                    ended.append(name)
        assert engine.policy.stats(0, (), engine.now).num_preemptions
        assert ended[-1] == ("r0" if priority else "r1")


def test_an_error_of_one_sequence_fails_one_request() -> None:
    engine = Engine(make_config(), fails=lambda seq_id: seq_id == 1)
    engine.add(make_request("bad", [1, 2], seed=0))
    engine.add(make_request("good", [1, 2], seed=1))
    engine.finish()
    failed = engine.clients["bad"].failure
    assert failed is not None
    assert (failed.status, failed.code) == (503, "engine_error")
    assert failed.message == NOT_NUMBERS
    assert engine.clients["good"].failure is None


def test_fail_all_ends_everything_once() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("running", [1, 2], max_tokens=20, seed=0))
    engine.add(make_request("waiting", [1, 2], max_tokens=20, seed=1))
    engine.turn()
    engine.schedule()
    engine.receive(engine.policy.fail_all(NodeLost("expert 0 is gone")))
    for client in engine.clients.values():
        assert client.failure is not None
        assert (client.failure.code, client.failure.status) == ("node_lost", 503)
        assert client.failure.message == "expert 0 is gone"
    assert not list(engine.policy.fail_all(NodeLost("again")))
    engine.finish()
