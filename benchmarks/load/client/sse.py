"""A parser of server-sent events from bytes split at any point.

Owns the parsing of the event stream format (WHATWG HTML, section 9.2.6): line ends of any kind,
comments, several data lines per event. Knows no JSON and no socket. Only `data` is kept, because
the OpenAI API uses nothing else. benchmarks.load.client.reply calls it.
"""

from __future__ import annotations


class EventParser:
    """Turns bytes into the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._starting = True

    def feed(self, block: bytes) -> list[bytes]:
        """Return the data of the events that end in `block`, in order."""
        if self._rest:
            block = self._rest + block
        if self._starting:
            block = self._without_mark(block)
        if b"\r" in block:
            # A carriage return at the very end may be the first half of CRLF, so it is kept back.
            held = block.endswith(b"\r")
            block = (block[:-1] if held else block).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            lines = block.split(b"\n")
            self._rest = lines.pop() + (b"\r" if held else b"")
        else:
            lines = block.split(b"\n")
            self._rest = lines.pop()
        return self._take(lines)

    def finish(self) -> list[bytes]:
        """Return the last event if the stream ended without the blank line after it.

        The standard drops such an event, but real servers send it, so it counts.
        """
        lines = [self._rest.rstrip(b"\r"), b""]
        self._rest = b""
        return self._take(lines)

    def _without_mark(self, block: bytes) -> bytes:
        """Drop a byte order mark from the stream's start."""
        if len(block) < 3 and b"\xef\xbb\xbf".startswith(block):
            return block
        self._starting = False
        return block.removeprefix(b"\xef\xbb\xbf")

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    events.append(data[0] if len(data) == 1 else b"\n".join(data))
                    data.clear()
            elif line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                data.append(b"")
        return events
