"""The speed-up by a draft node that drafts while the target verifies, on cores of its own.

Plays the real rounds (spec_decode.rounds, spec_decode.asking) and the real serial runner against a
made-up model on a virtual clock: a step of the target takes 1, a pass of the draft model a given
share of that, a message a small one. The target's next token is the draft model's first choice with
a given probability, and the second with half of the rest. This machine's cores are shared by all
nodes, where times add up; what a draft node brings on a device of its own is computed here, by the
code that would run there. Run as

    python -m benchmarks.spec_simulator [--steps 2000]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.experiment import Experiment, rows_of
from spec_decode.asking import Questions
from spec_decode.draft import ROOT, Draft, DraftRequest, DraftText, accepted
from spec_decode.forest import Growth, Kept, PassRows
from spec_decode.rounds import DraftRounds
from spec_decode.serial import SerialDrafter

VOCAB: Final = 64
CONTEXT: Final = 6
"""Tokens on which the next ones depend."""
MOST: Final = 8
WIDTH: Final = 8
"""Tokens of a draft, and leaves that are expanded in a pass, as in SwiftSpec (bs = w = 8)."""
CHOICES: Final = 4
MAX_PASSES: Final = 16
SYNC: Final = 0.01
"""A message there and back, in steps of the target."""
RATIOS: Final = (1 / 8, 1 / 6, 1 / 4, 1 / 3)
PEER: Final = b"target"


class World:
    """What draft model and target say after a text; the same whenever they are asked."""

    def __init__(self, acceptance: float, seed: int) -> None:
        rest = 1.0 - acceptance
        self._shares = [acceptance, *(rest / 2**idx for idx in range(1, CHOICES))]
        self._seed = seed
        self.choices: Callable[[tuple[int, ...]], tuple[int, ...]] = lru_cache(2**16)(self._choices)

    def _rng(self, kind: str, ending: Hashable) -> random.Random:
        return random.Random(repr((self._seed, kind, ending)))

    def _choices(self, ending: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._rng("draft", ending).sample(range(VOCAB), CHOICES))

    def logps(self, ending: tuple[int, ...]) -> dict[int, float]:
        """Return the draft model's likeliest tokens, which are as likely as it says."""
        choices = self.choices(ending)
        return {token: math.log(p) for token, p in zip(choices, self._shares, strict=True)}

    def next_token(self, text: Sequence[int]) -> int:
        """Return the token that plain decoding continues with: one of the choices, or any."""
        ending = tuple(text[-CONTEXT:])
        rng = self._rng("target", (len(text), ending))
        draw = rng.random()
        for token, share in zip(self.choices(ending), self._shares, strict=True):
            draw -= share
            if draw < 0.0:
                return token
        return rng.randrange(VOCAB)

    def verify(self, text: list[int], draft: Draft) -> int:
        """Let a text go on by a draft; returns by how many tokens."""
        sampled = [self.next_token(text)]
        sampled += [self.next_token([*text, *draft.path(i)]) for i in range(len(draft.tokens))]
        path = accepted(draft, sampled, [True] * len(sampled))
        text += [draft.tokens[idx] for idx in path]
        text.append(sampled[1 + path[-1]] if path else sampled[0])
        return len(path) + 1


