"""llama.cpp's EBNF (GBNF) as Lark in llguidance's dialect, of the same language.

Owns GBNF's syntax and the limits of what is translated. GBNF is matched character by character,
in every possible way; a terminal of Lark takes as many characters as it can. So terminals have one
character here, unless a grammar has no recursion: then it is one terminal as a whole, which is
faster. Takes time in proportion to the text, without recursion of its own. Knows no tokenizer and
no request; server.gateway.grammars.structured_outputs calls it.
"""

from __future__ import annotations

import json
import re
from typing import Final

from server.gateway.grammars.rules import ANY, ROOT, GrammarRule, Rules, settled, terminals

MAX_REPEATS: Final = 10_000
MAX_RULES: Final = 10_000
"""With groups and repetitions."""
MAX_RULE_DEPTH: Final = 250
"""Of rules and groups that lead to each other: the library follows them by recursion."""

_BEGINNING: Final = re.compile(r'(?:\s|(?:#|//)[^\r\n]*+)*+[^\s:"/#]++[ \t]*+::=')
_CHAR: Final = r'(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[nrt"\\\[\]-]|[^\\])'
_CHARS: Final = re.compile(_CHAR, re.DOTALL)
_RANGES: Final = re.compile(rf"({_CHAR})(?:-({_CHAR}))?", re.DOTALL)
_TOKENS: Final = re.compile(
    r"""
    (?P<blank>[ \t\r\n]++|\#[^\r\n]*+)
    |(?P<rule>[\w-]++[ \t]*+::=)
    |(?P<name>[\w-]++)
    |(?P<literal>"(?:[^"\\]|\\.)*+")
    |(?P<chars>\[(?:[^\]\\]|\\.)*+\])
    |(?P<token>!?<[^<>\s]++>)
    |(?P<times>[*+?]|\{\s*+[0-9]{1,9}\s*+(?:,\s*+(?:[0-9]{1,9}\s*+)?)?\})
    |(?P<mark>[.()|])
    """,
    re.VERBOSE | re.DOTALL,
)
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_TIMES: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def is_gbnf(text: str) -> bool:
    """Return whether a grammar begins as GBNF does, comments aside; Lark may contain `::=` too."""
    return _BEGINNING.match(text) is not None


def lark_of(text: str) -> str:
    """Return the Lark of a GBNF text; raises ValueError with the reason if it has none."""
    rules = _parsed(text)
    for key in set(rules).difference(settled(rules, needs_all=False)):
        where = "a group" if key.startswith("(") else f"rule `{key}`"
        raise ValueError(f"{where} has no text that ends")
    whole = terminals(rules)
    numbers = {key: idx for idx, key in enumerate(_reached(rules))}
    waiting = [(ROOT, ROOT in whole)]
    lines: dict[tuple[str, bool], str] = {}
    while waiting:
        key, is_terminal = waiting.pop()
        if (key, is_terminal) not in lines:
            names = {each: is_terminal or each in whole for each in rules[key].followed()}
            waiting += names.items()
            shown = {each: _name(numbers[each], names[each]) for each in names}
            body = _body(rules[key], shown, is_terminal=is_terminal)
            lines[key, is_terminal] = f"{_name(numbers[key], is_terminal)}: {body}"
    return "\n".join([f"start: {_name(0, ROOT in whole)}", *lines.values()])


def _name(number: int, is_terminal: bool) -> str:
    return f"{'R' if is_terminal else 'r'}{number}"


def _parsed(text: str) -> Rules:
    """Return the rules of a text, each of whose symbols is defined."""
    rules: Rules = {}
    open_: list[str] = []  # the rule under way, and the groups in it
    position = 0
    while position < len(text):
        found = _TOKENS.match(text, position)
        try:
            if found is None:
                is_open = text[position] in '"['
                raise ValueError("it does not end" if is_open else "this is no part of EBNF")
            _take(str(found.lastgroup), found.group(), rules, open_)
            if len(rules) > MAX_RULES:
                raise ValueError(f"more than {MAX_RULES} rules and groups")
        except ValueError as error:
            line, near = text.count("\n", 0, position) + 1, text[position : position + 20]
            raise ValueError(f"line {line}, at {near!r}: {error}") from None
        position = found.end()
    if len(open_) > 1:
        raise ValueError("the text ends in a group: `)` is missing")
    for each in [ROOT, *(symbol for rule in rules.values() for symbol in rule.followed())]:
        if each not in rules:
            raise ValueError(f"rule `{each}` is not defined")
    for name, rule in list(rules.items()):
        _without_right_recursion(name, rule, rules)
    return rules


def _take(kind: str, part: str, rules: Rules, open_: list[str]) -> None:
    """Add one token of the text to `rules`; raises ValueError."""
    if kind == "blank":
        return
    if kind == "rule":
        name = part.removesuffix("::=").rstrip()
        if len(open_) > 1:
            raise ValueError("a rule begins in a group: `)` is missing")
        if name in rules:
            raise ValueError(f"rule `{name}` is defined twice")
        open_[:] = [name]
        rules[name] = GrammarRule([[]])
        return
    if not open_:
        raise ValueError("a rule begins with its name and `::=`")
    alternatives = rules[open_[-1]].alternatives
    alternative = alternatives[-1]
    if part == "|":
        alternatives.append([])
    elif part == ")":
        if len(open_) == 1:
            raise ValueError("no group is open")
        open_.pop()
    elif part == "(":
        alternative.append(f"({len(rules)})")
        open_.append(alternative[-1])
        rules[open_[-1]] = GrammarRule([[]])
    elif kind == "times":
        if not alternative:
            raise ValueError("there is nothing to repeat")
        alternative.append(_repeated(alternative.pop(), *_bounds(part), rules))
    else:
        alternative.append(_symbol(kind, part))


