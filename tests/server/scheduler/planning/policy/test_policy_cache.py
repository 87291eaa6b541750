"""The policy and its blocks: shared prefixes, preempted sequences."""

from __future__ import annotations

from server.scheduler.planning.block_pool import HashChain
from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.messages import (
    unpack_ints,
)

# The prefix cache.


def test_a_prefix_is_reused_once_its_step_has_succeeded() -> None:
    engine = Engine(make_config())
    prompt = list(range(10))
    engine.add(make_request("a", prompt, max_tokens=1, seed=0))
    engine.schedule()
    engine.add(make_request("b", prompt, max_tokens=1, seed=1))
    engine.schedule()  # a's blocks are written, but not yet confirmed
    engine.finish()
    engine.add(make_request("c", prompt, max_tokens=1, seed=2))
    engine.finish()
    cached = {name: client.outputs[0].num_cached_tokens for name, client in engine.clients.items()}
    assert cached == {"a": 0, "b": 0, "c": 8}
    stats = engine.policy.stats(0, (), engine.now)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (30, 8)


def test_an_answer_is_a_prefix_of_the_next_turn() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", [1, 2, 3], max_tokens=10, seed=0))
    engine.finish()
    conversation = [1, 2, 3, *engine.clients["a"].tokens, 9]
    engine.add(make_request("b", conversation, max_tokens=1, seed=1))
    engine.finish()
    assert engine.clients["b"].outputs[0].num_cached_tokens == 12


def test_prefix_caching_can_be_off() -> None:
    engine = Engine(make_config(prefix_caching=False))
    for number in range(2):
        engine.add(make_request(f"r{number}", list(range(9)), max_tokens=1, seed=number))
        engine.finish()
    assert engine.clients["r1"].outputs[0].num_cached_tokens == 0
    assert engine.policy.stats(0, (), engine.now).prefix_cache_queries == 0


def test_the_prefix_decides_the_node() -> None:
    engine = Engine(make_config(num_nodes=2))
    engine.add(make_request("a", [1] * 9, max_tokens=1, seed=0))
    engine.add(make_request("b", [2] * 9, max_tokens=1, seed=1))
    engine.finish()
    engine.add(make_request("c", [2] * 9, max_tokens=1, seed=2))
    engine.finish()
    assert tuple(engine.steps[-1].plans) == (1,)


# Groups of layers with windows.


def test_a_long_sequence_holds_its_window_only() -> None:
    """While its prompt is computed a step's positions beside, in each of 3 groups of layers."""
    config = make_config(max_model_len=512, max_num_batched_tokens=16)
    engine = Engine(config, windows=(None, 8, 8), num_blocks=180)
    engine.add(make_request("a", [n % 40 for n in range(400)], max_tokens=100, seed=0))
    most = 0
    while not engine.clients["a"].tokens:
        engine.turn()
        most = max(most, engine.policy.stats(0, (), engine.now).kv_positions[8])
    # 8 positions, those of two steps, and the rest of the blocks at both ends.
    assert 8 + 16 <= most <= 8 + 2 * 16 + 2 * 4
    for _ in range(50):
        engine.turn()
    held = engine.policy.stats(0, (), engine.now).kv_positions
    assert held[0] >= 400
    assert held[8] <= 16
    engine.finish()
    assert engine.policy.stats(0, (), engine.now).kv_positions == {0: 0, 8: 0}


def test_a_request_is_as_long_as_the_blocks_of_all_groups_allow() -> None:
    config = make_config(max_model_len=512, max_num_batched_tokens=16)
    assert Engine(config, num_blocks=60).policy.max_request_tokens == 240
    # 12 blocks of 4 positions are the most behind a window of 12 and in two steps.
    assert Engine(config, windows=(None, 12), num_blocks=60).policy.max_request_tokens == 4 * 48


def test_a_prefix_is_cached_if_every_window_before_its_end_is() -> None:
    engine = Engine(make_config(max_num_batched_tokens=16), windows=(None, 6), num_blocks=30)
    prompt = list(range(33))
    engine.add(make_request("a", prompt, max_tokens=1, seed=0))
    engine.finish()
    for number, (num_shared, expected) in enumerate([(33, 32), (20, 20), (9, 8)], start=1):
        tokens = [*prompt[:num_shared], *[45] * (33 - num_shared)]
        engine.add(make_request(f"r{number}", tokens, max_tokens=1, seed=number))
        engine.finish()
        assert engine.clients[f"r{number}"].outputs[0].num_cached_tokens == expected


