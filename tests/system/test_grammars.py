"""A stream with a grammar, from HTTP to real processes, some of which are killed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from models.text.tokenizer import Tokenizer
from tests.system.conftest import Tiny
from tests.system.recovery.test_chaos import SLOW
from tests.system.rig import chaos
from tests.system.rig.chaos import Streams, wait_until, wait_until_whole
from tests.system.rig.server import Server

SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 5,
    "items": {
        "type": "object",
        "properties": {"k": {"enum": ["a", "the", "in"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["k", "n"],
        "additionalProperties": False,
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}


def fields(tokenizer: Tokenizer) -> dict[str, object]:
    """The request's fields; a random model would fill the answer with blanks and digits."""
    unlikely = tokenizer.encode(" \n\t0123456789", add_special_tokens=False)
    return {
        "response_format": FORMAT,
        "ignore_eos": False,
        "temperature": 1,
        "seed": 5,
        "logit_bias": dict.fromkeys(map(str, unlikely), -9),
    }


@pytest.mark.slow
@pytest.mark.parametrize("role", ["attention 0", "expert 1"])
def test_a_constrained_stream_has_the_tokens_of_an_undisturbed_one(
    tiny: Tiny, tmp_path: Path, role: str
) -> None:
    tokenizer = Tokenizer.from_directory(tiny.path)
    flags = ("--deterministic", "--transport", "tcp", "--attention-nodes", "2")
    with Server(tiny.path, tmp_path, *flags, "--expert-nodes", "2", settings=SLOW) as server:

        def start() -> Streams:
            return Streams(server.url, tiny.prompts, 200, fields=fields(tokenizer))

        undisturbed = start().join()
        for each in undisturbed:
            text = tokenizer.decode(each.tokens, skip_special_tokens=True)
            jsonschema.validate(json.loads(text), SCHEMA)
        streams = start()
        streams.wait_for_events(12)
        chaos.kill(server, role)
        assert streams.join() == undisturbed
        wait_until(lambda: f"lost {role}" in server.output, "not noticed")
        wait_until_whole(server)
