"""Both formats of the logs, from a process as roles start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from topspin.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, REQUESTS, is_json, json_line

_SCRIPT = f"""
import logging
from topspin.logs import REQUESTS, about, start_logging

log = start_logging("gateway")
log.info("gateway: listens on %s", "here")
log.warning("two\\nlines", extra=about(request_id="r-1", tokens=3, nothing=None))
logging.getLogger({REQUESTS!r}).info("admitted", extra=about(request_id="r-1"))
logging.getLogger({REQUESTS!r}).warning("failed")
try:
    raise ValueError("why")
except ValueError:
    log.exception("broken")
"""


def lines(**environment: str) -> list[str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in (FORMAT_VARIABLE, LEVEL_VARIABLE)
    }
    command = [sys.executable, "-c", _SCRIPT]
    found = subprocess.run(
        command,
        env=variables | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return found.stderr.splitlines()


def test_text_shows_fields_and_not_every_request() -> None:
    found = lines()
    assert [line[9:] for line in found if line[2:3] == ":"] == [
        "INFO gateway: listens on here",
        "WARNING two",
        "WARNING failed",
        "ERROR broken",
    ]
    assert "lines request_id=r-1 tokens=3" in found
    assert found[-1] == "ValueError: why"
    assert any("admitted" in line for line in lines(**{LEVEL_VARIABLE: "DEBUG"}))


def test_json_has_one_object_per_record_and_every_request() -> None:
    found = lines(**{FORMAT_VARIABLE: "json"})
    assert all(map(is_json, found))
    records = [json.loads(line) for line in found]
    assert [(each["level"], each["message"]) for each in records] == [
        ("info", "gateway: listens on here"),
        ("warning", "two\nlines"),
        ("info", "admitted"),
        ("warning", "failed"),
        ("error", "broken"),
    ]
    assert {each["role"] for each in records} == {"gateway"}
    assert all(datetime.fromisoformat(each["time"]).tzinfo for each in records)
    assert records[1].items() >= {"request_id": "r-1", "tokens": 3}.items()
    assert "nothing" not in records[1]
    assert records[-1]["exception"].endswith("ValueError: why")


@pytest.mark.parametrize("text", ["plain", '{"other": 1}', ""])
def test_a_line_of_text_becomes_json(text: str) -> None:
    assert not is_json(text)
    made = json.loads(json_line("topspin", text))
    assert (made["role"], made["level"], made["message"]) == ("topspin", "info", text)
