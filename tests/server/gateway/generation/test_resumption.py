"""Streams that go on where they were cut, at another gateway and in other pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.pairwise import slow_rows
from tests.server.gateway.calls import CHAT, CHAT_BODY, PLAIN, PLAIN_BODY, answer_to
from tests.server.gateway.fakes import FakeEngine, Script, ids, output, saying
from topspin.messages import AddRequest, RequestOutput

TEXT = "one two three four"
KEY = {"Idempotency-Key": "retry-1"}
ANTHROPIC = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**CHAT_BODY, "stream": True},
    PLAIN: {**PLAIN_BODY, "stream": True},
    ANTHROPIC: {**CHAT_BODY, "stream": True, "max_tokens": 64},
}


def in_pieces(text: str, size: int) -> Script:
    """Return a script that generates `text`, `size` tokens per output."""

    def script(request: AddRequest) -> Iterator[RequestOutput]:
        tokens = ids(text)
        for index in range(0, len(tokens), size):
            end = "length" if index + size >= len(tokens) else None
            yield output(request, tokens[index : index + size], index=index, finish_reason=end)

    return script


def events(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the events of a stream, each with its id, if it has one."""
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.split("\n\n")[:-1]:
        named, _, rest = event.partition("\n") if event.startswith("id: ") else ("", "", event)
        found.append((named.removeprefix("id: "), rest))
    return found


def text_of(path: str, stream: list[tuple[str, str]]) -> str:
    """Return the text of the events of an answer."""
    shown = []
    for _, event in stream:
        data = event.rpartition("data: ")[2]
        body = {} if data == "[DONE]" else json.loads(data)
        for choice in body.get("choices", ()):
            shown.append(choice["text"] if path == PLAIN else choice["delta"].get("content"))
        shown.append(body.get("delta", {}).get("text"))
    return "".join(each for each in shown if each)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("before", "size"),
    slow_rows([(1, 1), (1, 99), (3, 2)], beside=[(1, 3), (3, 1), (99, 2)]),
)
def test_a_stream_goes_on_behind_any_event(path: str, before: int, size: int) -> None:
    first = FakeEngine(in_pieces(TEXT, before))
    whole = events(answer_to(path, BODIES[path], fake=first, headers=KEY))
    assert text_of(path, whole) == TEXT
    names = [name for name, _ in whole if name]
    assert len(set(names)) == len(names) >= len(ids(TEXT)) // before
    for place, (name, _) in enumerate(whole):
        if not name:
            continue
        fake = FakeEngine(in_pieces(TEXT, size))
        headers = {**KEY, "Last-Event-ID": name}
        rest = events(answer_to(path, BODIES[path], fake=fake, headers=headers))
        assert text_of(path, whole[: place + 1]) + text_of(path, rest) == TEXT
        if size == before:
            assert rest == whole[place + 1 :]


def test_without_a_key_events_have_no_ids() -> None:
    stream = events(answer_to(CHAT, BODIES[CHAT], fake=FakeEngine(saying(TEXT))))
    assert not any(name for name, _ in stream)


def test_the_seed_follows_from_the_key_unless_the_client_gives_one() -> None:
    seeds = []
    for body, key in (({}, "a"), ({}, "a"), ({}, "b"), ({"seed": 7}, "a")):
        fake = FakeEngine(saying("ok"))
        answer_to(CHAT, {**CHAT_BODY, **body}, fake=fake, headers={"Idempotency-Key": key})
        seeds.append(fake.added[0].sampling.seed)
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[3] == 7


def test_several_choices_have_the_seed_and_no_ids() -> None:
    fake = FakeEngine(saying("ok"))
    stream = events(answer_to(CHAT, {**BODIES[CHAT], "n": 2}, fake=fake, headers=KEY))
    assert not any(name for name, _ in stream)
    assert len({each.sampling.seed for each in fake.added}) == 1


def test_a_clients_own_name_of_the_request_goes_before_the_keys() -> None:
    answers = [
        answer_to(CHAT, {**CHAT_BODY, **body}, fake=FakeEngine(saying("ok")), headers=KEY)
        for body in ({}, {"request_id": "mine"})
    ]
    names = [answer.headers["x-request-id"] for answer in answers]
    assert names[0].startswith("key-")
    assert names[1] == "mine"


def test_another_answer_is_an_error_and_no_text_with_a_seam() -> None:
    whole = events(answer_to(CHAT, BODIES[CHAT], fake=FakeEngine(saying(TEXT)), headers=KEY))
    name = next(name for name, _ in reversed(whole) if name)
    headers = {**KEY, "Last-Event-ID": name}
    other = saying(TEXT.replace("three", "eight"))
    stream = events(answer_to(CHAT, BODIES[CHAT], fake=FakeEngine(other), headers=headers))
    assert [text_of(CHAT, [event]) for event in stream if "choices" in event[1]] == []
    assert "answer_changed" in stream[0][1]


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"Last-Event-ID": "0-1.1-1-0123456789abcdef"}, {"stream": True}, "Idempotency-Key"),
        ({**KEY, "Last-Event-ID": "7"}, {"stream": True}, "Last-Event-ID"),
        ({**KEY, "Last-Event-ID": "0-1.1-1-0123456789abcdef"}, {}, "Last-Event-ID"),
        (
            {**KEY, "Last-Event-ID": "0-1.1-1-0123456789abcdef"},
            {"stream": True, "n": 2},
            "Last-Event-ID",
        ),
        ({"Idempotency-Key": ""}, {}, "Idempotency-Key"),
        ({"Idempotency-Key": "k" * 129}, {}, "Idempotency-Key"),
    ],
)
def test_headers_that_mean_nothing(
    headers: dict[str, str], body: dict[str, Any], param: str
) -> None:
    answer = answer_to(CHAT, {**CHAT_BODY, **body}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
