"""The blocks reserved for drafts, and given back; answers that do not fit the plan."""

from __future__ import annotations

from server.scheduler.micro_batching.cost import StepLoad
from server.scheduler.planning.in_flight import NodePart, fed
from tests.server.scheduler.engine import GATEWAY, Engine, first_stop, make_config, make_request
from topspin.messages import pack_ints, unpack_ints


def slices_of(engine: Engine, step: int) -> list[tuple[int, int, int]]:
    """Return (sequence, certain positions, most draft tokens) of each slice of a step."""
    (part,) = engine.steps[step].plans[0].micro_batches
    seq_ids, counts = unpack_ints(part.seq_ids), unpack_ints(part.num_tokens)
    drafts = unpack_ints(part.max_draft) if part.max_draft else [0] * len(seq_ids)
    return list(zip(seq_ids, counts, drafts, strict=True))


def test_the_next_step_is_planned_while_a_draft_is_under_way() -> None:
    engine = Engine(
        make_config(), draft_tokens=lambda request: 3, accepts=lambda most: min(2, most)
    )
    engine.add(make_request("r", [1, 2, 3], max_tokens=20))
    while engine.schedule() or engine.answer(0):
        pass
    engine.finish()
    # The prompt and its token, then three a step; the last steps have less room.
    assert slices_of(engine, 0) == [(1, 3, 0)]
    assert slices_of(engine, 1) == [(1, 1, 3)]
    assert slices_of(engine, 2) == [(1, 1, 3)]
    sizes = [len(output.token_ids) for output in engine.clients["r"].outputs]
    assert sizes == [1, 3, 3, 3, 3, 3, 3, 1]


def test_a_draft_that_may_complete_its_sequence_is_not_waited_for() -> None:
    engine = Engine(make_config(), draft_tokens=lambda request: 9)
    engine.add(make_request("r", [1, 2, 3], max_tokens=6))
    assert engine.schedule()
    assert engine.schedule()
    assert slices_of(engine, 1) == [(1, 1, 4)]
    engine.answer(0)
    assert engine.schedule()
    assert slices_of(engine, 2) == [(1, 1, 3)]
    engine.finish()


def test_what_a_draft_has_past_a_stop_is_neither_emitted_nor_counted() -> None:
    prompt, seed = [1, 2, 3], 4
    stop = first_stop(prompt, seed, 2)
    engine = Engine(make_config(), draft_tokens=lambda request: 5, accepts=lambda most: most)
    engine.add(make_request("r", prompt, max_tokens=12, seed=seed, stop_token_ids=(stop,)))
    engine.finish()
    assert len(engine.clients["r"].tokens) == 3
    stats = engine.policy.stats(0, (), engine.now)
    assert stats.generation_tokens == 3
    assert sum(stats.num_accepted_tokens) > 2, "nothing was drafted past the stop"


def test_refused_drafts_are_given_back() -> None:
    engine = Engine(make_config(block_size=2), draft_tokens=lambda request: 5)
    engine.add(make_request("r", [1, 2, 3], max_tokens=30))
    for _ in range(6):
        engine.turn()
    request = engine.policy._requests[GATEWAY, "r"]
    assert request.sequence is not None
    # Two steps under way or planned may each add six; what is refused adds nothing.
    assert request.sequence.num_planned - request.sequence.num_committed <= 12
    assert request.sequence.num_unsure == 5 * request.sequence.num_in_flight
    assert len(request.sequence.blocks) <= (len(request.tokens) + 12) // 2 + 1
    engine.finish()


def test_no_sequence_is_preempted_for_a_draft() -> None:
    """Two requests fill the cache but for a block; a draft takes that one, and no more."""
    engine = Engine(
        make_config(max_num_batched_tokens=64), num_blocks=9, draft_tokens=lambda request: 9
    )
    engine.add(make_request("a", [1] * 15, max_tokens=2, seed=0))
    engine.add(make_request("b", [2] * 13, max_tokens=8, seed=1))
    engine.finish()
    assert engine.policy.stats(0, (), 0.0).num_preemptions == 0


def test_half_of_the_budget_is_left_for_prompts_and_rows_are_bounded() -> None:
    engine = Engine(
        make_config(max_num_batched_tokens=32), draft_tokens=lambda request: 9, num_blocks=64
    )
    for name in "abcd":
        engine.add(make_request(name, [1, 2, 3], max_tokens=40, seed=ord(name)))
    engine.turn()
    engine.turn()
    # 32 tokens, 4 of them certain: 14 of the others are for drafts.
    assert slices_of(engine, 1) == [(1, 1, 9), (2, 1, 5), (3, 1, 0), (4, 1, 0)]
    engine.finish()


def test_what_nodes_draft_and_keep_is_counted() -> None:
    engine = Engine(
        make_config(max_num_batched_tokens=64),
        draft_tokens=lambda request: 4,
        accepts=lambda most: min(most, 2),
    )
    engine.add(make_request("r", [1, 2, 3], max_tokens=20))
    engine.finish()
    stats = engine.policy.stats(0, (), 0.0)
    # One token from the prompt, then two drafts of three tokens per step; the last have less room.
    assert stats.num_drafts == 6
    assert stats.num_draft_tokens == 4 * 5 + 3
    assert stats.num_accepted_tokens == (6, 6)
    none = Engine(make_config())
    none.add(make_request("r", [1, 2, 3], max_tokens=20))
    none.finish()
    stats = none.policy.stats(0, (), 0.0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0, ())


def test_only_rows_that_were_fed_are_learned_from() -> None:
    engine = Engine(make_config(), draft_tokens=lambda request: 4)
    engine.add(make_request("r", [1, 2, 3], max_tokens=20))
    engine.turn()
    seq = engine.policy._requests[GATEWAY, "r"].sequence
    assert seq is not None
    first = seq.num_committed

    def load(num_rows: int) -> StepLoad:
        return StepLoad(1, num_rows, sum(first + 1 + row for row in range(num_rows)))

    part = NodePart([seq], [1], [4], {}, pack_ints([seq.seq_id]))
    assert fed(load(5), part) == load(1)
    for length in range(5):
        part.drafted = [length]
        assert fed(load(5), part) == load(1 + length)
    part.drafts = [0]
    assert fed(load(1), part) == load(1)
