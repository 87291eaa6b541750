"""The metrics of single requests, the bounded ones of experts, and the page that lists them all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from server.gateway.operations.metrics import TOP_EXPERTS, GatewayMetrics
from tests.server.gateway.calls import PLAIN, PLAIN_BODY
from tests.server.gateway.fakes import FakeEngine, gateway, ids, output, saying
from tests.server.gateway.test_app import samples
from topspin.errors import PeerLost
from topspin.messages import ITERATION_BUCKETS, AddRequest, RequestOutput

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def timed(request: AddRequest) -> Iterator[RequestOutput]:
    """Three tokens in two outputs: half a second of waiting, a quarter for the prompt."""
    first = output(request, ids("a"))
    yield msgspec.structs.replace(first, queue_s=0.5, prefill_s=0.25)
    yield output(request, ids("bc"), index=1, finish_reason="length")


async def test_requests_are_counted_by_phase_and_length() -> None:
    fake = FakeEngine(timed)
    async with gateway(fake) as client:
        body = {"model": "tiny", "prompt": [1, 2, 3, 4], "n": 2, "max_tokens": 7}
        assert (await client.post(PLAIN, json=body)).status_code == 200
        found = samples((await client.get("/metrics")).text)

    def of(name: str) -> tuple[float, float]:
        return found[f"topspin_{name}_count", ""], found[f"topspin_{name}_sum", ""]

    assert of("request_queue_time_seconds") == (2, 1.0)
    assert of("request_prefill_time_seconds") == (2, 0.5)
    num, decode_s = of("request_decode_time_seconds")
    assert num == 2
    assert 0 <= decode_s < found["topspin_e2e_request_latency_seconds_sum", ""]
    assert of("request_inference_time_seconds") == (2, pytest.approx(0.5 + decode_s))
    assert of("request_time_per_output_token_seconds") == (2, pytest.approx(decode_s / 2))
    assert of("request_prompt_tokens") == (2, 8)
    assert of("request_generation_tokens") == (2, 6)
    assert of("request_params_max_tokens") == (2, 14)
    assert of("request_params_n") == (1, 2)


async def leave(client: httpx.AsyncClient, fake: FakeEngine) -> None:
    """Ask for a completion, and go before its first token."""
    fake.script = None
    fake.request_came.clear()
    pending = asyncio.create_task(client.post(PLAIN, json=PLAIN_BODY))
    await fake.request_came.wait()
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)


async def test_answers_are_counted_by_route_and_status_and_aborts_have_no_phases() -> None:
    fake = FakeEngine(saying("a"))
    async with gateway(fake) as client:
        await client.post(PLAIN, json=PLAIN_BODY)
        await client.post(PLAIN, json={**PLAIN_BODY, "stream": True})
        await client.post(PLAIN, json={**PLAIN_BODY, "n": 0})
        for path in ("/made-up/1", "/made-up/2", "/v1/models/tiny"):
            await client.get(path)
        await leave(client, fake)
        fake.say(PeerLost("closed"))
        await fake.settle()
        await client.post(PLAIN, json=PLAIN_BODY)
        found = samples((await client.get("/metrics")).text)
    name = "topspin_http_responses_total"
    assert {labels: count for (each, labels), count in found.items() if each == name} == {
        f"code=200,endpoint={PLAIN}": 2,
        f"code=400,endpoint={PLAIN}": 1,
        f"code=499,endpoint={PLAIN}": 1,
        f"code=503,endpoint={PLAIN}": 1,
        "code=404,endpoint=other": 2,
        "code=200,endpoint=other": 1,
    }
    # One token has no time per token.
    assert found["topspin_request_time_per_output_token_seconds_count", ""] == 0
    assert found["topspin_request_inference_time_seconds_count", ""] == 2
    assert found["topspin_request_success_total", "finished_reason=abort"] == 1


def rendered(*, per_expert: bool = False) -> str:
    """Return a scrape of an engine with two layers of 20 experts; expert e served 10 e + layer."""
    counts = [0] * (len(ITERATION_BUCKETS) + 1)
    counts[1], counts[-1] = 3, 1
    stats = msgspec.structs.replace(
        FakeEngine().stats,
        expert_tokens=tuple(tuple(10 * e + layer for e in range(20)) for layer in range(2)),
        iteration_tokens=tuple(counts),
        iteration_tokens_sum=20_024,
    )
    return GatewayMetrics("tiny").render(stats, per_expert=per_expert).decode()


def test_the_busiest_experts_are_shown_and_the_rest_summed() -> None:
    found = samples(rendered())
    top = {labels: n for (name, labels), n in found.items() if name == "topspin_expert_tokens_top"}
    total = sum(10 * e + layer for e in range(20) for layer in range(2))
    assert found["topspin_expert_tokens_total", ""] == total
    rest = top.pop("expert=rest,layer=rest")
    assert top == {
        f"expert={e},layer={layer}": 10 * e + layer for e in range(16, 20) for layer in range(2)
    }
    assert len(top) == TOP_EXPERTS
    assert rest == total - sum(top.values())
    each = samples(rendered(per_expert=True))
    assert sum(name == "topspin_expert_tokens_total" for name, _ in each) == 40
    assert each["topspin_expert_tokens_total", "expert=3,layer=1"] == 31


def test_steps_are_a_histogram_of_their_tokens() -> None:
    found = samples(rendered())
    name = "topspin_iteration_tokens_total"
    assert found[f"{name}_bucket", "le=1"] == 0
    assert found[f"{name}_bucket", "le=8"] == 3
    assert (found[f"{name}_count", ""], found[f"{name}_sum", ""]) == (4, 20_024)


def test_the_page_lists_every_metric_with_its_type() -> None:
    """Those of the default scrape, but for the histograms of steps' phases: one line for all."""
    row, line = r"(?m)^\| `topspin_(\w+)`[^|]*\| (\w+) \|", r"(?m)^# TYPE topspin_(\w+) (\w+)$"
    listed = dict(re.findall(row, PAGE.read_text()))
    shown = dict(re.findall(line, rendered()))
    served = {name: kind for name, kind in shown.items() if not name.endswith("_created")}
    assert listed == served