def test_no_prefix_ends_where_others_have_taken_the_window() -> None:
    engine = Engine(make_config(max_num_batched_tokens=16), windows=(None, 6), num_blocks=30)
    engine.add(make_request("a", range(33), max_tokens=1, seed=0))
    engine.finish()
    tables = engine.policy._replicas[0].tables
    hashes = HashChain("", 4).first(8, list(range(33)))
    lengths = []
    while all(tables.pool.find(each) is not None for each in hashes):
        lengths.append(len(tables.find_prefix(hashes)) // 2)
        tables.pool.acquire(1)
    # Blocks behind the window are the first that others take, before those without one.
    assert lengths == sorted(lengths, reverse=True)
    assert set(lengths) == {8, 0}


# Blocks and preemption.


def test_the_latest_arrival_gives_way_and_keeps_its_place_and_tokens() -> None:
    config = make_config(block_size=2, max_num_seqs=2, max_model_len=24)
    engine = Engine(config, num_blocks=12)
    for number in range(3):
        engine.add(make_request(f"r{number}", [number] * 5, max_tokens=16, seed=number))
    while not engine.policy.stats(0, (), engine.now).num_preemptions:
        engine.turn()
    # r1 was preempted for r0; it comes before r2, which has never run.
    assert engine.clients["r1"].tokens
    assert not engine.clients["r2"].tokens
    engine.finish()
    admitted = [new for step in engine.steps for new in step.plans[0].new]
    assert [new.sampling.seed for new in admitted][:3] == [0, 1, 1]
    again = admitted[2]
    assert again.seq_id != admitted[1].seq_id
    assert again.num_prompt_tokens == 5
    # The token of the step that ran when it was preempted was still accepted.
    index = len(unpack_ints(again.tokens)) - 5
    assert list(unpack_ints(again.tokens))[5:] == engine.clients["r1"].tokens[:index]
    assert index > 0
    # It found its old blocks in the cache; the outputs of its client do not change.
    assert again.num_computed > 0
    assert {output.num_cached_tokens for output in engine.clients["r1"].outputs} == {0}


def test_a_request_is_preempted_at_most_so_often() -> None:
    config = make_config(block_size=1, max_num_seqs=6, max_model_len=30, max_preemptions=2)
    engine = Engine(config, num_blocks=30)
    for number in range(6):
        engine.add(make_request(f"r{number}", [number] * 4, max_tokens=26, seed=number))
    engine.finish()
    admissions = [new.sampling.seed for step in engine.steps for new in step.plans[0].new]
    assert engine.policy.stats(0, (), engine.now).num_preemptions == len(admissions) - 6
    assert 1 < max(admissions.count(seed) for seed in range(6)) <= 3


def admissions(engine: Engine) -> list[int]:
    """Return the seeds of the requests admitted to node 0, in order."""
    return [new.sampling.seed for step in engine.steps for new in step.plans[0].new]


def test_a_protected_sequence_is_no_victim_and_its_blocks_are_kept_for_it() -> None:
    config = make_config(
        block_size=1, max_num_seqs=4, max_model_len=30, max_preemptions=1, prefix_caching=False
    )
    engine = Engine(config, num_blocks=30)
    engine.add(make_request("oldest", [0] * 4, max_tokens=26, seed=0))
    engine.add(make_request("short", [1] * 4, max_tokens=8, seed=1))
    engine.add(make_request("latest", [2] * 4, max_tokens=18, seed=2))
    while admissions(engine) != [0, 1, 2, 2]:  # `latest` is preempted, back when `short` ends
        assert engine.turn()
    # One block would be enough for the new request, but `latest` may still need the free ones.
    engine.add(make_request("new", [3], max_tokens=1, seed=3))
    engine.turn()
    assert engine.policy.num_running == 2
    assert engine.policy.stats(0, (), engine.now).kv_cache_usage < 0.9
    engine.finish()
    # Then the oldest is preempted, and comes back first.
    assert admissions(engine) == [0, 1, 2, 2, 0, 3]


def test_admission_leaves_room_for_the_first_output_token() -> None:
    engine = Engine(make_config(block_size=1), num_blocks=10)
    engine.add(make_request("a", [1] * 5, max_tokens=2, seed=0))
    engine.add(make_request("b", [2] * 5, max_tokens=2, seed=1))
    engine.schedule()
    assert engine.policy.num_running == 1
    engine.finish()
    assert engine.policy.stats(0, (), engine.now).num_preemptions == 0


def test_without_preemptions_only_what_surely_fits_is_admitted() -> None:
    config = make_config(block_size=1, max_num_seqs=6, max_model_len=30, max_preemptions=0)
    engine = Engine(config, num_blocks=30)
    for number in range(4):
        engine.add(make_request(f"r{number}", [number] * 4, max_tokens=11, seed=number))
    engine.schedule()
    assert engine.policy.num_running == 2  # 14 positions each
    engine.finish()
    assert engine.policy.stats(0, (), engine.now).num_preemptions == 0
