"""Rules of a context-free grammar: what they are made of, and which of them may be terminals.

Owns the analysis that lets whole rules be terminals of llguidance's Lark, whose lexer takes as many
characters as it can, where that does not change the language. Sets of characters are the bits of
an integer, one for each of ASCII and one for all others together. Knows no syntax;
server.gateway.grammars.gbnf calls it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import reduce
from itertools import chain
from operator import or_
from typing import Final, NamedTuple

ROOT: Final = "root"
ANY: Final = "/(?s:.)/"
_ALL: Final = (1 << 129) - 1
_MAX_PASSES: Final = 100
_MAX_SYMBOLS: Final = 5_000
"""Of a grammar in which terminals are looked for, unless it is one as a whole."""
_MAX_SIZE: Final = 50_000
"""Of a terminal: texts and classes, written out. The library has a limit of its own."""
_RANGE: Final = re.compile(r"(\\x\{\w+\}|\w)(?:-(\\x\{\w+\}|\w))?")


class GrammarRule(NamedTuple):
    """One of `alternatives`, `least` to `most` times over.

    A symbol is written as in Lark if it is a text (`"a"`), one character of a class (`/[a]/`) or a
    token (`<[1]>`), and is a key of the rules otherwise: a rule's name, or a group's number in
    parentheses.
    """

    alternatives: list[list[str]]
    least: int = 1
    most: int | None = 1

    def followed(self) -> Iterator[str]:
        return (each for alternative in self.alternatives for each in alternative if is_rule(each))


Rules = dict[str, GrammarRule]


def is_rule(symbol: str) -> bool:
    """Return whether a symbol is a rule's key."""
    return symbol[0] not in '"/<'


def settled(rules: Rules, *, needs_all: bool) -> list[str]:
    """Return the rules that are made of earlier ones only, in an order in which each is.

    A rule is if all its alternatives are, or, not `needs_all`, if one is or none is needed.
    """
    users: dict[str, list[tuple[str, int]]] = defaultdict(list)
    missing: dict[tuple[str, int], int] = {}
    left: dict[str, int] = {}
    for key, rule in rules.items():
        left[key] = len(rule.alternatives) if needs_all else 1
        for idx, alternative in enumerate(rule.alternatives):
            symbols = [each for each in alternative if is_rule(each)]
            has_token = any(each.startswith("<") for each in alternative)
            is_free = not needs_all and not rule.least
            missing[key, idx] = 0 if is_free else len(symbols) + (needs_all and has_token)
            for each in symbols:
                users[each].append((key, idx))
    order: list[str] = []
    ready = [each for each, num in missing.items() if num == 0]
    while ready:
        key, _ = ready.pop()
        left[key] -= 1
        if left[key] == 0:
            order.append(key)
            for user in users[key]:
                missing[user] -= 1
                if missing[user] == 0:
                    ready.append(user)
    return order


class TextShape(NamedTuple):
    """What is known of the texts of a rule or sequence; sets may have more than they need to.

    `first`: their first characters. `more`: those behind a text with which a longer one goes on.
    `characters`: all.
    """

    is_empty: bool
    first: int
    more: int
    characters: int
    size: int = 1

    def then(self, other: TextShape) -> TextShape:
        characters = self.characters | other.characters
        more = other.more | (self.more if other.is_empty else 0)
        return TextShape(
            self.is_empty and other.is_empty,
            self.first | (other.first if self.is_empty else 0),
            characters if self.more & other.first else more,
            characters,
            min(self.size + other.size, _MAX_SIZE + 1),
        )

    def or_else(self, other: TextShape) -> TextShape:
        characters, first = self.characters | other.characters, self.first | other.first
        is_empty = self.is_empty or other.is_empty
        more = self.more | other.more | (first if is_empty else 0)
        size = min(self.size + other.size, _MAX_SIZE + 1)
        more = characters if self.first & other.first else more
        return TextShape(is_empty, first, more, characters, size)

    def repeated(self, rule: GrammarRule) -> TextShape:
        more = self.more | (self.first if rule.least != rule.most else 0)
        if rule.most != 1 and self.more & self.first:
            more = self.characters
        is_empty = self.is_empty or not rule.least
        return self._replace(is_empty=is_empty, more=more)


