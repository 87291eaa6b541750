"""Finding a server: its models, and whether it is ready or only listens."""

from __future__ import annotations

import pytest

from benchmarks.load.client.targets import (
    ListedModel,
    ServerUnreachable,
    check_ready,
    first_model,
    served_model,
    served_models,
    wait_until_ready,
)
from tests.benchmarks.load.scripted_server import ScriptedServer

MODELS = b'{"data": [{"id": "one", "root": "/models/one", "vocab_size": 9}, {"id": "two"}]}'


def test_the_models_are_those_that_the_server_lists() -> None:
    with ScriptedServer(pages={"/v1/models": [(200, MODELS)]}) as server:
        url = server.base_url
        one = ListedModel("one", root="/models/one", vocab_size=9)
        assert served_models(url) == [one, ListedModel("two")]
        assert first_model(url + "/") == "one"
        assert served_model(url, "one") == one
        assert served_model(url, "three") == ListedModel("three")
        # A server without health is ready with its models.
        check_ready(url)
    assert served_model(url, "one") == ListedModel("one")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"who are you", "answers 401: who are you"),
        (200, b"<html>", "no list of models: <html>"),
        (200, b'{"models": []}', "no list of models"),
        (200, b'{"data": []}', "serves no model"),
    ],
)
def test_an_answer_that_is_no_list_is_an_error(status: int, body: bytes, said: str) -> None:
    with (
        ScriptedServer(pages={"/v1/models": [(status, body)]}) as server,
        pytest.raises(ServerUnreachable, match=said),
    ):
        first_model(server.base_url)


def test_a_server_that_still_loads_is_waited_for_though_it_lists_its_models() -> None:
    health = [(503, b"loading"), (503, b"loading"), (200, b"")]
    with ScriptedServer(pages={"/health": health, "/v1/models": [(200, MODELS)]}) as server:
        with pytest.raises(ServerUnreachable, match="answers 503: loading"):
            check_ready(server.base_url)
        wait_until_ready(server.base_url, 60)
        assert health == [(200, b"")]
        health[:] = [(503, b"loading")]
        with pytest.raises(ServerUnreachable, match=r"not ready after 0.01 s: .*503: loading"):
            wait_until_ready(server.base_url, 0.01)
