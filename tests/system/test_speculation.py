"""`topspin serve --speculative-config`: what clients get is what they get without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import Tiny
from tests.system.rig.server import Server

FLAGS = ("--dtype", "float32", "--expert-nodes", "2")
FORCED = '{"method": "suffix", "num_speculative_tokens": 6, "adaptive": false}'


TREES = (
    '{"method": "draft_model", "model": "%s", "branches": true, "draft_width": 2, '
    '"num_speculative_tokens": 5, "adaptive": false}'
)


def answers(server: Server, prompts: list[list[int]], **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120.0)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def accepted(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=30.0).text
    found = re.search(r"^topspin_spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", text, re.M)
    assert found is not None
    return float(found.group(1))


@pytest.mark.slow
def test_stop_strings_lengths_and_logprobs_are_those_of_plain_decoding(
    tiny: Tiny, tmp_path: Path
) -> None:
    with Server(tiny.path, tmp_path, *FLAGS, "--speculative-config", FORCED) as server:
        (whole,) = answers(server, tiny.prompts[:1], max_tokens=24, return_token_ids=True)
        assert whole["token_ids"] == tiny.tokens[0]
        before = accepted(server)
        # From now on the whole answer is foreseen, and drafts go past each end of an answer.
        text = whole["text"]
        for start in range(6, 16):
            stop = text[start : start + 3]
            (choice,) = answers(server, tiny.prompts[:1], max_tokens=24, stop=stop)
            assert choice["text"] == text[: text.index(stop)]
            assert choice["finish_reason"] == "stop"
        for length in (1, 2, 7):
            (choice,) = answers(
                server, tiny.prompts[:1], max_tokens=length, logprobs=2, return_token_ids=True
            )
            assert choice["token_ids"] == tiny.tokens[0][:length]
            assert choice["finish_reason"] == "length"
            assert len(choice["logprobs"]["token_logprobs"]) == length
        together = answers(server, tiny.prompts, max_tokens=24, return_token_ids=True)
        assert [each["token_ids"] for each in together] == tiny.tokens
        assert accepted(server) > before + 40


@pytest.mark.slow
def test_a_draft_model_in_the_attention_nodes_process(tiny: Tiny, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--speculative-config", TREES % tiny.path)
    with Server(tiny.path, tmp_path, *flags) as server:
        found = answers(server, tiny.prompts, max_tokens=24, return_token_ids=True)
        assert [each["token_ids"] for each in found] == tiny.tokens
        assert accepted(server) > 40
