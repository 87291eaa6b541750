"""The configuration: defaults that resolve, values refused by name, JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kernels import dispatch
from topspin.config import (
    QUANTIZATIONS,
    BalanceSection,
    CacheSection,
    ComputeSection,
    EngineConfig,
    FailoverSection,
    GatewaySection,
    Kernels,
    M2NSection,
    ModelSection,
    SchedulerSection,
    TopologySection,
    TraceSection,
    load_config,
)
from topspin.cores import LayoutChoice
from topspin.errors import ConfigError, TopspinError
from topspin.resolve import resolve
from topspin.settings import fields_of

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "topology": TopologySection,
    "scheduler": SchedulerSection,
    "cache": CacheSection,
    "m2n": M2NSection,
    "compute": ComputeSection,
    "balance": BalanceSection,
    "trace": TraceSection,
    "failover": FailoverSection,
    "gateway": GatewaySection,
}


def resolved(
    config: EngineConfig,
    *,
    dtype: str = "bfloat16",
    positions: int = 2048,
    num_experts: int = 1024,
    measured: LayoutChoice | None = None,
) -> EngineConfig:
    return resolve(
        config,
        checkpoint_dtype=dtype,
        max_position_embeddings=positions,
        num_experts=num_experts,
        measured=measured,
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
    assert config.m2n == M2NSection(transport="shm", payload="bf16", wait="block", window_rows=512)
    assert (config.compute.layout, config.compute.kernels) == ("shared", "cpu")
    assert config.batch == (64, 512)
    assert config.scheduler.prefix_caching
    assert resolved(config) == config


def test_prefixes_are_not_shared_where_keys_depend_on_the_length() -> None:
    config = resolve(
        EngineConfig(model=ModelSection(path="x")),
        checkpoint_dtype="float32",
        max_position_embeddings=9,
        num_experts=2,
        shares_prefixes=False,
    )
    assert not config.scheduler.prefix_caching
    assert config.m2n.payload == "fp32"


def test_a_measured_layout_is_what_auto_means() -> None:
    choice = LayoutChoice("split", "tcp", 3)
    asked = EngineConfig(model=ModelSection(path="x"))
    config = resolved(asked, measured=choice)
    assert (config.compute.layout, config.compute.num_threads) == ("split", 3)
    assert (config.m2n.transport, config.m2n.wait) == ("tcp", "spin")
    compute = ComputeSection(layout="shared", num_threads=2)
    told = resolved(msgspec.structs.replace(asked, compute=compute), measured=choice)
    assert (told.compute.layout, told.compute.num_threads) == ("shared", 2)


def test_a_gpu_runs_larger_batches_in_larger_windows() -> None:
    compute = ComputeSection(attention_device="cuda:0", expert_device="cuda:1")
    config = resolved(EngineConfig(model=ModelSection(path="x"), compute=compute))
    assert (config.batch, config.m2n.window_rows) == ((256, 8192), 2048)
    assert config.cache.kv_cache_bytes is None
    told = msgspec.structs.replace(config, m2n=M2NSection(window_rows=70))
    assert resolved(told).m2n.window_rows == 70


def test_auto_dtype_follows_the_checkpoint() -> None:
    cases: list[tuple[str, str]] = [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "bfloat16"),
    ]
    for checkpoint, dtype in cases:
        config = resolved(EngineConfig(model=ModelSection(path="x")), dtype=checkpoint)
        assert config.model.dtype == dtype


def test_what_is_chosen_stays() -> None:
    model = ModelSection(path="x", served_names=("a", "b"), dtype="float32", max_model_len=100)
    config = resolved(EngineConfig(model=model, m2n=M2NSection(transport="tcp")))
    assert config.model == model
    assert config.m2n.transport == "tcp"
    assert resolved(config) == config


def test_a_value_out_of_range_is_refused_by_its_name() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("topology.attention_nodes", 0, "--attention-nodes 0: must be between 1 and 1024"),
        ("scheduler.max_num_batched_tokens", 63, "--max-num-batched-tokens 63 is less than"),
        ("m2n.window_rows", 65536, "m2n.window_rows 65536: must be between 1 and 65535"),
        ("m2n.link_latency_us", -0.5, "m2n.link_latency_us -0.5: must be a finite number and at"),
        ("m2n.link_latency_us", math.inf, "m2n.link_latency_us inf"),
        ("m2n.link_gbps", math.nan, "m2n.link_gbps nan"),
        ("m2n.deadline_s", 0.0, "m2n.deadline_s 0: must be a finite number and above 0"),
        ("cache.gpu_memory_utilization", 1.5, "--gpu-memory-utilization 1.5: must be a finite"),
        ("balance.redundant_experts", 1, "--redundant-experts 1: 1 expert nodes hold 0 second"),
        ("model.max_model_len", 2049, "--max-model-len 2049: the model has positions up to 2048"),
    ]
    for setting, value, refusal in cases:
        with pytest.raises(ConfigError) as raised:
            resolved(with_setting(setting, value))
        assert str(raised.value).startswith(refusal)
        assert isinstance(raised.value, TopspinError)
        assert isinstance(raised.value, ValueError)


def test_every_number_has_a_range() -> None:
    for field in fields_of(EngineConfig):
        if {int, float} & {field.type, *get_args(field.type)}:
            low, high = field.setting.within
            bound = field.setting.above if low is None else low
            assert bound is not None, field.key
            with pytest.raises(ConfigError, match=f"^{field.shown_name} "):
                resolved(with_setting(field.key, type(field.default or 1)(bound - 1)))
            if high is not None:
                with pytest.raises(ConfigError, match=f"^{field.shown_name} "):
                    resolved(with_setting(field.key, type(field.default or 1)(high + 1)))


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


def test_the_limits_themselves_are_allowed() -> None:
    cases: list[tuple[str, Any]] = [
        ("topology.expert_nodes", 1024),
        ("scheduler.micro_batches", 1),
        ("scheduler.micro_batches", 4),
        ("scheduler.max_queued_requests", 0),
        ("scheduler.max_num_batched_tokens", 64),
        ("m2n.link_gbps", 0.1),
        ("gateway.port", 0),
        ("model.max_model_len", 2048),
    ]
    for setting, value in cases:
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
    def config(kernels: Kernels, *, deterministic: bool) -> EngineConfig:
        compute = ComputeSection(kernels=kernels, deterministic=deterministic)
        return EngineConfig(model=ModelSection(path="x"), compute=compute)

    with pytest.raises(ConfigError, match=r"--deterministic with compute\.kernels reference"):
        resolved(config("reference", deterministic=True))
    with pytest.raises(ConfigError, match=r"compute\.kernels deterministic: .*use --deterministic"):
        resolved(config("deterministic", deterministic=False))


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (ComputeSection(deterministic=True), "--deterministic"),
        (ComputeSection(kernels="reference"), r"compute\.kernels reference"),
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
    message = (
        r"--quantization fp8 with compute\.kernels cpu on expert nodes: only the kernels triton"
    )
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
    assert config.m2n.transport == "shm"  # kernels of two processes on one GPU should not wait
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


def test_two_streams_have_two_micro_batches_unless_told() -> None:
    cases: list[tuple[int | None, int]] = [(None, 2), (3, 3)]
    for asked, want in cases:
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
    assert expert.place("expert").kernels == "cpu"
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


def test_a_damaged_config_file_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[bytes, str]] = [
        (b"{", "truncated"),
        (b'{"model": {"path": "x", "colour": 1}}', "colour"),
        (b'{"model": {"path": "x"}, "m2n": {"transport": "carrier pigeon"}}', "carrier pigeon"),
        (b'{"model": {"path": 3}}', "path"),
        (b"{}", "model"),
        (b"\xff\xfe", "malformed"),
        (b'{"model": {"path": "\xff"}}', "utf-8"),
    ]
    for content, reason in cases:
        file = tmp_path / "config.json"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"--config {file}: .*{reason}"):
            load_config(str(file))


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(str(tmp_path / "none.json"))
