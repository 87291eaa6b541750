"""JSON read character by character, while a model writes it.

Owns finding the end of a value, and the members of a tool call in its object. Text is passed on as
the model wrote it, so that the arguments of a call are never changed by decoding and encoding.
Pure: knows no format of calls (server.gateway.parsing.call_formats).
"""

from __future__ import annotations

import msgspec

_BLANK = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
# Longer text before a call's name is not a call.
_MAX_HEAD_CHARS = 4096


class ValueScan:
    """Finds where one JSON value ends, from its first character on; it is not validated."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False
        self.is_done = False

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._in_string

    def push(self, text: str, begin: int = 0) -> int:
        """Return the end of the part of `text` from `begin` on that belongs to the value."""
        for idx in range(begin, len(text)):
            char = text[idx]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
                    self.is_done = not self._depth
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}],":
                if not self._depth:  # the end of the object around a scalar
                    self.is_done = True
                    return idx
                if char != ",":
                    self._depth -= 1
                    self.is_done = not self._depth
            elif not self._depth:
                if self._is_scalar and char in _BLANK:
                    self.is_done = True
                    return idx
                self._is_scalar = True
            if self.is_done:
                return idx + 1
        return len(text)


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


class CallScan:
    """Reads one object `{"name": ..., "arguments": {...}}`, its members in any order.

    `parameters` is another name of `arguments`; of either, and of `name`, the first one that is
    not null counts, and other members are passed over.
    """

    def __init__(self) -> None:
        self._state = "begin"
        self._key = ""
        self._buffer = ""
        self._value = ValueScan()
        self._is_streamed = False
        self._arguments: str | None = None
        self._num_head_chars = 0
        self.name: str | None = None
        self.is_done = False
        self.is_failed = False

    def push(self, text: str) -> int:
        """Return how many characters belong to the object; all, unless it ends or fails here."""
        idx = 0
        while idx < len(text) and not (self.is_done or self.is_failed):
            idx = self._in_value(text, idx) if self._state == "value" else self._step(text, idx)
        if self.name is None and not self.is_failed:
            self._num_head_chars += idx
            self.is_failed = self._num_head_chars > _MAX_HEAD_CHARS
        return idx

    @property
    def has_begun(self) -> bool:
        """Whether it is certainly a call: its name is known, and its arguments have come."""
        return self.name is not None and (self._arguments is not None or self.is_done)

    def take(self) -> str:
        """Return the arguments' text since the last call of take, once the call has begun.

        Of a call without arguments the text is `{}`.
        """
        assert self.has_begun
        if self._arguments is None:
            self._arguments = "{}"
        taken, self._arguments = self._arguments, ""
        return taken

    def _step(self, text: str, idx: int) -> int:
        """Read one character outside of values."""
        char = text[idx]
        if self._state == "key":
            if char == '"' and not self._buffer.endswith("\\"):
                self._key, self._buffer, self._state = self._buffer, "", "colon"
            else:
                self._buffer += char
        elif char in _BLANK:
            pass
        elif self._state == "begin" and char == "{":
            self._state = "first"
        elif self._state in ("first", "next") and char == '"':
            self._state = "key"
        elif self._state == "colon" and char == ":":
            self._state, self._value, self._buffer = "value", ValueScan(), ""
        elif self._state == "after" and char == ",":
            self._state = "next"
        elif self._state in ("first", "after") and char == "}":
            self.is_done = self.name is not None
            self.is_failed = not self.is_done
        else:
            self.is_failed = True
        return idx + (not self.is_failed)

    def _in_value(self, text: str, idx: int) -> int:
        if not self._buffer:
            while idx < len(text) and text[idx] in _BLANK:
                idx += 1
            if idx == len(text):
                return idx
        end = self._value.push(text, idx)
        piece = text[idx:end]
        if not self._buffer:
            is_first = self._key in _ARGUMENT_KEYS and self._arguments is None
            self._is_streamed = is_first and piece.startswith("{")
        if self._is_streamed:
            self._arguments = (self._arguments or "") + piece
            self._buffer = "{"
        else:
            self._buffer += piece
        if self._value.is_done:
            if not self._is_streamed:
                self._end_value(self._buffer)
            self._state, self._buffer = "after", ""
        return end

    def _end_value(self, value: str) -> None:
        """Take a value that is not an arguments' object."""
        taken = self.name if self._key == "name" else self._arguments
        if self._key not in ("name", *_ARGUMENT_KEYS) or taken is not None:
            return
        try:
            decoded = msgspec.json.decode(value)
        except msgspec.DecodeError:
            self.is_failed = True
            return
        if self._key != "name":
            # Some models write the arguments as text; null stands for none.
            if isinstance(decoded, str):
                self._arguments = decoded
            elif decoded is not None:
                self._arguments = value
        elif isinstance(decoded, str) and decoded:
            self.name = decoded
        else:
            self.is_failed = True
