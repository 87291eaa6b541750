"""The configuration: defaults that resolve, limits that are refused by name, JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernels import dispatch
from topspin.config import (
    QUANTIZATIONS,
    BalanceSection,
    CacheSection,
    ComputeSection,
    EngineConfig,
    GatewaySection,
    M2NSection,
    ModelSection,
    SchedulerSection,
    TopologySection,
    load_config,
)
from topspin.errors import ConfigError, TopspinError
from topspin.resolve import resolve

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "topology": TopologySection,
    "scheduler": SchedulerSection,
    "cache": CacheSection,
    "m2n": M2NSection,
    "compute": ComputeSection,
    "balance": BalanceSection,
    "gateway": GatewaySection,
}


def resolved(
    config: EngineConfig,
    *,
    dtype: str = "bfloat16",
    positions: int = 2048,
    num_experts: int = 1024,
) -> EngineConfig:
    return resolve(
        config,
        checkpoint_dtype=dtype,
        max_position_embeddings=positions,
        num_experts=num_experts,
    )


def with_setting(setting: str, value: Any) -> EngineConfig:
    """Return a config in which one `section.field` differs from the defaults."""
    section, field = setting.split(".")
    if section == "model":
        return EngineConfig(model=ModelSection(path="/models/tiny", **{field: value}))
    changed: dict[str, Any] = {section: SECTIONS[section](**{field: value})}
    return EngineConfig(model=ModelSection(path="/models/tiny"), **changed)


def test_every_auto_becomes_concrete() -> None:
    config = resolved(EngineConfig(model=ModelSection(path="/models/tiny")))
    assert config.model.dtype == "bfloat16"
    assert config.max_model_len == 2048
    assert config.model.served_names == ("tiny",)
    assert config.m2n.transport == "shm"


@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")],
)
def test_auto_dtype_follows_the_checkpoint(checkpoint: str, dtype: str) -> None:
    config = resolved(EngineConfig(model=ModelSection(path="x")), dtype=checkpoint)
    assert config.model.dtype == dtype


def test_what_is_chosen_stays() -> None:
    model = ModelSection(path="x", served_names=("a", "b"), dtype="float32", max_model_len=100)
    config = resolved(EngineConfig(model=model, m2n=M2NSection(transport="tcp")))
    assert config.model == model
    assert config.m2n.transport == "tcp"
    assert resolved(config) == config


@pytest.mark.parametrize(
    ("setting", "value", "option"),
    [
        ("topology.attention_nodes", 0, "--attention-nodes 0"),
        ("topology.attention_nodes", 1025, "--attention-nodes 1025"),
        ("topology.expert_nodes", 0, "--expert-nodes 0"),
        ("scheduler.max_num_seqs", 0, "--max-num-seqs 0"),
        ("scheduler.max_num_batched_tokens", 0, "--max-num-batched-tokens 0"),
        ("scheduler.max_num_batched_tokens", 63, "--max-num-batched-tokens 63"),
        ("scheduler.max_queued_requests", -1, "--max-queued-requests -1"),
        ("scheduler.max_preemptions", -1, "--max-preemptions -1"),
        ("scheduler.micro_batches", 0, "--micro-batches 0"),
        ("scheduler.micro_batches", 5, "--micro-batches 5"),
        ("cache.block_size", 0, "--block-size 0"),
        ("cache.kv_cache_bytes", 0, "--kv-cache-memory 0"),
        ("m2n.window_rows", 0, "--m2n-window-rows 0"),
        ("m2n.link_latency_us", -0.5, "--link-latency-us -0.5"),
        ("m2n.link_gbps", 0.0, "--link-gbps 0.0"),
        ("m2n.link_gbps", math.nan, "--link-gbps nan"),
        ("m2n.link_latency_us", math.inf, "--link-latency-us inf"),
        ("m2n.deadline_s", math.inf, "--step-deadline inf"),
        ("m2n.deadline_s", 0.0, "--step-deadline 0.0"),
        ("compute.num_threads", 0, "--num-threads 0"),
        ("compute.spin_count", -1, "--omp-spin-count -1"),
        ("balance.redundant_experts", -1, "--redundant-experts -1"),
        ("balance.redundant_experts", 1, "--redundant-experts 1: 1 expert nodes hold 0 second"),
        ("balance.interval_s", -1.0, "--expert-balance-interval -1.0"),
        ("balance.min_gain", -0.5, "--expert-balance-min-gain -0.5"),
        ("balance.half_life_pairs", 0, "--expert-load-half-life 0"),
        ("m2n.window_rows", 65536, "--m2n-window-rows 65536"),
        ("gateway.port", 65536, "--port 65536"),
        ("gateway.port", -1, "--port -1"),
        ("model.max_model_len", 0, "--max-model-len 0"),
        ("model.max_model_len", 2049, "--max-model-len 2049: the model has positions up to 2048"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(setting: str, value: Any, option: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(with_setting(setting, value))
    assert str(raised.value).startswith(option)
    assert isinstance(raised.value, TopspinError)
    assert isinstance(raised.value, ValueError)


def test_there_are_no_more_expert_nodes_than_experts() -> None:
    resolved(with_setting("topology.expert_nodes", 8), num_experts=8)
    with pytest.raises(ConfigError, match="--expert-nodes 9: the model has 8 experts per layer"):
        resolved(with_setting("topology.expert_nodes", 9), num_experts=8)


def test_expert_nodes_for_a_dense_model_are_refused() -> None:
    config = with_setting("topology.expert_nodes", 2)
    with pytest.raises(ConfigError, match="--expert-nodes 2: a dense model"):
        resolved(config, num_experts=0)


def test_a_dense_model_has_no_expert_nodes() -> None:
    config = resolved(with_setting("topology.expert_nodes", 1), num_experts=0)
    assert config.topology == TopologySection(attention_nodes=1, expert_nodes=0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("topology.expert_nodes", 1024),
        ("scheduler.micro_batches", 1),
        ("scheduler.micro_batches", 4),
        ("scheduler.max_queued_requests", 0),
        ("scheduler.max_num_batched_tokens", 64),
        ("m2n.link_gbps", 0.1),
        ("gateway.port", 0),
        ("model.max_model_len", 2048),
    ],
)
def test_the_limits_themselves_are_allowed(setting: str, value: Any) -> None:
    resolved(with_setting(setting, value))


def test_copies_never_need_an_expert_twice_on_a_node() -> None:
    def config(redundant: int) -> EngineConfig:
        return EngineConfig(
            model=ModelSection(path="x"),
            topology=TopologySection(expert_nodes=3),
            balance=BalanceSection(redundant_experts=redundant),
        )

    assert resolved(config(16), num_experts=8).balance.redundant_experts == 16
    with pytest.raises(ConfigError, match="--redundant-experts 17: 3 expert nodes hold 16"):
        resolved(config(17), num_experts=8)


def test_deterministic_chooses_its_kernels() -> None:
    config = resolved(with_setting("compute.deterministic", True))
    assert config.compute.kernels == "deterministic"
    assert resolved(config) == config
    assert resolved(EngineConfig(model=ModelSection(path="x"))).compute.kernels == "cpu"


def test_kernels_that_cannot_be_deterministic_are_refused() -> None:
    def config(kernels: str, *, deterministic: bool) -> EngineConfig:
        compute = ComputeSection(kernels=kernels, deterministic=deterministic)
        return EngineConfig(model=ModelSection(path="x"), compute=compute)

    with pytest.raises(ConfigError, match="--deterministic with --kernels reference"):
        resolved(config("reference", deterministic=True))
    with pytest.raises(ConfigError, match=r"--kernels deterministic: .*use --deterministic"):
        resolved(config("deterministic", deterministic=False))


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (ComputeSection(deterministic=True), "--deterministic"),
        (ComputeSection(kernels="reference"), "--kernels reference"),
    ],
)
def test_quantization_is_refused_where_no_kernel_knows_it(
    compute: ComputeSection, named: str
) -> None:
    model = ModelSection(path="m", quantization="int4")
    assert resolved(EngineConfig(model=model)).model.quantization == "int4"
    with pytest.raises(ConfigError, match=f"--quantization int4 with {named} on att"):
        resolved(EngineConfig(model=model, compute=compute))


def test_each_roles_kernels_must_know_the_quantization() -> None:
    model = ModelSection(path="m", quantization="fp8")
    gpu, hybrid = "cuda:0", ComputeSection(attention_device="cuda")
    both = ComputeSection(attention_device=gpu, expert_device=gpu)
    assert resolved(EngineConfig(model=model, compute=both)).model.quantization == "fp8"
    message = "--quantization fp8 with --kernels cpu on expert nodes: only the kernels triton"
    with pytest.raises(ConfigError, match=message):
        resolved(EngineConfig(model=model, compute=hybrid))
    int8 = ModelSection(path="m", quantization="int8")
    assert resolved(EngineConfig(model=int8, compute=hybrid)).model.quantization == "int8"


def test_quantizations_are_those_of_the_kernels() -> None:
    assert {k: set(v) for k, v in QUANTIZATIONS.items()} == {
        k: set(v) for k, v in dispatch.QUANTIZATIONS.items()
    }


def test_nobody_changes_a_section() -> None:
    config = EngineConfig(model=ModelSection(path="x"))
    with pytest.raises(AttributeError):
        config.gateway.port = 1  # type: ignore[misc]


def test_nodes_receive_their_part_only() -> None:
    config = resolved(with_setting("scheduler.max_num_seqs", 7))
    node = config.for_node()
    assert (node.max_num_seqs, node.max_num_batched_tokens) == (7, 512)
    for section in ("model", "topology", "cache", "m2n", "compute"):
        assert getattr(node, section) == getattr(config, section)
    assert resolved(with_setting("scheduler.micro_batches", 3)).for_node().micro_batches == 3
    assert not hasattr(node, "gateway")


def test_every_node_receives_its_own_device_and_kernels() -> None:
    config = resolved(
        EngineConfig(
            model=ModelSection(path="x"),
            topology=TopologySection(attention_nodes=2, expert_nodes=2),
            compute=ComputeSection(attention_device="cuda", expert_device="cuda:03"),
        )
    )
    assert config.m2n.transport == "shm"  # two expert processes on one GPU had better not wait
    attention = config.for_node("attention", 1).compute
    assert attention.place("attention") == ("cuda:1", "triton")
    for index in range(2):
        assert config.for_node("expert", index).compute.place("expert") == ("cuda:3", "triton")


def test_a_dense_models_quantization_is_the_attention_nodes_alone() -> None:
    config = EngineConfig(
        model=ModelSection(path="x", quantization="fp8"),
        compute=ComputeSection(attention_device="cuda"),
    )
    assert resolved(config, num_experts=0).model.quantization == "fp8"
    with pytest.raises(ConfigError, match=r"--quantization fp8 .* on expert nodes"):
        resolved(config)


@pytest.mark.parametrize(("asked", "want"), [(None, 2), (3, 3)])
def test_two_streams_have_two_micro_batches_unless_told(asked: int | None, want: int) -> None:
    compute = ComputeSection(attention_device="cuda", expert_device="cuda", gpu_streams=2)
    scheduler = SchedulerSection(micro_batches=asked)
    config = EngineConfig(model=ModelSection(path="x"), compute=compute, scheduler=scheduler)
    assert resolved(config).scheduler.micro_batches == want


def test_expert_nodes_may_have_other_kernels() -> None:
    compute = ComputeSection(kernels="triton", expert_kernels="cpu")
    config = resolved(EngineConfig(model=ModelSection(path="x"), compute=compute))
    assert config.nodes.attention.is_device
    assert not config.nodes.experts.is_device
    expert = config.for_node("expert").compute
    assert expert.kernels_on(expert.expert_device) == expert.place("expert").kernels == "cpu"
    assert config.for_node("attention").compute.kernels == "triton"


def test_plain_torch_on_a_gpu_is_not_recorded() -> None:
    compute = ComputeSection(kernels="reference", attention_device="cuda")
    config = resolved(EngineConfig(model=ModelSection(path="x"), compute=compute))
    assert not config.compute.cuda_graphs


def test_json_round_trip(tmp_path: Path) -> None:
    config = resolved(with_setting("m2n.link_gbps", 25.0))
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(config))
    assert load_config(str(file)) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "truncated"),
        (b'{"model": {"path": "x", "colour": 1}}', "colour"),
        (b'{"model": {"path": "x"}, "m2n": {"transport": "carrier pigeon"}}', "carrier pigeon"),
        (b'{"model": {"path": 3}}', "path"),
        (b"{}", "model"),
        (b"\xff\xfe", "malformed"),
        (b'{"model": {"path": "\xff"}}', "utf-8"),
    ],
)
def test_a_damaged_config_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--config {file}: .*{reason}"):
        load_config(str(file))


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(str(tmp_path / "none.json"))