def terminals(rules: Rules) -> set[str]:
    """Return the rules that may be terminals; splits some of `rules` in two.

    No text of theirs goes on with what may follow it, and nothing else begins as one. Others might
    be, but are not where that is not seen.
    """
    shapes = shapes_of(rules)
    found = {key for key in rules if key in shapes and shapes[key].size <= _MAX_SIZE}
    if ROOT in found:
        return {ROOT}
    num_symbols = sum(len(each) for rule in rules.values() for each in rule.alternatives)
    num_passes = _MAX_PASSES if num_symbols <= _MAX_SYMBOLS else 0
    found = {key for key in found if not shapes[key].is_empty}
    follow: dict[str, int] = {}
    begin: dict[str, tuple[bool, int]] = {}
    for _ in range(num_passes):
        before = follow.copy(), begin.copy()
        once = _find_neighbours(rules, shapes, found, follow, begin)
        if before != (follow, begin):
            continue
        twice, used = 0, found & follow.keys()
        for key in used:
            twice |= once & shapes[key].first
            once |= shapes[key].first
        unfit = {key for key in used if shapes[key].first & twice | shapes[key].more & follow[key]}
        if not unfit:
            return used
        found -= unfit
    return set()


def shapes_of(rules: Rules) -> dict[str, TextShape]:
    """Return the shapes of texts, classes, tokens, and rules without recursion or tokens.

    What stands between parts that may be empty, often blanks, becomes a rule.
    """
    shapes: dict[str, TextShape] = {}
    for rule in rules.values():
        for symbol in chain(*rule.alternatives):
            if not is_rule(symbol) and symbol not in shapes:
                shapes[symbol] = _shape_of(symbol)
    for key in settled(rules, needs_all=True):
        whole = TextShape(False, 0, 0, 0)
        for alternative in rules[key].alternatives:
            full = [idx for idx, each in enumerate(alternative) if not shapes[each].is_empty]
            core = slice(full[0], full[-1] + 1) if full else slice(0)
            if 1 < len(alternative[core]) < len(alternative):
                rules[part := f"({len(rules)})"] = GrammarRule([alternative[core]])
                shapes[part] = _sequence(shapes, alternative[core])
                alternative[core] = [part]
            one = _sequence(shapes, alternative)
            whole = whole.or_else(one)
        shapes[key] = whole.repeated(rules[key])
    return shapes


def _sequence(shapes: dict[str, TextShape], symbols: list[str]) -> TextShape:
    return reduce(TextShape.then, map(shapes.__getitem__, symbols), TextShape(True, 0, 0, 0))


def _shape_of(symbol: str) -> TextShape:
    """Return the shape of a text or class; a token has no characters."""
    if symbol.startswith('"'):
        bits = [1 << min(ord(each), 128) for each in json.loads(symbol)]
        return TextShape(not bits, bits[0] if bits else 0, 0, reduce(or_, bits, 0))
    found = 0
    for low, high in _RANGE.findall(symbol) if symbol.startswith("/[") else ():
        first, last = (
            min(int(each[3:-1], 16) if each[1:] else ord(each), 128) for each in (low, high or low)
        )
        found |= (2 << last) - (1 << first)
    if symbol == ANY or symbol.startswith("/[^"):
        found = _ALL & ~(found & (_ALL >> 1))
    return TextShape(False, found, 0, found)


def _find_neighbours(
    rules: Rules,
    shapes: dict[str, TextShape],
    found: set[str],
    follow: dict[str, int],
    begin: dict[str, tuple[bool, int]],
) -> int:
    """Add to `follow` what may follow each rule, and to `begin` how others than `found` begin.

    Returns the characters that are terminals by themselves. To be called until nothing changes.
    """
    singles = 0
    follow.setdefault(ROOT, 0)
    for key in [each for each in follow if each not in found]:
        rule = rules[key]
        is_empty, first = begin.get(key, (not rule.least, 0))
        end = follow[key] | (first if rule.most != 1 else 0)
        for alternative in rule.alternatives:
            after, is_rest_empty, starts = end, True, 0
            for symbol in reversed(alternative):
                shape = shapes.get(symbol)
                if is_rule(symbol):
                    follow[symbol] = follow.get(symbol, 0) | after
                elif shape is not None:
                    singles |= shape.characters
                may_skip, head = begin.get(symbol, (False, 0)) if shape is None else shape[:2]
                after = head | (after if may_skip else 0)
                starts = head | (starts if may_skip else 0)
                is_rest_empty = is_rest_empty and may_skip
            is_empty, first = is_empty or is_rest_empty, first | starts
        begin[key] = is_empty, first
    return singles
