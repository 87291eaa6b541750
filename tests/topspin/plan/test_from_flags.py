"""Settings become a plan: what tests/app/cli/print_plan.txt, of flags only, does not reach."""

from __future__ import annotations

from typing import Any

import pytest

from tests.topspin.plans import DENSE, FACTS, plan
from topspin.errors import ConfigError, TopspinError
from topspin.plan.flags import FLAGS, GATEWAY
from topspin.plan.setting import AUTO
from topspin.plan.settings import BalancePolicy, TraceSection
from topspin.plan.spec import EnginePlan, LinkSpec
from topspin.plan.speculation import OFF, Speculation


def test_settings_without_a_flag_are_in_the_plan() -> None:
    balance, trace = BalancePolicy(interval_s=7.0), TraceSection(enabled=False)
    made = plan(
        block_size=32,
        transport="tcp",
        payload="int8",
        wait="spin",
        window_rows=70,
        latency_us=5.0,
        gbps=25.0,
        deadline_s=9.0,
        spin_count=11,
        max_preemptions=2,
        balance=balance,
        trace=trace,
        halt_deadline_s=3.0,
    )
    assert made.kv_cache.block_size == 32
    assert {node.wait for node in made.nodes} == {"spin"}
    assert made.link == LinkSpec(
        transport="tcp", payload="int8", window_rows=70, latency_us=5.0, gbps=25.0, deadline_s=9.0
    )
    assert (made.execution.spin_count, made.scheduling.max_preemptions) == (11, 2)
    assert (made.balance, made.trace, made.failover.halt_deadline_s) == (balance, trace, 3.0)


def test_nothing_stays_auto() -> None:
    """What is auto, None or left out is the same; a made plan's own values make it again."""
    unset = {field.name: field.unset for field in FLAGS if field.group != GATEWAY}
    made = plan(speculation=AUTO)
    assert plan(**dict.fromkeys(unset)) == plan(**unset) == made
    told = plan(
        dtype=made.model.dtype,
        max_model_len=made.model.max_model_len,
        transport=made.link.transport,
        payload=made.link.payload,
        kv_cache_bytes=made.attention[0].kv_cache_bytes,
        layout="shared",
    )
    assert told == plan()


def test_few_sequences_on_cpus_have_drafts_by_default() -> None:
    suffix = Speculation(method="suffix", disable_by_batch_size=4)
    assert plan(speculation=AUTO).speculation == suffix
    assert plan(speculation=AUTO, attention_device="cuda").speculation is None
    assert plan(speculation=AUTO, kv_retrieval_tokens=512).speculation is None
    assert plan(speculation=OFF).speculation is None


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "payload"),
    [
        ("float32", "float32", "fp32"),
        ("bfloat16", "bfloat16", "bf16"),
        ("float16", "bfloat16", "bf16"),
    ],
)
def test_auto_dtype_follows_the_checkpoint(checkpoint: str, dtype: str, payload: str) -> None:
    made = plan(FACTS._replace(dtype=checkpoint))
    assert (made.model.dtype, made.link.payload) == (dtype, payload)


def test_prefixes_are_not_shared_where_keys_depend_on_the_length() -> None:
    assert not plan(FACTS._replace(shares_prefixes=False)).scheduling.prefix_caching


def test_roles_have_kernels_of_their_own_and_plain_torch_on_a_gpu_is_not_recorded() -> None:
    other = plan(kernels="triton", expert_kernels="cpu")
    assert [node.kernels for node in other.nodes] == ["triton", "cpu"]
    assert not plan(kernels="reference", attention_device="cuda").execution.recordings
    assert plan(kernels="reference").execution.recordings


def test_micro_batches_within_a_gpu_are_one_unless_told() -> None:
    both: dict[str, Any] = {"attention_device": "cuda", "expert_device": "cuda"}
    assert plan(**both).scheduling.micro_batches == 1
    assert plan(**both, micro_batches=3).scheduling.micro_batches == 3


def test_a_draft_node_has_room_for_the_longest_text() -> None:
    speculation = Speculation(method="draft_model", model="m")
    made = plan(draft_nodes=1, speculation=speculation, max_num_seqs=1)
    assert made.drafts[0].kv_cache_tokens == 2048


@pytest.mark.parametrize(
    "asked",
    [
        {"expert_nodes": 8},
        {"expert_nodes": 3, "redundant_experts": 16},
        {"max_num_batched_tokens": 64, "micro_batches": 4},
        {"max_model_len": 2048},
    ],
)
def test_the_limits_themselves_are_allowed(asked: dict[str, Any]) -> None:
    plan(**asked)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"window_rows": 65536}, "window_rows 65536: must be between 1 and 65535"),
        ({"deadline_s": 0.0}, "deadline_s 0: must be above 0"),
        ({"latency_us": float("inf")}, "latency_us inf: must be between 0"),
        ({"gbps": float("nan")}, "gbps nan: must be above 0"),
        ({"transport": "udp"}, "--transport udp: Invalid enum value"),
        ({"deterministic": True, "kernels": "reference"}, "attention 0: kernels reference with"),
        ({"kernels": "deterministic"}, "attention 0: kernels deterministic with execution.determ"),
        ({"kernels": "cpu", "attention_device": "cuda"}, "attention 0: device cuda:0, kernels cpu"),
        (
            {"kernels": "reference", "quantization": "int4"},
            "--quantization int4: precision[0] {format: int4}: the kernels reference of the att",
        ),
    ],
)
def test_what_no_flag_can_ask_for_is_refused_too(asked: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(**asked)
    assert str(raised.value).startswith(refusal)
    assert isinstance(raised.value, TopspinError)


def test_a_setting_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="no settings: colour"):
        plan(colour=1)


def test_a_dense_model_has_no_expert_nodes() -> None:
    made: EnginePlan = plan(DENSE, attention_nodes=2, expert_nodes=1)
    assert [node.role for node in made.nodes] == ["attention", "attention"]
