"""Random engines, work and mishaps, checked against direct generation.

Under any schedule (chunks, preemptions, prefix hits, drafts, stops while the next step runs,
aborts, failed sequences, several nodes of any size, grammars that are compiled meanwhile) and
whatever is lost (steps, nodes, the scheduler), every request gets exactly the tokens of a direct
run, every cache position read holds the reader's own prefix, and no block is lost.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from spec_decode.controller import Controller
from tests.server.scheduler.engine import Engine, make_config, make_request
from tests.server.scheduler.fake_nodes import VOCAB_SIZE
from tests.structs import changed
from topspin.messages import AddRequest, CompileGrammar, GrammarReady
from topspin.plan.kv_cache import block_needs
from topspin.plan.spec import EnginePlan

EOS = 5


def random_plan(rng: random.Random) -> EnginePlan:
    """Return a plan whose nodes differ in seats and in tokens per step."""
    plan = make_config(
        block_size=rng.choice((1, 2, 4)),
        max_model_len=rng.choice((16, 40)),
        num_nodes=rng.choice((1, 1, 2, 3)),
        micro_batches=rng.choice((None, 1, 2, 3, 4)),
        prefix_caching=rng.random() < 0.8,
        max_preemptions=rng.choice((0, 1, 4)),
    )
    nodes = []
    for node in plan.attention:
        seats = rng.randrange(1, 9)
        limits = {"max_num_seqs": seats, "max_num_batched_tokens": seats + rng.randrange(20)}
        nodes.append(changed(node, limits))
    return changed(plan, {"nodes": (*nodes, *plan.experts)})


def random_windows(rng: random.Random) -> tuple[int | None, ...]:
    """Return the windows of the layers: mostly none, or some in one or several groups."""
    some = ((None, 3), (None, 8, None, 8), (5, 5), (None, 2, 2, 2), (None, None, 7), (4, 9, None))
    return rng.choice(((), (), *some))


def random_blocks(
    rng: random.Random, plan: EnginePlan, windows: tuple[int | None, ...]
) -> list[int]:
    """Return the nodes' blocks; the first holds the longest request, just so or with ease."""
    needs = block_needs(
        windows,
        plan.kv_cache,
        max_len=plan.model.max_model_len,
        max_step_tokens=max(node.max_num_batched_tokens for node in plan.attention),
    )
    least = needs.of(-(-plan.model.max_model_len // plan.kv_cache.block_size))
    first = least + rng.choice((0, 2, 10, 100))
    others = rng.choice((lambda: first, lambda: rng.randrange(2, 30)))
    return [first, *(others() for _ in plan.attention[1:])]


def random_drafts(rng: random.Random) -> dict[str, Any]:
    """Return an Engine's settings: no drafts, short ones or ones of several blocks, of any luck."""
    longest = rng.choice((None, 1, 3, 9))
    if longest is None:
        return {}
    settings: dict[str, Any] = {
        "offers": lambda at_most: rng.randint(0, at_most),
        "accepts": lambda at_most: rng.randint(0, at_most),
    }
    if rng.random() < 0.3:
        return {**settings, "controller": Controller(longest)}
    return {**settings, "draft_tokens": lambda request: request.arrival % (longest + 1)}


class Chaos:
    """A random engine, and the things that may happen to it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        plan = random_plan(rng)
        windows = random_windows(random.Random(rng.random()))
        broken = rng.sample(range(1, 60), rng.choice((0, 8)))
        self.engine = Engine(
            plan,
            num_blocks=random_blocks(rng, plan, windows),
            windows=windows,
            fails=lambda seq_id: seq_id in broken,
            **random_drafts(rng),
        )
        self._has_grammars = rng.random() < 0.3
        self._num_nodes = len(plan.attention)
        self._answers: list[GrammarReady] = []
        self._number = 0
        self.is_halted = False

    def add(self) -> None:
        """Add a request, often with a prompt that begins like another one."""
        if self._number < 40:
            assert self.engine.add(self._request(self._number)) is None
            self._number += 1

    def _request(self, number: int) -> AddRequest:
        rng, longest = self._rng, self.engine.config.model.max_model_len
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
        prompt = [*([7, 3, 9, 1] * 4)[: rng.randrange(17)], *own][: longest - 1]
        max_tokens = rng.randrange(1, longest - len(prompt) + 1) if rng.random() < 0.9 else 0
        ends: dict[str, Any] = {
            "min_tokens": rng.choice((0, 0, 3)),
            "eos_token_ids": rng.choice(((), (EOS,))),
        }
        if self._has_grammars and rng.random() < 0.5:
            grammar = f"start: /{rng.randrange(4)}/"
            ends = {"grammar": grammar, "eos_token_ids": (EOS,)}
        return make_request(
            f"r{number}",
            prompt,
            max_tokens=max_tokens,
            seed=number,
            salt=rng.choice(("a", "b")),
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 2, 5)))),
            prompt_logprobs=rng.choice((None, None, 1)),
            **ends,
        )

    def schedule(self) -> None:
        """Plan a step, which a halted engine does not."""
        assert not (self.engine.schedule() and self.is_halted)

    def answer(self) -> None:
        """Let a node answer a step."""
        self.engine.answer(self._rng.randrange(self._num_nodes))

    def compile(self) -> None:
        """Let a node answer that it has compiled a grammar."""
        self.ask()
        if self._answers:
            answer = self._answers.pop(self._rng.randrange(len(self._answers)))
            assert not list(self.engine.policy.compiled(answer, self.engine.now))

    def ask(self) -> None:
        """Send the nodes what they are to compile."""
        for message in self.engine.policy.compilations.take_unsent():
            if isinstance(message, CompileGrammar):
                nodes = self.engine.present
                self._answers += [GrammarReady(index=node, key=message.key) for node in nodes]

    def abort(self) -> None:
        """Abort a request, ended or not; rarely."""
        if self._number and self._rng.random() < 0.2:
            self.engine.abort(f"r{self._rng.randrange(self._number)}")

    def lose(self) -> None:
        """Lose the steps in flight and any nodes, or go on with those that are left or back."""
        engine, rng = self.engine, self._rng
        if not self.is_halted:
            engine.halt([idx for idx in engine.present if rng.random() < 0.4])
            self.is_halted = True
            return
        absent = [idx for idx in range(self._num_nodes) if idx not in engine.present]
        back = [idx for idx in absent if rng.random() < 0.7]
        if engine.present or back:
            engine.resume(back)
            self.is_halted = False

    def replace_scheduler(self) -> None:
        """Lose the scheduler."""
        self.engine.replace_scheduler()
        self.is_halted = False

    def finish(self) -> None:
        """Bring all nodes back and run to the end."""
        if not self.is_halted:
            self.engine.halt()
        self.engine.resume(range(self._num_nodes))
        self.ask()
        while self._answers:
            self.compile()
        self.engine.finish()
        while self.engine.late:
            self.engine.answer_late()


@pytest.mark.parametrize("mishaps", [0.0, 0.05])
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(each, marks=pytest.mark.slow) for each in range(6, 150))]
)
def test_every_request_gets_the_tokens_of_a_direct_run(seed: int, mishaps: float) -> None:
    rng = random.Random(f"{seed} {mishaps}")
    chaos = Chaos(rng)
    engine = chaos.engine
    steps = [chaos.schedule, chaos.answer] * 4
    usual = [*[chaos.add] * 2, *steps, chaos.compile, chaos.abort]
    losses = [*[chaos.lose] * 4, chaos.replace_scheduler, engine.answer_late]
    num_mishaps = 0
    for _ in range(300):
        if rng.random() < mishaps:
            num_mishaps += 1
            rng.choice(losses)()
        else:
            rng.choice(usual)()
        engine.policy.check_integrity()
    chaos.finish()
    assert (num_mishaps > 0) == (mishaps > 0)
    codes = {client.failure.code for client in engine.clients.values() if client.failure}
    assert codes <= {"engine_error", "node_lost"}
