"""No grammar ends, stalls or fills an engine: fuzzed, beside a stream that must end whole.

TOPSPIN_FUZZ_S is how long; the test prints what it has tried. A request's answer may be 200, or an
error of the client's; nothing else may change.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.system.conftest import Tiny
from tests.system.rig.chaos import Streams
from tests.system.rig.hostile_grammars import OUTPUTS, Outputs, suite_schemas
from tests.system.rig.server import Server

FUZZ_S = float(os.environ.get("TOPSPIN_FUZZ_S", "20"))
NUM_CLIENTS = 4
BATCH = 8
TIMEOUT_S = 120.0
NUM_TOKENS = 8
STREAM_TOKENS = 200
GOOD = {"json": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2}}
SERVED = (200, 400, 413, 429, 503)


class Fuzz:
    """Requests to one server, and what came of them."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/v1/completions"
        self.statuses: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.longest_s = 0.0
        self.longest_good_s = 0.0
        self._lock = threading.Lock()
        self._num_good = 0

    def send(self, outputs: Outputs) -> None:
        """Send a hostile request; its answer must be a known one."""
        begun_s = time.monotonic()
        response = self._post(outputs, max_tokens=NUM_TOKENS)
        assert response.status_code in SERVED, (response.status_code, str(outputs)[:500])
        with self._lock:
            self.statuses[response.status_code] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            if response.status_code != 200:
                self.reasons[response.json()["error"]["message"][:60]] += 1

    def send_good(self) -> None:
        """Send a good request with a grammar that nobody has sent before."""
        self._num_good += 1
        name = f"g{self._num_good}"
        schema = {"type": "object", "properties": {name: GOOD["json"]}, "required": [name]}
        begun_s = time.monotonic()
        response = self._post({"json": schema}, max_tokens=NUM_TOKENS)
        assert response.status_code == 200, response.text
        self.longest_good_s = max(self.longest_good_s, time.monotonic() - begun_s)

    def _post(self, outputs: Outputs, *, max_tokens: int) -> httpx.Response:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": [1, 2, 3],
            "max_tokens": max_tokens,
            "temperature": 1.5,
            "structured_outputs": outputs,
        }
        return httpx.post(self._url, json=body, timeout=TIMEOUT_S)

    def report(self, seconds: float) -> str:
        return (
            f"{sum(self.statuses.values())} grammars in {seconds:.0f} s, 0 ends; answers "
            f"{dict(self.statuses)}; longest {self.longest_s:.2f} s, of a good one beside them "
            f"{self.longest_good_s:.2f} s"
        )


def batches_of(fuzz: Fuzz, pool: ThreadPoolExecutor, number: int) -> None:
    """Send some batches, drawn by the seed `number`."""

    @seed(number)
    @settings(
        max_examples=4,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(OUTPUTS, min_size=BATCH, max_size=BATCH))
    def send(batch: list[Outputs]) -> None:
        for each in [pool.submit(fuzz.send, outputs) for outputs in batch]:
            each.result()

    send()


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 600)
def test_no_grammar_harms_others(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(tiny.path, tmp_path, "--attention-nodes", "2") as server:
        [expected] = Streams(server.url, tiny.prompts[:1], STREAM_TOKENS).join()
        fuzz, pids = Fuzz(server), server.pids
        beside = Beside(server, tiny, fuzz)
        begun_s = time.monotonic()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            try:
                schemas = suite_schemas(tmp_path)
            except (OSError, subprocess.SubprocessError):
                schemas = []  # no npm, or no registry, here
            for each in [pool.submit(fuzz.send, {"json": schema}) for schema in schemas]:
                each.result()
            number, drawn_s = 0, time.monotonic()
            while time.monotonic() - drawn_s < FUZZ_S:
                number += 1
                batches_of(fuzz, pool, number)
        beside.join(expected.tokens)
        with capsys.disabled():
            print(f"\n{fuzz.report(time.monotonic() - begun_s)}; {len(schemas)} of the suite")
            for reason, count in fuzz.reasons.most_common(12):
                print(f"  {count:5} {reason}")
        assert server.pids_by_role() == pids, "a process has been started again"
        assert server.process.poll() is None
        assert fuzz.statuses[200] > 10
        assert fuzz.statuses[400] > 10
        assert httpx.get(f"{server.url}/health").status_code == 200


class Beside:
    """Clients that go on beside hostile ones: streams, and requests with good new grammars."""

    def __init__(self, server: Server, tiny: Tiny, fuzz: Fuzz) -> None:
        self._server, self._tiny, self._fuzz = server, tiny, fuzz
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._streams = self._pool.submit(self._stream)
        self._good = self._pool.submit(self._send_good)

    def _stream(self) -> list[list[int]]:
        tokens = []
        while not self._is_over.is_set():
            [watched] = Streams(self._server.url, self._tiny.prompts[:1], STREAM_TOKENS).join()
            assert (watched.status, watched.errors, watched.num_done) == (200, [], 1)
            tokens.append(watched.tokens)
        return tokens

    def _send_good(self) -> None:
        while not self._is_over.wait(0.2):
            self._fuzz.send_good()

    def join(self, expected: list[int]) -> None:
        """End them; each must have been served as without the others."""
        self._is_over.set()
        self._good.result(TIMEOUT_S)
        tokens = self._streams.result(TIMEOUT_S)
        self._pool.shutdown()
        assert tokens
        assert all(each == expected for each in tokens)
