"""`topspin chat`: a conversation in the terminal with any server of OpenAI's chat API.

Owns the loop (read a line, stream the answer, keep the history), the commands, and both
screens: rich on a terminal; on pipes one message per line in and one answer after the other
out. Knows no engine, only HTTP. Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import httpx
import msgspec

from app.cli.flags import add_url, key_header
from topspin.errors import TopspinError

CONNECT_TIMEOUT_S = 5.0
# Between two tokens: a request may wait in a full queue for a long time.
READ_TIMEOUT_S = 600.0

# The sampling parameters that flags and /set can change; the server checks their values.
SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}

HELP = f"""\
/set NAME VALUE  changes a setting (VALUE default: as the server has it); /set shows them
                 {", ".join(SETTINGS)}
/system TEXT     begins anew with this system message (without TEXT: with the model's own)
/reset           begins anew
/again           asks the last question once more
/quit            ends, as Ctrl-D does; Ctrl-C stops an answer
A message that begins with / needs a space before it."""
UNKNOWN_HELP = "/help shows them; put a space before a message that begins with /"


class ChatError(TopspinError):
    """The server cannot be reached, refused the request, or broke off; the message says which."""

    code = "chat_failed"


class ChatTurn(NamedTuple):
    """One turn of the conversation."""

    role: str
    content: str


class ChatClient:
    """Speaks to one model of one server; a context manager."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        self._http = httpx.Client(
            base_url=url.rstrip("/"),
            headers=key_header(),
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            transport=transport,
        )

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the model that the server lists first."""
        try:
            response = self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise ChatError(_refusal(response.status_code, response.content))
        try:
            return str(msgspec.json.decode(response.content)["data"][0]["id"])
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
            raise ChatError(f"{self._url}/v1/models is no list of models") from error

    def stream(
        self, model: str, messages: list[ChatTurn], settings: Mapping[str, float]
    ) -> Generator[str, None, None]:
        """Yield the answer to `messages` piece by piece; raises ChatError.

        `settings` are further fields of the request.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": [message._asdict() for message in messages],
            "stream": True,
            **settings,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_refusal(response.status_code, response.read()))
                yield from _answer_pieces(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ChatError:
        return ChatError(f"{self._url}: {error} (is `topspin serve` running there?)")


def _answer_pieces(lines: Iterator[str]) -> Iterator[str]:
    """Yield the content deltas of server-sent events; raises ChatError at an error event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
            if "error" in event:
                raise ChatError(str(event["error"]["message"]))
            pieces = [choice["delta"].get("content") for choice in event["choices"]]
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise ChatError(f"not a chunk of a chat completion: {data[:200]}") from error
        yield from (piece for piece in pieces if piece)
    raise ChatError("the server broke off the answer")


def _refusal(status: int, body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return f"{status}: {msgspec.json.decode(body)['error']['message']}"
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return f"the server answered with status {status}"


class Screen:
    """The source of messages and the destination of answers: stdin and stdout, a line for each."""

    ends_on_error = True
    """Whether a failed answer ends the conversation."""

    def read(self) -> str | None:
        """Return the user's next message, None at the end."""
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def show(self, pieces: Iterator[str]) -> str:
        """Show an answer while it comes; return it, or its part before Ctrl-C."""
        answer = ""
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            answer += piece
        sys.stdout.write("\n")
        sys.stdout.flush()
        return answer

    def tell(self, text: str) -> None:
        """Tell the user something that is not an answer, on stderr."""
        print(text, file=sys.stderr)


class TerminalScreen(Screen):
    """A prompt with line editing; an error ends the answer and not the conversation."""

    ends_on_error = False

    def __init__(self) -> None:
        import readline  # noqa: F401  # gives input() editing and a history

        from rich.console import Console

        self._console = Console()

    def read(self) -> str | None:
        """Ask for a line; None on Ctrl-D, an empty message on Ctrl-C."""
        try:
            return self._console.input("[bold green]> [/]")
        except EOFError:
            self._console.print()
            return None
        except KeyboardInterrupt:
            self._console.print()
            return ""

    def show(self, pieces: Iterator[str]) -> str:
        """Print the pieces as they come; Ctrl-C ends the answer and keeps its beginning."""
        answer = ""
        try:
            for piece in pieces:
                self._console.out(piece, end="", highlight=False)
                answer += piece
        except KeyboardInterrupt:
            pass
        finally:
            self._console.print()
        return answer

    def tell(self, text: str) -> None:
        """Print dimmed."""
        self._console.print(text, style="dim", markup=False, highlight=False)


class Conversation:
    """One conversation: its messages, its settings, and the commands that change them.

    Invariant: `_turns` holds whole turns, so that a failed or empty answer leaves no trace.
    """

    def __init__(
        self,
        client: ChatClient,
        screen: Screen,
        *,
        model: str,
        system: str | None = None,
        settings: Mapping[str, float] | None = None,
    ) -> None:
        self._client = client
        self._screen = screen
        self._model = model
        self._system = system
        self._settings = dict(settings or {})
        self._turns: list[tuple[ChatTurn, ChatTurn]] = []

    def run(self) -> None:
        """Answer message after message until the user ends.

        Raises ChatError for a failed answer if the screen wants to end then.
        """
        while (text := self._screen.read()) is not None:
            if not text.startswith("/"):
                if text.strip():
                    self._answer(ChatTurn("user", text))
                continue
            name, _, rest = text.strip().partition(" ")
            if name in ("/quit", "/exit"):
                return
            self._command(name, rest.strip())

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/help":
                self._screen.tell(HELP)
            case "/reset" | "/clear":
                self._turns.clear()
                self._screen.tell("the conversation begins anew")
            case "/system":
                self._system = rest or None
                self._turns.clear()
                self._screen.tell("the conversation begins anew, with this system message")
            case "/again" if self._turns:
                turn = self._turns.pop()
                if not self._answer(turn[0]):
                    self._turns.append(turn)
            case "/again":
                self._screen.tell("there is no answer yet")
            case "/set":
                self._screen.tell(self._set(*rest.split()))
            case _:
                self._screen.tell(f"{name} is no command. {UNKNOWN_HELP}")

    def _set(self, name: str = "", text: str = "", *more: str) -> str:
        """Carry out /set; returns the message for the user."""
        if name and (name not in SETTINGS or not text or more):
            return f"/set NAME VALUE: NAME is one of {', '.join(SETTINGS)}"
        if text == "default":
            self._settings.pop(name, None)
        elif name:
            try:
                self._settings[name] = SETTINGS[name](text)
            except ValueError:
                return f"{name}: {text} is no {SETTINGS[name].__name__}"
        shown = [f"{key} {value:g}" for key, value in self._settings.items()]
        return ", ".join([*shown, "all else as the server has it"])

    def _answer(self, question: ChatTurn) -> bool:
        """Answer `question` and keep the turn; returns whether there is an answer."""
        opening = [] if self._system is None else [ChatTurn("system", self._system)]
        asked = [*opening, *(message for turn in self._turns for message in turn), question]
        try:
            # Closing the stream closes the connection, which makes the server stop too.
            with closing(self._client.stream(self._model, asked, self._settings)) as pieces:
                answer = self._screen.show(pieces)
        except ChatError as error:
            if self._screen.ends_on_error:
                raise
            self._screen.tell(f"error: {error}")
            return False
        if answer:
            self._turns.append((question, ChatTurn("assistant", answer)))
        return bool(answer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_url(parser)
    parser.add_argument("--model", metavar="NAME", help="served model (the server's first)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    for name, kind in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="X", help="sent if given (the server's)")


def run(parsed: argparse.Namespace) -> int:
    """Converse on stdin and stdout; returns the exit status. Raises ChatError."""
    given = {name: getattr(parsed, name) for name in SETTINGS}
    settings = {name: value for name, value in given.items() if value is not None}
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    screen = TerminalScreen() if interactive else Screen()
    with ChatClient(parsed.url) as client:
        name = parsed.model or client.first_model()
        if interactive:
            screen.tell(
                f"{name} at {parsed.url}. /help shows the commands, /quit (or Ctrl-D) ends."
            )
        Conversation(client, screen, model=name, system=parsed.system, settings=settings).run()
    return 0
