"""The blocks in memory of a node whose other blocks are in a file."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from server.scheduler.planning.frames import FrameBudget
from server.scheduler.planning.sequence import Sequence
from tests.server.scheduler.engine import Engine, make_config, make_request
from tests.server.scheduler.planning.test_intake import INTAKE
from topspin.messages import pack_ints
from topspin.plan.retrieval import SEGMENT_TOKENS, RetrievalPolicy, SpillSpec
from topspin.plan.spec import EnginePlan


def spilling(**settings: Any) -> EnginePlan:
    plan = make_config(**settings)
    cache = msgspec.structs.replace(
        plan.kv_cache,
        retrieval=RetrievalPolicy(num_tokens=512),
        spill=SpillSpec(directory="/tmp", size_bytes=1),
    )
    return msgspec.structs.replace(plan, kv_cache=cache)


@given(
    block_size=st.sampled_from([1, 16, 128, 1024]),
    num_sinks=st.integers(0, 40),
    num_recent=st.integers(1, 3000),
    num_selected=st.integers(1, 600),
    num_committed=st.integers(1100, 9000),
    num_drafted=st.integers(0, 60),
    lag=st.integers(0, 63),
)
def test_the_budget_covers_what_a_node_keeps(
    block_size: int,
    num_sinks: int,
    num_recent: int,
    num_selected: int,
    num_committed: int,
    num_drafted: int,
    lag: int,
) -> None:
    """Sinks, all from the beginning of the segment that is coded last, and the copies, in blocks.

    Keys are coded up to 63 tokens before the recent window.
    """
    policy = RetrievalPolicy(
        num_tokens=num_sinks + num_recent + num_selected,
        num_sinks=num_sinks,
        num_recent=num_recent,
    )
    length = num_committed + 1 + num_drafted
    num_blocks = -(-length // block_size)
    needed = num_blocks
    if length > policy.num_resident:
        coded_end = max(num_committed - num_recent - lag, 0)
        first = coded_end // SEGMENT_TOKENS * SEGMENT_TOKENS // block_size
        begin = min(-(-num_sinks // block_size), first)
        needed = begin + num_blocks - first - (-policy.num_hot // block_size)
    sequence = Sequence(
        request=INTAKE.request(make_request("r", [1]), peer=b"gateway", arrival=0),
        seq_id=1,
        replica_idx=0,
        blocks=list(range(num_blocks)),
        block_size=block_size,
        num_planned=num_committed,
        num_committed=num_committed,
        length=1,
        position_limit=10_000,
        num_sent=0,
    )
    budget = FrameBudget(100_000, block_size=block_size, policy=policy)
    assert budget.need(sequence) >= needed
    assert FrameBudget(5, block_size=block_size, policy=policy).need(sequence) <= max(5, num_blocks)
    while_computed = budget.need_of(sequence.request, num_blocks)
    assert while_computed >= max(num_blocks, budget.need(sequence))


def test_running_sequences_fit_in_memory_and_all_requests_end() -> None:
    engine = Engine(spilling(), num_blocks=64, num_frames=11)
    prompts = [[seed] * 14 + [seed, seed + 1] for seed in range(8)]
    for seed, prompt in enumerate(prompts):
        engine.add(make_request(f"r{seed}", prompt, max_tokens=9, seed=seed))
    replica = engine.policy._replicas[0]
    most = 0
    while (was_planned := engine.schedule()) or engine.answer(0):
        running = [*replica.prefilling.values(), *replica.decoding.values()]
        held = sum(len(seq.blocks) for seq in running)
        assert held <= 11
        # All of them attend to all their keys, and what was counted as they came and grew is held.
        assert replica.num_frames_needed == held
        assert engine.policy.stats(0, (), 0.0).kv_frames_usage == held / 11
        if was_planned:
            assert replica._frames_left == 11 - held
        most = max(most, len(running))
    assert most == 2
    assert all(client.ended for client in engine.clients.values())
    engine.policy.check_integrity()
    # Their prefixes are more than fits in memory, and are found.
    for seed, prompt in enumerate(prompts):
        engine.add(make_request(f"again{seed}", prompt, max_tokens=1, seed=seed))
        engine.finish()
    cached = [engine.clients[f"again{seed}"].outputs[0].num_cached_tokens for seed in range(8)]
    assert cached == [12] * 8


def test_a_request_may_be_as_long_as_the_memory() -> None:
    engine = Engine(spilling(), num_blocks=64, num_frames=5)
    assert engine.policy.max_request_tokens == 20
    for count, max_tokens in ((20, 0), (19, 1), (10, 10)):
        engine.add(make_request(f"r{count}", list(range(count)), max_tokens=max_tokens, seed=count))
        engine.finish()
        assert engine.clients[f"r{count}"].failure is None
    refused = engine.add(make_request("long", list(range(21)), max_tokens=1, seed=99))
    assert refused is not None


def test_lost_blocks_are_no_prefix_any_more() -> None:
    engine = Engine(spilling(), num_blocks=64, num_frames=32)
    prompt = list(range(17))
    engine.add(make_request("a", prompt, max_tokens=1, seed=0))
    engine.finish()
    blocks = engine.policy._replicas[0].pool
    lost = [block for block in range(64) if block in blocks._cached]
    engine.add(make_request("b", [40, 41], max_tokens=1, seed=1))
    engine.schedule()
    (result,) = engine.results[0]
    engine.results[0][0] = msgspec.structs.replace(result, lost_blocks=pack_ints(lost[-1:]))
    engine.finish()
    engine.policy.check_integrity()
    engine.add(make_request("c", prompt, max_tokens=1, seed=2))
    engine.finish()
    assert 0 <= engine.clients["c"].outputs[0].num_cached_tokens < 16
