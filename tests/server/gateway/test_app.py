"""Models, health, metrics and version."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.gateway.operations.health import ProgressWatch
from tests.server.gateway.calls import CHAT, CHAT_BODY, PLAIN, PLAIN_BODY, USER, answer_to
from tests.server.gateway.fakes import (
    EOS_ID,
    MODEL_NAME,
    FakeEngine,
    gateway,
    ids,
    loopback,
    output,
    saying,
    tokenizer,
)
from topspin import __version__
from topspin.errors import PeerLost
from topspin.messages import (
    AddRequest,
    EngineState,
    KvCounts,
    NodeCount,
    NodeMemory,
    RequestOutput,
    SlowNode,
)


def test_models_are_listed_under_every_served_name() -> None:
    cards = answer_to("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "org/alias"]
    assert cards["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "topspin",
        "root": "/models/tiny",
        "max_model_len": 100,
        "vocab_size": tokenizer().vocab_size,
        "default_sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": None,
        },
    }
    assert answer_to("/v1/models/org/alias").json() == cards["data"][1]
    assert answer_to("/v1/models/").json() == cards
    assert answer_to("/v1/models/tiny", ready=False).json()["max_model_len"] is None
    assert answer_to("/version").json() == {"version": __version__}


async def test_head_is_get_without_a_body() -> None:
    async with loopback(FakeEngine()) as port, httpx.AsyncClient() as client:
        for path in ("/v1/models", "/v1/models/tiny", "/health", "/version"):
            url = f"http://127.0.0.1:{port}{path}"
            head, whole = await client.head(url), await client.get(url)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(whole.content))


PREFLIGHT = {
    "Origin": "http://ui.test:3000",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("allowed", [("http://ui.test:3000",), ("*",)])
async def test_pages_of_allowed_origins_may_call(allowed: tuple[str, ...]) -> None:
    async with gateway(FakeEngine(saying("ok")), allowed_origins=allowed) as client:
        preflight = await client.options(CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == allowed[0]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        origin = {"Origin": PREFLIGHT["Origin"]}
        for fields, status in (({"stream": True}, 200), ({"stream": 1}, 400)):
            answer = await client.post(CHAT, json=CHAT_BODY | fields, headers=origin)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == allowed[0]


@pytest.mark.parametrize("allowed", [(), ("http://other.test",)])
async def test_pages_of_other_origins_are_not_allowed(allowed: tuple[str, ...]) -> None:
    async with gateway(FakeEngine(), allowed_origins=allowed) as client:
        preflight = await client.options(CHAT, headers=PREFLIGHT)
        assert preflight.status_code in (400, 405)
        answer = await client.get("/v1/models", headers={"Origin": PREFLIGHT["Origin"]})
        assert answer.status_code == 200
        for response in (preflight, answer):
            assert "access-control-allow-origin" not in response.headers


async def test_health_follows_the_engine_and_the_gateway_lives() -> None:
    fake = FakeEngine()
    async with gateway(fake, ready=False) as client:
        starting = await client.get("/health")
        assert (starting.status_code, starting.json()["state"]) == (503, "starting")
        live = await client.get("/live")
        assert (live.status_code, live.json()) == (200, {"state": "alive"})
        fake.become_ready()
        await fake.settle()
        ready = await client.get("/health")
        assert (ready.status_code, ready.json()) == (200, {"state": "ready"})
        fake.say(EngineState(state="stopping", detail="signal"))
        stopping = await client.get("/health")
        assert (stopping.status_code, stopping.json()["state"]) == (503, "stopping")


async def test_health_fails_when_the_scheduler_is_lost_or_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.gateway.operations.probes.STATS_DEADLINE_S", 0.01)
    fake = FakeEngine()
    async with gateway(fake) as client:
        fake.answers_stats = False
        hung = await client.get("/health")
        assert hung.status_code == 503
        assert "did not answer" in hung.json()["detail"]
        fake.say(PeerLost("closed"))
        lost = await client.get("/health")
        assert (lost.status_code, lost.json()["state"]) == (503, "failed")


async def test_health_is_well_while_requests_wait_for_another_scheduler() -> None:
    fake = FakeEngine()
    async with gateway(fake, replay_deadline_s=60.0) as client:
        fake.say(PeerLost("closed"))
        await fake.settle()
        waiting = await client.get("/health")
        assert (waiting.status_code, waiting.json()) == (200, {"state": "recovering"})
        metrics = (await client.get("/metrics")).text
        assert re.search(r"topspin_engine_up\S* 0\.0", metrics)


async def test_health_fails_when_work_makes_no_progress() -> None:
    fake = FakeEngine()
    async with gateway(fake, progress_deadline_s=0.0) as client:
        fake.stats = msgspec.structs.replace(fake.stats, num_running=1, num_steps=7)
        assert (await client.get("/health")).status_code == 200
        stalled = await client.get("/health")
        assert (stalled.status_code, stalled.json()["state"]) == (503, "stalled")
        fake.stats = msgspec.structs.replace(fake.stats, num_steps=8)
        assert (await client.get("/health")).status_code == 200


def test_progress_is_judged_by_steps_and_work() -> None:
    idle = FakeEngine().stats
    busy = msgspec.structs.replace(idle, num_waiting=1)
    watch = ProgressWatch(deadline_s=10.0)
    assert watch.stalled_for_s(idle, 0.0) is None
    assert watch.stalled_for_s(idle, 100.0) is None, "no work, no stall"
    assert watch.stalled_for_s(busy, 105.0) is None
    assert watch.stalled_for_s(busy, 110.0) is None
    assert watch.stalled_for_s(busy, 110.5) == 10.5
    stepped = msgspec.structs.replace(busy, num_steps=1)
    assert watch.stalled_for_s(stepped, 111.0) is None
    assert watch.stalled_for_s(stepped, 121.5) == 10.5
    # A long step is no stall while its nodes get on.
    getting_on = msgspec.structs.replace(stepped, progress_age_s=1.5)
    assert watch.stalled_for_s(getting_on, 160.0) is None
    hung = msgspec.structs.replace(stepped, progress_age_s=11.0)
    assert watch.stalled_for_s(hung, 169.5) == 11.0
    assert watch.stalled_for_s(idle, 170.0) is None


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return each sample's value by name and labels, as Prometheus would read it.

    Every sample has the model's name, which is left out.
    """
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny", sample
            found[sample.name, ",".join(f"{k}={labels[k]}" for k in sorted(labels))] = sample.value
    return found


