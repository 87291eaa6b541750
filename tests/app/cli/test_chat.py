"""`topspin chat` against a scripted server: streaming, history, commands, errors, pipes."""

from __future__ import annotations

import http.server
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from app.cli.chat import SETTINGS, ChatClient, ChatError, ChatTurn, Conversation, Screen
from tests.app.launch.roles import ROOT

URL = "http://127.0.0.1:9"

Handler = Callable[[httpx.Request], httpx.Response]


def events(*pieces: str, done: bool = True) -> bytes:
    """Return an answer as the chunks that the gateway streams."""
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": []}]
    lines = [": keep-alive\n\n", *(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)]
    return ("".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def client(answer: Handler | bytes, *, status: int = 200) -> ChatClient:
    handler = answer if callable(answer) else lambda _: httpx.Response(status, content=answer)
    return ChatClient(URL, transport=httpx.MockTransport(handler))


def ask(chat: ChatClient, **settings: float) -> list[str]:
    with chat:
        return list(chat.stream("m", [ChatTurn("user", "hi")], settings))


class ScriptedScreen(Screen):
    """Reads the given messages; keeps the answers and notices it is given."""

    def __init__(self, *messages: str, ends_on_error: bool = True) -> None:
        self.ends_on_error = ends_on_error
        self.messages = list(messages)
        self.answers: list[str] = []
        self.told: list[str] = []

    def read(self) -> str | None:
        return self.messages.pop(0) if self.messages else None

    def show(self, pieces: Iterator[str]) -> str:
        self.answers.append("".join(pieces))
        return self.answers[-1]

    def tell(self, text: str) -> None:
        self.told.append(text)


def recording(requests: list[dict[str, Any]], *replies: bytes) -> Handler:
    left = list(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content))
        reply = left.pop(0)
        return httpx.Response(200 if reply.startswith(b":") else 503, content=reply)

    return handle


def test_an_answer_comes_in_pieces() -> None:
    assert ask(client(events("Hel", "lo \u00e9"))) == ["Hel", "lo \u00e9"]


def test_the_request_is_a_streamed_chat_completion() -> None:
    requests: list[dict[str, Any]] = []
    ask(client(recording(requests, events("x"))), max_tokens=7, temperature=0.5)
    assert requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 7,
            "temperature": 0.5,
        }
    ]


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (b'{"error": {"message": "no such model"}}', 404, "404: no such model"),
        (b"<html>", 502, "status 502"),
        (b"\xff", 500, "status 500"),
        (events("a", done=False), 200, "broke off"),
        (
            events("a", done=False) + b'data: {"error": {"message": "node lost"}}\n\n',
            200,
            "node lost",
        ),
        (b"data: {\n\n", 200, "not a chunk"),
        (b"data: []\n\n", 200, "not a chunk"),
        (b'data: {"choices": 3}\n\n', 200, "not a chunk"),
    ],
)
def test_what_goes_wrong_is_said(answer: bytes, status: int, said: str) -> None:
    with pytest.raises(ChatError, match=said):
        ask(client(answer, status=status))


def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(ChatError, match=r"http://127\.0\.0\.1:9: .*topspin serve"):
        ask(ChatClient(URL))
    with ChatClient(URL) as chat, pytest.raises(ChatError, match="topspin serve"):
        chat.first_model()


def test_the_first_model_of_the_server_is_found() -> None:
    with client(b'{"object": "list", "data": [{"id": "a"}, {"id": "b"}]}') as chat:
        assert chat.first_model() == "a"


@pytest.mark.parametrize(("answer", "status"), [(b'{"data": []}', 200), (b"3", 200), (b"", 503)])
def test_a_server_without_models_is_an_error(answer: bytes, status: int) -> None:
    with client(answer, status=status) as chat, pytest.raises(ChatError):
        chat.first_model()


def said(requests: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in request["messages"]] for request in requests]


def test_commands_change_what_is_asked() -> None:
    requests: list[dict[str, Any]] = []
    replies = [events(text) for text in ("one", "two", "three", "four", "five")]
    screen = ScriptedScreen(
        *("a", "  ", "b", "/again", "/reset", "c", "/system be kind", " /etc?", "/exit", "never")
    )
    with client(recording(requests, *replies)) as chat:
        Conversation(chat, screen, model="m", system="be brief").run()
    opening, first = ("system", "be brief"), [("user", "a"), ("assistant", "one")]
    assert said(requests) == [
        [opening, ("user", "a")],
        [opening, *first, ("user", "b")],
        [opening, *first, ("user", "b")],
        [opening, ("user", "c")],
        [("system", "be kind"), ("user", " /etc?")],
    ]
    assert screen.answers == ["one", "two", "three", "four", "five"]
    assert screen.messages == ["never"]


