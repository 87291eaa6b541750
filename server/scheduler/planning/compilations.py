"""The grammars of requests: which the attention nodes compile, have compiled, and have refused.

Owns that list only: a request with a grammar waits in the queue, holding up nobody, until every
node that was asked has answered, so that no step compiles. What nodes have without being asked to
keep it is a hint and may be wrong: one that has just lost a grammar compiles it when a sequence
comes. A refusal by
what a grammar is (its text, or the CPU time and memory that it takes) is remembered for a time, so
that it costs nothing again. Knows no requests, only how many have a grammar. Called by policy.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from topspin.errors import InvalidRequest, Overloaded
from topspin.grammars import grammar_key
from topspin.messages import CompileGrammar, ReleaseGrammar

# More would only wait for one another; a newcomer takes the place of one that takes long.
MAX_UNDER_WAY = 64
LONG_S = 1.0
# Of requests that wait and run: nodes hold them all.
MAX_USED = 256
REFUSED_S = 600.0
MAX_REFUSED = 4096


@dataclass(slots=True)
class _Grammar:
    """A grammar of `num_requests` requests; `awaited`: the nodes that have not answered since."""

    text: str
    since: float
    num_requests: int = 0
    awaited: set[int] = field(default_factory=set)


class Compilations:
    """The grammars by their keys.

    Invariant: a key is in `_used` while a request has it, and under way while one of the nodes it
    awaits has not answered. `_known` are those that all nodes have, used or not.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_found = 0
        self._used: dict[str, _Grammar] = {}
        self._known: set[str] = set()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._unsent: list[CompileGrammar | ReleaseGrammar] = []
        self._is_halted = False

    def ask(
        self, grammar: str, nodes: Collection[int], *, now: float, may_refuse: bool = True
    ) -> str:
        """Have `nodes` compile the grammar of a request, unless they have, and keep it.

        Returns its key, for release() when the request ends. Raises InvalidRequest if it has been
        refused, or Overloaded if there are too many and it may refuse.
        """
        key = grammar_key(grammar)
        self._check_refused(key, now)
        used = self._used.get(key)
        if used is None:
            if may_refuse:
                self._check_room(now)
            used = self._used[key] = _Grammar(grammar, now)
            self._send(key, used, nodes)
        elif key in self._known or used.awaited:
            self.num_found += 1
        else:  # a node could not compile it when it was asked before
            self._send(key, used, nodes)
        used.num_requests += 1
        return key

    def displaced(self) -> str | None:
        """Return the grammar whose compilation is to be given up for that of others, if any."""
        under_way = self._under_way()
        return under_way[0][0] if len(under_way) > MAX_UNDER_WAY else None

    def release(self, key: str) -> None:
        """Note the end of a request; after the last one, nodes need not keep its grammar."""
        used = self._used.get(key)
        if used is None:
            return  # it has none
        used.num_requests -= 1
        if not used.num_requests:
            del self._used[key]
            self._unsent.append(ReleaseGrammar(key=key))

    def take_unsent(self) -> list[CompileGrammar | ReleaseGrammar]:
        """Return what is to be sent to all attention nodes, once."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def is_under_way(self, key: str) -> bool:
        """Return whether a request with this grammar has to wait."""
        used = self._used.get(key)
        return used is not None and (bool(used.awaited) or self._is_halted)

    def answered(self, node: int, key: str) -> None:
        """Note that a node has compiled a grammar."""
        used = self._used.get(key)
        if used is None or node not in used.awaited:
            return  # it was known, another node has refused it, or the nodes were halted
        used.awaited.discard(node)
        if not used.awaited:
            self._known.add(key)

    def failed(self, key: str) -> None:
        """Note that a node has not compiled a grammar; nobody waits for other nodes."""
        self._known.discard(key)
        if (used := self._used.get(key)) is not None:
            used.awaited.clear()

    def refused(self, key: str, reason: str, *, now: float) -> None:
        """Note why a node gives up a grammar, by what it is; so do all, for a time."""
        self.failed(key)
        self._refused[key] = now + REFUSED_S, reason
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def lost(self, key: str, nodes: Collection[int]) -> None:
        """Note that a node has a grammar no longer; if requests have it, `nodes` compile it."""
        self._known.discard(key)
        used = self._used.get(key)
        if used is not None and not used.awaited:
            self._send(key, used, nodes)

    def halt(self) -> None:
        """Await nothing: nodes may be lost, or may not have read what they were asked."""
        self._is_halted = True
        self._known.clear()
        self._unsent.clear()
        for used in self._used.values():
            used.awaited.clear()

    def resume(self, nodes: Collection[int]) -> None:
        """Have the nodes of a new generation compile what requests have."""
        self._is_halted = False
        for key, used in self._used.items():
            self._send(key, used, nodes)

    def _send(self, key: str, used: _Grammar, nodes: Collection[int]) -> None:
        if not nodes:
            return  # until resume()
        self._unsent.append(CompileGrammar(key=key, grammar=used.text))
        if key in self._known:
            self.num_found += 1
        else:
            self.num_asked += 1
            used.awaited = set(nodes)

    def _under_way(self) -> list[tuple[str, _Grammar]]:
        """Return the grammars that are being compiled, the oldest ones first."""
        under_way = [each for each in self._used.items() if each[1].awaited]
        return sorted(under_way, key=lambda item: item[1].since)

    def _check_room(self, now: float) -> None:
        if len(self._used) >= MAX_USED:
            raise Overloaded(f"requests have {MAX_USED} different grammars already")
        under_way = self._under_way()
        if len(under_way) >= MAX_UNDER_WAY and now - under_way[0][1].since < LONG_S:
            raise Overloaded(f"{len(under_way)} grammars are being compiled")

    def _check_refused(self, key: str, now: float) -> None:
        until, reason = self._refused.get(key, (0.0, ""))
        if now < until:
            raise InvalidRequest(reason, param="grammar")
        self._refused.pop(key, None)