class SimulatedModel:
    """A draft model of a World; satisfies spec_decode.forest.CachedModel and counts its passes."""

    vocab_size = 2**31

    def __init__(self, world: World) -> None:
        self._world = world
        self._verified: dict[int, list[int]] = {}
        self._live: dict[int, list[tuple[int, int]]] = {}
        self.num_passes = 0

    def open(self, seq_id: int, *, num_prompt: int) -> None:
        """Begin a sequence."""
        self._verified[seq_id], self._live[seq_id] = [], []

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        """There is always room."""
        return True

    def forward(self, rows: Sequence[PassRows], *, num_top: int) -> list[list[dict[int, float]]]:
        """Add rows and say what may follow the wanted ones."""
        self.num_passes += 1
        found = []
        for each in rows:
            live = self._live[each.seq_id]
            live += zip(each.tokens, each.parents, strict=True)
            wanted = range(len(live) - each.num_wanted, len(live))
            found.append([self._world.logps(self._ending(each.seq_id, at)) for at in wanted])
        return found

    def _ending(self, seq_id: int, place: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while place != ROOT:
            token, place = self._live[seq_id][place]
            tokens.append(token)
        return tuple([*self._verified[seq_id][-CONTEXT:], *reversed(tokens)][-CONTEXT:])

    def keep(self, kept: Sequence[Kept]) -> None:
        """Move rows."""
        for each in kept:
            live = self._live[each.seq_id]
            self._verified[each.seq_id] += [live[place][0] for place in each.verified]
            end = each.verified[-1] if each.verified else ROOT
            place_of = {place: idx for idx, place in enumerate(each.kept)} | {end: ROOT}
            self._live[each.seq_id] = [(live[p][0], place_of[live[p][1]]) for p in each.kept]

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        del self._verified[seq_id], self._live[seq_id]


class Played(NamedTuple):
    """A run: tokens per unit of time (1 without drafts), and its rounds.

    `round_time` is the mean; `formula` is max(T_t, d T_d) + T_sync + p_miss T_d, by the run's own
    passes per round d and share of rounds that waited for a pass.
    """

    speed: float
    tokens_per_round: float
    round_time: float
    formula: float


def request_of(text: Sequence[int]) -> DraftRequest:
    """Return the question for a draft of a text."""
    return DraftRequest(DraftText(0, np.array(text, dtype=np.int32), num_prompt=2), MOST)


def play_serial(world: World, ratio: float, *, passes: int, num_steps: int) -> Played:
    """Run the serial runner: passes, then the target's step."""
    model = SimulatedModel(world)
    drafter = SerialDrafter(model, Growth(passes, WIDTH, CHOICES), max_length=10**9)
    text, now, num_tokens = [1, 2], 0.0, 0
    for _ in range(num_steps):
        before = model.num_passes
        (draft,) = drafter.draft([request_of(text)])
        now += (model.num_passes - before) * ratio + 1.0
        num_tokens += world.verify(text, draft)
    round_time = now / num_steps
    return Played(num_tokens / now, num_tokens / num_steps, round_time, round_time)


def play_parallel(world: World, ratio: float, *, num_steps: int) -> Played:
    """Run the draft node's rounds beside the target's steps."""
    model = SimulatedModel(world)
    rounds = DraftRounds(model, Growth(MAX_PASSES, WIDTH, CHOICES), max_length=10**9)
    questions = Questions(VOCAB)
    text, now, num_tokens = [1, 2], 0.0, 0
    num_late = num_ahead = 0
    for step in range(num_steps):
        # The draft node may be in a pass: `now` is when it reads the verdict.
        asked = questions.ask([request_of(text)], step_s=1.0 if step else 0.0)
        rounds.hear(PEER, asked, now)
        while not (answers := rounds.take_offers()):
            rounds.grow()
            rounds.took(ratio)
            now += ratio
            num_late += 1
        questions.take(answers[0][1])
        (draft,) = questions.drafts([request_of(text)])
        num_tokens += world.verify(text, draft)
        now += SYNC
        ended = now + 1.0
        while now < ended and rounds.grow():
            rounds.took(ratio)
            now += ratio
            num_ahead += 1
        now = max(now, ended)
    share_late, depth = num_late / num_steps, num_ahead / num_steps
    return Played(
        num_tokens / now,
        num_tokens / num_steps,
        now / num_steps,
        max(1.0, depth * ratio) + SYNC + share_late * ratio,
    )


def compare(acceptance: float, ratio: float, *, num_steps: int, seed: int = 1) -> dict[str, Any]:
    """Return the speeds at one ratio of times, the serial runner at its best depth."""
    world = World(acceptance, seed)
    serial = {
        passes: play_serial(world, ratio, passes=passes, num_steps=num_steps)
        for passes in range(1, MOST + 1)
    }
    best = max(serial, key=lambda passes: serial[passes].speed)
    parallel = play_parallel(world, ratio, num_steps=num_steps)
    return {
        "draft_over_target": round(ratio, 4),
        "serial_passes": best,
        "serial_speed": round(serial[best].speed, 3),
        "serial_tokens": round(serial[best].tokens_per_round, 3),
        "parallel_speed": round(parallel.speed, 3),
        "parallel_tokens": round(parallel.tokens_per_round, 3),
        "parallel_over_serial": round(parallel.speed / serial[best].speed, 3),
        "round_over_formula": round(parallel.round_time / parallel.formula, 3),
    }


COLUMNS: Final = {
    "pass / step": "{draft_over_target:.3f}",
    "serial: passes": "{serial_passes}",
    "tokens per step": "{serial_tokens:.2f}",
    "speed": "{serial_speed:.2f}",
    "parallel: tokens per step": "{parallel_tokens:.2f}",
    "parallel: speed": "{parallel_speed:.2f}",
    "parallel / serial": "{parallel_over_serial:.2f}x",
    "round / formula": "{round_over_formula:.3f}",
}
EXPERIMENT = Experiment(
    "spec_simulator", __doc__, rows_of(COLUMNS), command="python -m benchmarks.spec_simulator"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Play both runners at each ratio, print the table, and write the result."""
    parser = EXPERIMENT.parser()
    parser.add_argument("--steps", type=int, default=2000, help="steps per run (2000)")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a first choice (0.8)")
    args = parser.parse_args(argv)
    rows = [compare(args.acceptance, ratio, num_steps=args.steps) for ratio in RATIOS]
    return EXPERIMENT.finish(args, {"acceptance": args.acceptance, "sync": SYNC, "rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