def _bounds(part: str) -> tuple[int, int | None]:
    if part in _TIMES:
        return _TIMES[part]
    first, comma, last = part[1:-1].replace(" ", "").partition(",")
    least = int(first)
    most = int(last) if last.strip() else None if comma else least
    if max(least, most or 0) > MAX_REPEATS:
        raise ValueError(f"at most {MAX_REPEATS} repetitions are counted")
    if most is not None and most < least:
        raise ValueError("the first number is above the second")
    return least, most


def _repeated(symbol: str, least: int, most: int | None, rules: Rules) -> str:
    """Return the symbol of `symbol` repeated."""
    if least == 0 and most not in (0, 1):  # what may be empty is no terminal
        symbol, most = _repeated(symbol, 1, most, rules), 1
    rule = rules.get(symbol) if symbol.startswith("(") else None
    if rule is None or (rule.least, rule.most) != (1, 1):
        symbol, rule = f"({len(rules)})", GrammarRule([[symbol]])
    rules[symbol] = rule._replace(least=least, most=most)
    return symbol


def _symbol(kind: str, part: str) -> str:
    """Return the symbol of a name, text, class or token."""
    if kind == "literal":
        codes = _codes(part[1:-1])
        return json.dumps("".join(map(chr, codes)), ensure_ascii=False)
    if kind == "chars":
        return f"/{_class(part)}/"
    if part == ".":
        return ANY
    if part.startswith("!"):
        if not re.fullmatch(r"!<\[[0-9]{1,9}\]>", part):
            raise ValueError("of tokens only ids can be excluded: !<[id]>")
        return f"<[^{part[3:]}"
    return part


def _codes(text: str) -> list[int]:
    """Return the code points of a text with escapes; raises ValueError for others."""
    codes, position = [], 0
    for found in _CHARS.finditer(text):
        if found.start() != position:
            break
        codes.append(_code(found.group()))
        position = found.end()
    if position != len(text):
        raise ValueError(f"unknown escape {text[position : position + 2]}")
    return codes


def _code(char: str) -> int:
    if not char.startswith("\\"):
        code = ord(char)
    elif len(char) > 2:
        code = int(char[2:], 16)
    else:
        code = ord(_LETTERS.get(char[1], char[1]))
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"no character has the code {code:X}")
    return code


def _class(part: str) -> str:
    """Return the regular expression of a class, which GBNF writes with other escapes."""
    inner = part[1:-1].removeprefix("^")
    _codes(inner)  # whose escapes are known
    if not inner:
        raise ValueError("a class without characters")
    ranges = ""
    for first, last in _RANGES.findall(inner):
        low = _code(first)
        high = _code(last) if last else low
        if low > high:
            raise ValueError(f"the range {first}-{last} is empty")
        ranges += _escaped(low) + (f"-{_escaped(high)}" if high > low else "")
    return f"[{'^' if part.startswith('[^') else ''}{ranges}]"


def _escaped(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def _without_right_recursion(name: str, rule: GrammarRule, rules: Rules) -> None:
    """Make a loop of a rule that ends with itself: the parser keeps all its levels otherwise."""
    before = [each[:-1] for each in rule.alternatives if each[-1:] == [name]]
    others = [each for each in rule.alternatives if each[-1:] != [name]]
    if before and others and (rule.least, rule.most) == (1, 1):
        loop = f"({len(rules)})"
        rules[loop] = GrammarRule([each for each in before if each] or [[]], 0, None)
        rules[name] = GrammarRule([[loop, *each] for each in others])


def _reached(rules: Rules) -> list[str]:
    """Return the rules that the root leads to; raises ValueError if one is too far from it."""
    order = {ROOT: None}
    path = [rules[ROOT].followed()]
    while path:
        key = next(path[-1], None)
        if key is None:
            path.pop()
        elif key not in order:
            order[key] = None
            path.append(rules[key].followed())
            if len(path) > MAX_RULE_DEPTH:
                raise ValueError(f"more than {MAX_RULE_DEPTH} rules and groups lead to each other")
    return list(order)


def _body(rule: GrammarRule, names: dict[str, str], *, is_terminal: bool) -> str:
    """Return what stands behind a rule's name in Lark."""
    if rule.most == 0:
        return '""'

    def shown(symbol: str) -> str:
        if is_terminal or not symbol.startswith('"'):
            return names.get(symbol, symbol)
        return " ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(symbol))

    body = " | ".join(" ".join(map(shown, each)) or '""' for each in rule.alternatives)
    if (rule.least, rule.most) == (1, 1):
        return body
    return f"({body}){{{rule.least},{'' if rule.most is None else rule.most}}}"
