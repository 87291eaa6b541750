"""The discovery of a server: whether it is ready, and its models.

Owns the requests that come before a load test. `bench serve`, sweep and compare call it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from topspin.errors import TopspinError

POLL_S = 0.2
REQUEST_TIMEOUT_S = 10.0
# The statuses of a server without a public /health: unknown path, wrong method, no permission.
NO_HEALTH = (401, 403, 404, 405, 501)


class ServerUnreachable(TopspinError):
    """The server does not answer, or not by the OpenAI API."""

    code = "server_unreachable"


class ListedModel(NamedTuple):
    """An entry of /v1/models; fields that a server does not send are None.

    `root` is a directory on the server's host (vLLM's: or a hub id).
    """

    name: str
    root: str | None = None
    vocab_size: int | None = None


def served_models(base_url: str, headers: Mapping[str, str] | None = None) -> list[ListedModel]:
    """Return the models that `base_url` serves.

    Raises ServerUnreachable if it does not answer, or not as /v1/models should.
    """
    url = base_url.rstrip("/") + "/v1/models"
    try:
        response = httpx.get(url, headers=dict(headers or {}), timeout=REQUEST_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(f"{url}: {error}") from None
    if response.status_code != 200:
        text = response.text[:200]
        raise ServerUnreachable(f"{url} answers {response.status_code}: {text}")
    try:
        return [
            ListedModel(str(model["id"]), model.get("root"), model.get("vocab_size"))
            for model in response.json()["data"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ServerUnreachable(f"{url}: no list of models: {response.text[:200]}") from None


def first_model(base_url: str, headers: Mapping[str, str] | None = None) -> str:
    """Return the name of the first model of `base_url`; ServerUnreachable if there is none."""
    models = served_models(base_url, headers)
    if not models:
        raise ServerUnreachable(f"{base_url} serves no model; name one with --model")
    return models[0].name


def served_model(base_url: str, name: str, headers: Mapping[str, str] | None = None) -> ListedModel:
    """Return the server's entry of the model `name`, empty if it does not answer."""
    try:
        models = served_models(base_url, headers)
    except ServerUnreachable:
        models = []
    return next((model for model in models if model.name == name), ListedModel(name))


def check_ready(base_url: str, headers: Mapping[str, str] | None = None) -> None:
    """Raise ServerUnreachable, saying why, unless the server is ready for requests.

    A server may list its models while it still loads them, so /health is asked first; one without
    it is ready when it lists them.
    """
    url = base_url.rstrip("/") + "/health"
    try:
        response = httpx.get(url, headers=dict(headers or {}), timeout=REQUEST_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(f"{url}: {error}") from None
    if response.status_code in NO_HEALTH:
        served_models(base_url, headers)
    elif response.status_code != 200:
        raise ServerUnreachable(f"{url} answers {response.status_code}: {response.text[:200]}")


def wait_until_ready(
    base_url: str, timeout_s: float, headers: Mapping[str, str] | None = None
) -> None:
    """Return once the server is ready; raises ServerUnreachable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            check_ready(base_url, headers)
        except ServerUnreachable as error:
            if time.monotonic() >= deadline:
                raise ServerUnreachable(f"not ready after {timeout_s:g} s: {error}") from None
            time.sleep(POLL_S)
        else:
            return