def two_tokens(request: AddRequest) -> Iterator[RequestOutput]:
    yield output(request, ids("hello"))
    yield output(request, [EOS_ID], index=1, finish_reason="stop", stop_token_id=EOS_ID)


async def test_metrics_count_what_clients_got_and_show_the_engine() -> None:
    fake = FakeEngine(two_tokens)
    fake.stats = msgspec.structs.replace(
        fake.stats,
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        num_preemptions=4,
        num_grammars_compiled=13,
        num_grammars_found=14,
        prefix_cache_queries=50,
        prefix_cache_hits=20,
        num_steps=11,
        num_drafts=8,
        num_draft_tokens=40,
        num_accepted_tokens=(7, 3),
        num_root_hits=12,
        num_root_misses=5,
        num_draft_passes=30,
        num_overlapped_passes=21,
        draft_pass_seconds=0.75,
        kv=KvCounts(
            num_selected_rows=60,
            num_coded_segments=2,
            num_saved_blocks=5,
            num_loaded_blocks=4,
            num_hot_keys=70,
            num_read_keys=30,
            recall_sum=5.25,
            num_recalls=6,
        ),
        kv_frames_usage=0.75,
        max_queued_requests=16,
        nodes=(NodeCount(role="expert", optional=True, planned=2, present=1),),
        memory=(NodeMemory(role="attention", index=2, resident_bytes=2**33),),
        slow_nodes=(SlowNode(role="expert", index=1, times=3.5),),
        expert_tokens=((5, 6), (7, 8)),
        expert_activations=17,
        expert_batches=5,
        expert_table_version=3,
        expert_migrations=9,
        expert_balance=1.125,
        expert_balance_before=1.5,
    )
    async with gateway(fake) as client:
        body: dict[str, Any] = {"model": "tiny", "prompt": "hi", "n": 2}
        await client.post(PLAIN, json=body)
        fake.script = saying("hello")
        await client.post(PLAIN, json={**body, "n": 1, "stream": True})
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(response.text)
        each = samples((await client.get("/metrics?per_expert=1")).text)
        assert (await client.get("/metrics?per_expert=yes")).status_code == 400
    assert {key: each[key] for key in each if "expert_tokens" in key[0]} == {
        ("topspin_expert_tokens_total", f"expert={expert},layer={layer}"): tokens
        for layer, expert, tokens in ((0, 0, 5), (0, 1, 6), (1, 0, 7), (1, 1, 8))
    }
    expected = {
        ("topspin_engine_up", ""): 1,
        ("topspin_num_requests_running", ""): 3,
        ("topspin_num_requests_waiting", ""): 2,
        ("topspin_max_queued_requests", ""): 16,
        ("topspin_nodes", "optional=true,role=expert"): 1,
        ("topspin_nodes_planned", "optional=true,role=expert"): 2,
        ("topspin_node_resident_bytes", "index=2,role=attention"): 2**33,
        ("topspin_slow_nodes", "index=1,role=expert"): 3.5,
        ("topspin_kv_cache_usage_perc", ""): 0.25,
        ("topspin_kv_spill_memory_usage_perc", ""): 0.75,
        ("topspin_num_preemptions_total", ""): 4,
        ("topspin_grammars_compiled_total", ""): 13,
        ("topspin_grammars_found_total", ""): 14,
        ("topspin_prefix_cache_queries_total", ""): 50,
        ("topspin_prefix_cache_hits_total", ""): 20,
        ("topspin_engine_steps_total", ""): 11,
        ("topspin_spec_decode_num_drafts_total", ""): 8,
        ("topspin_spec_decode_num_draft_tokens_total", ""): 40,
        ("topspin_spec_decode_num_accepted_tokens_total", ""): 10,
        ("topspin_spec_decode_num_accepted_tokens_per_pos_total", "position=0"): 7,
        ("topspin_spec_decode_num_accepted_tokens_per_pos_total", "position=1"): 3,
        ("topspin_spec_decode_root_hits_total", ""): 12,
        ("topspin_spec_decode_root_misses_total", ""): 5,
        ("topspin_spec_decode_draft_passes_total", ""): 30,
        ("topspin_spec_decode_overlapped_draft_passes_total", ""): 21,
        ("topspin_spec_decode_draft_pass_seconds_total", ""): 0.75,
        ("topspin_kv_retrieval_selected_rows_total", ""): 60,
        ("topspin_kv_retrieval_coded_segments_total", ""): 2,
        ("topspin_kv_spill_saved_blocks_total", ""): 5,
        ("topspin_kv_spill_loaded_blocks_total", ""): 4,
        ("topspin_kv_spill_hot_keys_total", ""): 70,
        ("topspin_kv_spill_read_keys_total", ""): 30,
        ("topspin_kv_retrieval_recall_sum", ""): 5.25,
        ("topspin_kv_retrieval_recall_count", ""): 6,
        ("topspin_expert_tokens_total", ""): 26,
        ("topspin_expert_activations_total", ""): 17,
        ("topspin_expert_batches_total", ""): 5,
        ("topspin_expert_table_version", ""): 3,
        ("topspin_expert_migrations_total", ""): 9,
        ("topspin_expert_balance", "table=current"): 1.125,
        ("topspin_expert_balance", "table=previous"): 1.5,
        ("topspin_prompt_tokens_total", ""): 4,
        ("topspin_generation_tokens_total", ""): 5,
        ("topspin_request_success_total", "finished_reason=stop"): 2,
        ("topspin_request_success_total", "finished_reason=length"): 1,
        ("topspin_request_success_total", "finished_reason=abort"): 0,
        ("topspin_request_success_total", "finished_reason=error"): 0,
        ("topspin_time_to_first_token_seconds_count", ""): 3,
        ("topspin_inter_token_latency_seconds_count", ""): 2,
        ("topspin_e2e_request_latency_seconds_count", ""): 3,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_metrics_without_an_engine_say_so_and_keep_their_own() -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        pending = asyncio.create_task(client.post(PLAIN, json=PLAIN_BODY))
        await fake.request_came.wait()
        fake.say(PeerLost("closed"))
        assert (await pending).status_code == 503
        found = samples((await client.get("/metrics")).text)
    assert found["topspin_engine_up", ""] == 0
    assert ("topspin_num_requests_running", "") not in found
    assert found["topspin_request_success_total", "finished_reason=error"] == 1


@pytest.mark.parametrize("given", [{}, {"model": None}])
async def test_no_request_has_to_name_the_model(given: dict[str, None]) -> None:
    messages = {"messages": [USER]}
    bodies: dict[str, dict[str, object]] = {
        **dict.fromkeys((CHAT, "/v1/messages/count_tokens", "/tokenize"), messages),
        PLAIN: {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {**messages, "max_tokens": 9},
        "/detokenize": {"tokens": [1]},
    }
    async with gateway(FakeEngine(saying("ok"))) as client:
        for path, body in bodies.items():
            answer = await client.post(path, json={**body, **given})
            assert answer.status_code == 200, answer.text
            assert answer.json().get("model", MODEL_NAME) == MODEL_NAME
            wrong = await client.post(path, json={**body, "model": "other"})
            assert wrong.status_code == 404, path