def test_settings_are_sent_until_they_are_the_servers_again() -> None:
    requests: list[dict[str, Any]] = []
    screen = ScriptedScreen(
        *("/set temperature 0.7", "a", "/set temperature default", "/set", "b", "/quit")
    )
    with client(recording(requests, events("one"), events("two"))) as chat:
        Conversation(chat, screen, model="m", settings={"seed": 3}).run()
    fields = [{key: request.get(key) for key in ("seed", "temperature")} for request in requests]
    assert fields == [{"seed": 3, "temperature": 0.7}, {"seed": 3, "temperature": None}]
    rest = "all else as the server has it"
    assert screen.told == [f"seed 3, temperature 0.7, {rest}", f"seed 3, {rest}", f"seed 3, {rest}"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("/help", "/set NAME VALUE"),
        ("/sing", "/sing is no command"),
        ("/again", "no answer yet"),
        ("/set colour 3", "temperature, top_p"),
        ("/set seed", "/set NAME VALUE"),
        ("/set seed 1 2", "/set NAME VALUE"),
        ("/set seed 0.5", "seed: 0.5 is no int"),
    ],
)
def test_a_command_is_answered_by_the_chat_itself(command: str, told: str) -> None:
    screen = ScriptedScreen(command)
    with client(b"", status=500) as chat:
        Conversation(chat, screen, model="m").run()
    assert [told in text for text in screen.told] == [True]


def test_a_failed_answer_leaves_the_conversation_as_it_was() -> None:
    requests: list[dict[str, Any]] = []
    failure = b'{"error": {"message": "queue full"}}'
    screen = ScriptedScreen("a", "b", "/again", "c", ends_on_error=False)
    replies = (failure, events("two"), failure, events("three"))
    with client(recording(requests, *replies)) as chat:
        Conversation(chat, screen, model="m").run()
    assert said(requests)[1] == [("user", "b")]
    assert said(requests)[3] == [("user", "b"), ("assistant", "two"), ("user", "c")]
    assert screen.told == ["error: 503: queue full"] * 2


def test_on_a_pipe_a_failed_answer_ends_the_conversation() -> None:
    requests: list[dict[str, Any]] = []
    failure = b'{"error": {"message": "queue full"}}'
    chat = client(recording(requests, failure))
    with chat, pytest.raises(ChatError, match="queue full"):
        Conversation(chat, ScriptedScreen("a", "b"), model="m").run()


class EchoHandler(http.server.BaseHTTPRequestHandler):
    """Answers a chat completion by the last message in capitals, a letter per chunk."""

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "echo"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "echo"
        settings = {key: body[key] for key in SETTINGS if key in body}
        shown = f" {settings}" if settings else ""
        self._send(events(*body["messages"][-1]["content"].upper(), shown))

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def echo_server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), EchoHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def run_chat(url: str, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "topspin", "chat", "--url", url, *flags]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)


def test_a_pipe_gives_one_answer_per_line() -> None:
    with echo_server() as url:
        done = run_chat(url, "good\nmorning\n/reset\nlast line")
    assert (done.returncode, done.stdout) == (0, "GOOD\nMORNING\nLAST LINE\n")
    assert done.stderr == "the conversation begins anew\n"


@pytest.mark.slow
def test_flags_are_the_settings() -> None:
    with echo_server() as url:
        done = run_chat(url, "hi", "--temperature", "0.5", "--max-tokens", "7")
    assert done.stdout == "HI {'temperature': 0.5, 'max_tokens': 7}\n"


@pytest.mark.slow
def test_a_pipe_without_a_server_fails_with_status_1() -> None:
    done = run_chat(URL, "good\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"topspin chat: error: {URL}: ")


def test_a_terminal_gets_a_prompt_and_answers() -> None:
    controller, terminal = pty.openpty()
    with echo_server() as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "topspin", "chat", "--url", url],
            cwd=ROOT,
            env={**os.environ, "TERM": "dumb"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        os.write(controller, b"hello\n/exit\n")
        seen = b""
        try:
            while data := os.read(controller, 65536):
                seen += data
        except OSError:
            pass  # Linux's error when the last writer of a terminal has gone
        assert process.wait(timeout=20) == 0, seen.decode()
    os.close(controller)
    assert b"echo at http://127.0.0.1:" in seen
    assert b"HELLO" in seen
