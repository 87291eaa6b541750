"""The flags that say where a tested server is."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.load.arguments import add_target_arguments, base_url_of
from topspin.errors import ConfigError


def url_of(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_target_arguments(parser)
    return base_url_of(parser.parse_args(words))


def test_a_server_is_named_as_by_every_command_or_as_in_vllm() -> None:
    assert url_of() == "http://127.0.0.1:8000"
    for flag in ("--url", "--base-url"):
        assert url_of(flag, "http://there:9000") == "http://there:9000"
    assert url_of("--host", "there", "--port", "9000") == "http://there:9000"


def test_a_server_is_named_once() -> None:
    with pytest.raises(ConfigError):
        url_of("--url", "http://there:9000", "--port", "8000")
