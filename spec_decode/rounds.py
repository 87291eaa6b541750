"""Drafts by a draft model that computes while the target verifies: the draft node's rounds.

Owns what is done next: a verdict re-roots its sequence's tree; whoever waits for an offer is
answered at once if the tree goes on there (a hit, also where the bonus token was in the tree but
not in the verified part), else after one immediate pass, and more where they are worth the target's
time; the time until the next verdict goes to growing the trees, up to a depth. After SwiftSpec
(arXiv 2506.11309, algorithm 1), for many sequences of several targets. Pure: messages and durations
come in, passes of the model and messages go out; draft_nodes.worker connects it to sockets, tests
replay any order of events. Any offer may be late or stale: asking.py drops those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from spec_decode.draft import Draft
from spec_decode.forest import MAX_CHUNK, CachedModel, Forest, Growth
from spec_decode.round_depth import RoundDepth
from topspin.errors import ProtocolError
from topspin.messages import TreeOffer, TreeOffers, Verdict, Verdicts, pack_ints, unpack_ints

MAX_LIVE: Final = 48
"""Best nodes of a tree among which leaves are expanded while the target verifies."""
MAX_SEQUENCES: Final = 65536
"""Of one target: as many as an attention node may have at once (AttentionNode.max_num_seqs)."""
WAIT_FACTOR: Final = 2.0
"""A pass for which a target waits must bring so many times its time: later ones cost nothing.
Between 1 and 5 the best one in benchmarks/spec_simulator.py."""


class Counts(NamedTuple):
    """Counters since the start; fields as in DraftCounts."""

    num_root_hits: int = 0
    num_root_misses: int = 0
    num_passes: int = 0
    num_overlapped: int = 0
    pass_seconds: float = 0.0


@dataclass(slots=True)
class _Asked:
    """A target's last question: `wanted` by sequence (its id there): our id and the most tokens.

    The `settled` of these are not waited for any more.
    """

    epoch: int
    wanted: dict[int, tuple[int, int]]
    roots: dict[int, int]
    unknown: list[int]
    settled: set[int] = field(default_factory=set)
    is_answered: bool = False


@dataclass(slots=True)
class _Target:
    """An attention node: our ids of its sequences; of those under way how deep trees may grow."""

    seq_ids: dict[int, int] = field(default_factory=dict)
    asked: _Asked | None = None
    passes_left: int = 0


class DraftRounds:
    """The sequences of all targets on one draft model. A peer is a connection's id."""

    def __init__(self, model: CachedModel, growth: Growth, *, max_length: int) -> None:
        """`max_length` is the most positions that the model computes."""
        self._vocab_size = model.vocab_size
        self._forest = Forest(model, growth)
        self._growth = growth
        self._max_length = max_length
        self._targets: dict[bytes, _Target] = {}
        self._num_opened = 0
        # A draft that is accepted whole uses up one more token than it has.
        self.depth = RoundDepth(most=2 * growth.passes)
        self.counts = Counts()

    # Messages.

    def hear(self, peer: bytes, message: Verdicts, now_s: float) -> None:
        """Re-root the trees of a target.

        Raises ProtocolError, and changes nothing, for packed fields of a wrong size, tokens that
        the model does not have, and more sequences than a target has.
        """
        target = self._targets.get(peer, _Target())
        ended, heard = unpack_ints(message.ended), self._tokens(message)
        if len(target.seq_ids.keys() | heard.keys()) > MAX_SEQUENCES:
            raise ProtocolError(f"verdicts of more than {MAX_SEQUENCES} sequences")
        self._targets[peer] = target
        self._forest.drop([target.seq_ids.pop(each) for each in ended if each in target.seq_ids])
        asked = _Asked(message.epoch, {}, {}, [])
        texts: dict[int, tuple[list[int], int]] = {}
        num_accepted = 0
        for verdict in message.verdicts:
            tokens = heard[verdict.seq_id]
            own = self._own(target, verdict, len(tokens))
            if own is None:
                asked.unknown.append(verdict.seq_id)
                continue
            texts[own] = (tokens, verdict.num_prompt)
            num_accepted += len(tokens) if verdict.start else 0
            end = verdict.start + len(tokens)
            if verdict.at_most > 0 and end + verdict.at_most <= self._max_length:
                asked.wanted[verdict.seq_id] = (own, verdict.at_most)
                asked.roots[verdict.seq_id] = tokens[-1]
        hits = self._forest.advance(texts)
        self.counts = self.counts._replace(
            num_root_hits=self.counts.num_root_hits + sum(hits.values()),
            num_root_misses=self.counts.num_root_misses + len(hits) - sum(hits.values()),
        )
        self.depth.heard(now_s, target_s=message.step_s, num_tokens=num_accepted)
        target.asked, target.passes_left = asked, 0

    def _tokens(self, message: Verdicts) -> dict[int, list[int]]:
        """Return the tokens of each sequence of a message. Raises ProtocolError."""
        heard: dict[int, list[int]] = {}
        for verdict in message.verdicts:
            tokens = list(unpack_ints(verdict.tokens))
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                raise ProtocolError(f"verdicts with tokens that are not of {self._vocab_size}")
            heard[verdict.seq_id] = tokens
        if len(heard) < len(message.verdicts):
            raise ProtocolError("two verdicts of one sequence")
        return heard

    def _own(self, target: _Target, verdict: Verdict, num_tokens: int) -> int | None:
        """Return our id of a verdict's sequence, None if what we have of it does not fit."""
        own = target.seq_ids.get(verdict.seq_id)
        if not num_tokens:
            return None
        if verdict.start == 0:
            if own is not None:
                self._forest.drop([own])
            own = target.seq_ids[verdict.seq_id] = self._num_opened
            self._num_opened += 1
            return own
        if own is None or self._forest.known(own) != verdict.start:
            return None
        return own

    def lose(self, peer: bytes) -> None:
        """Forget a target that is gone."""
        target = self._targets.pop(peer, None)
        if target is not None:
            self._forest.drop(target.seq_ids.values())

    def take_offers(self) -> list[tuple[bytes, TreeOffers]]:
        """Return the answers that are due, to whom; their trees may grow from now on."""
        answers: list[tuple[bytes, TreeOffers]] = []
        for peer, target in self._targets.items():
            asked = target.asked
            if asked is None or asked.is_answered or self._late(asked):
                continue
            asked.is_answered = True
            offers = []
            for seq_id, (own, at_most) in asked.wanted.items():
                draft = self._forest.draft(own, at_most)
                if draft.tokens:
                    offers.append(_offer(seq_id, asked.roots[seq_id], draft))
            message = TreeOffers(
                epoch=asked.epoch, offers=tuple(offers), unknown=pack_ints(asked.unknown)
            )
            answers.append((peer, message))
            target.passes_left = self.depth.passes
        return answers

    # Passes.

    def _late(self, asked: _Asked) -> dict[int, int]:
        """Return the sequences of a question for which a pass is worth its time, and how far.

        Without any draft it always is (a miss); else if it makes tokens come faster: if it adds a
        greater share to those that the step is expected to give than to the step's time.
        """
        forest, known = self._forest, asked.wanted.values()
        able = {o: n for o, n in known if o in forest and forest.lag(o) <= MAX_CHUNK}
        going = {own: n for own, n in able.items() if own not in asked.settled}
        misses = {own: n for own, n in going.items() if not forest.has_draft(own)}
        if misses:
            return misses
        prospects = {own: forest.prospects(own, n) for own, n in able.items()}
        tokens = sum(each.tokens for each in prospects.values())
        gain = sum(prospects[own].gain for own in going)
        if gain <= WAIT_FACTOR * tokens * self.depth.pass_share:
            return {}
        return {own: n for own, n in going.items() if prospects[own].gain}

    def grow(self) -> bool:
        """Make one pass: for those that wait, else for what may be asked next; False: no need."""
        late: dict[int, int] = {}
        waiting = [t.asked for t in self._targets.values() if t.asked and not t.asked.is_answered]
        for asked in waiting:
            late |= self._late(asked)
        reach = late or self._ahead()
        if not reach:
            return False
        grown = self._forest.grow(reach, busy=reach.keys())
        for asked in waiting:
            # Who has no room would wait for ever.
            asked.settled |= late.keys() - grown.keys()
        if grown:
            self.counts = self.counts._replace(
                num_passes=self.counts.num_passes + 1,
                num_overlapped=self.counts.num_overlapped + (not late),
            )
        return bool(grown or late)

    def _ahead(self) -> dict[int, int]:
        """Return the sequences whose trees may grow, or that are not fed, and how far."""
        reach: dict[int, int] = {}
        for target in self._targets.values():
            if target.asked is None or not target.asked.is_answered:
                continue
            for own, _ in target.asked.wanted.values():
                if own in self._forest and (target.passes_left or self._forest.lag(own)):
                    reach[own] = MAX_LIVE
            target.passes_left = max(0, target.passes_left - 1)
        return reach

    def took(self, pass_s: float) -> None:
        """Learn how long the last pass took."""
        self.counts = self.counts._replace(pass_seconds=self.counts.pass_seconds + pass_s)
        self.depth.passed(pass_s)


def _offer(seq_id: int, root: int, draft: Draft) -> TreeOffer:
    return TreeOffer(
        seq_id=seq_id,
        root=root,
        tokens=pack_ints(draft.tokens),
        parents=pack_ints(draft.parents),
        logps=draft.logps,
    )
