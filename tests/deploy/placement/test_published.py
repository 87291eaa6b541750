"""Models of hundreds of billions of weights, by the config.json that is published, without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

from app.cli.main import main
from attention_nodes.step import kv_cache
from deploy.placement.command import plan_texts, read_inputs
from deploy.placement.devices import save_profile
from deploy.placement.memory import attention_weight_bytes, expert_weight_bytes
from deploy.placement.search.precision import Precisions
from deploy.placement.search.search import search
from deploy.placement.shapes import Kernels, ModelShape, precision_by
from deploy.services.memory import MARGIN, PROCESS_BYTES
from models.description.config import load_model_config
from models.description.facts import facts_of
from tests.deploy.placement import samples
from topspin.plan.file import read_plan
from topspin.plan.kv_cache import BlockNeeds, kv_groups
from topspin.plan.precision import Format, PrecisionRule
from topspin.plan.spec import EnginePlan

MODELS = Path(__file__).parent / "models"
# As published, in billions, some with the layer of multi-token prediction.
BILLIONS = {
    "gpt-oss-120b": 117,
    "glm-4.6": 357,
    "minimax-m2": 230,
    "deepseek-v3": 685,
    "kimi-k2": 1026,
}
KERNELS: tuple[Kernels, ...] = ("cpu", "triton")
WORKLOAD = {"prompt": {"mean": 3000, "p95": 9000}, "output": {"mean": 300}, "users": 4}


def shape_of(name: str, **options: Any) -> ModelShape:
    return ModelShape.from_config(load_model_config(MODELS / name), **options)


def weight_bytes(shape: ModelShape, kernels: Kernels = "triton", **formats: Format) -> int:
    """Return the bytes of all weights, with formats by part."""
    parts: Any = formats
    precision = precision_by(
        [PrecisionRule(format=each, part=part) for part, each in parts.items()]
    )
    own = attention_weight_bytes(shape, precision, kernels=kernels)
    return own + expert_weight_bytes(shape, precision, held=shape.num_experts, kernels=kernels)


@pytest.mark.parametrize("name", BILLIONS)
def test_weights_are_those_of_transformers_and_as_many_as_published(name: str) -> None:
    # transformers knows Kimi-K2 as DeepSeek-V3.
    of_name = DeepseekV3Config if name == "kimi-k2" else AutoConfig
    config = of_name.from_pretrained(MODELS / name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(name)
    found = weight_bytes(shape) / shape.itemsize
    assert found == pytest.approx(sum(each.numel() for each in model.parameters()), rel=1e-3)
    last = shape.moe_layers[-1]
    parts = shape.numbers("attention", last) + shape.num_experts * shape.numbers("experts", last)
    found += load_model_config(MODELS / name).num_mtp_layers * parts
    assert found == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)


def test_cpus_have_matrices_that_expand_latents_besides() -> None:
    """Of 128 heads, of 192 numbers each, of a key and of a value, made of 512."""
    shape = shape_of("deepseek-v3")
    besides = 61 * 2 * 128 * 192 * 512 * 2
    precision = precision_by([])
    on_cpu, on_gpu = (
        attention_weight_bytes(shape, precision, kernels=kernels, with_ends=False)
        for kernels in KERNELS
    )
    assert on_cpu - on_gpu == besides == 61 * shape.expanding_bytes
    assert shape_of("glm-4.6").expanding_bytes == 0


def test_quantised_weights_have_their_bits() -> None:
    """Of the format that serves them: int8 on CPUs has 9 bits, fp8 a scale for 128 x 128."""
    oss, m2 = shape_of("gpt-oss-120b"), shape_of("minimax-m2")
    experts = 36 * 128 * 3 * 2880 * 2880
    biases = 36 * 128 * 3 * 2880 * 4
    spared = weight_bytes(oss, "cpu") - weight_bytes(oss, "cpu", experts="int8")
    assert spared == experts * 2 - experts * 9 // 8
    assert weight_bytes(oss) == pytest.approx(2 * 116.83e9 + biases / 2, rel=1e-4)
    coded = 62 * (256 * 3 * 3072 * 1536 + 3072 * (48 + 2 * 8) * 128 + 3072 * 48 * 128)
    spared = weight_bytes(m2) - weight_bytes(m2, attention="fp8", experts="fp8")
    assert spared == coded * 2 - coded - coded * 4 // 128**2


@pytest.mark.parametrize(
    ("name", "parts", "expert_bytes"),
    [
        # 4.25 bits a number, and biases in fp32.
        (
            "gpt-oss-120b",
            {"experts": "mxfp4"},
            36 * 128 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 4),
        ),
        pytest.param("glm-4.6", {}, 89 * 160 * 3 * 5120 * 1536 * 2, marks=pytest.mark.slow),
        pytest.param(
            "minimax-m2",
            {"attention": "int8", "experts": "int8"},
            62 * 256 * 3 * 3072 * 1536 * 9 // 8,
            marks=pytest.mark.slow,
        ),
        (
            "deepseek-v3",
            {"attention": "int8", "mlp": "int8", "experts": "int8"},
            58 * 256 * 3 * 7168 * 2048 * 9 // 8,
        ),
        pytest.param(
            "kimi-k2",
            {"attention": "int8", "mlp": "int8", "experts": "int8"},
            60 * 384 * 3 * 7168 * 2048 * 9 // 8,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plans_memory_and_manifests_are_made_without_weights(
    name: str, parts: dict[str, Format], expert_bytes: int, tmp_path: Path
) -> None:
    plan = planned(name, tmp_path)
    assert plan.precision == tuple(
        PrecisionRule(format=each, part=part) for part, each in parts.items()
    )
    check_cache(name, plan)
    file, out = tmp_path / "plan.yaml", tmp_path / "manifests"
    file.write_text(file.read_text().replace(str(MODELS), "/topspin/models"))
    asked = ["--plan", str(file), "-o", str(out), "--model", str(MODELS / name)]
    assert main(["deploy", "render", *asked]) == 0
    found = re.findall(r"memory: (\d+)Mi", (out / "base" / "nodes.yaml").read_text())
    of_attention = sum(each.kv_cache_bytes or 0 for each in plan.attention)
    shape = shape_of(name)
    whole = weight_bytes(shape, "cpu", **parts)
    of_attention += len(plan.attention) * (whole - expert_bytes)
    assert len(found) == len(plan.nodes)
    beside = sum(PROCESS_BYTES[node.role] for node in plan.nodes)
    taken = (sum(map(int, found)) * 2**20 - beside) / MARGIN
    assert taken == pytest.approx(expert_bytes + of_attention, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "formats"),
    [
        ("attention on 1 gpu, experts on 1 gpu", ("fp8", "fp8")),
        ("attention on 1 old, experts on 1 gpu", ("int8", "int8")),
        ("attention on 1 gpu, experts on 1 old", ("fp8", "int8")),
    ],
)
def test_a_checkpoint_in_fp8_is_planned_in_formats_that_devices_have(
    layout: str, formats: tuple[Format, Format]
) -> None:
    """Experts in those of attention nodes too, which may hold some."""
    old = msgspec.structs.replace(samples.gpu("old"), formats=("none", "int8", "int4"))
    host = samples.host((samples.gpu(), 2), (old, 1))
    model = load_model_config(MODELS / "minimax-m2")
    rater = samples.inputs([host], ModelShape.from_config(model)).rater()
    found = Precisions(rater, None, facts_of(model).precision)
    named = found.of(samples.layout_named(host, layout, num_experts=256))
    assert [each.rules() for each in named] == [
        tuple(
            PrecisionRule(format=own, part=part)
            for part, own in zip(("attention", "experts"), formats, strict=True)
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "per_host"), [("deepseek-v3", 4), ("kimi-k2", 4), ("qwen3-235b-a22b", 2)]
)
def test_a_model_that_fits_no_host_is_planned_over_several(
    name: str, per_host: int, tmp_path: Path
) -> None:
    """From its config.json alone, on hosts of a few GPUs of 141 GB."""
    model = str(MODELS / name)
    asked = {each: WORKLOAD[each] for each in ("prompt", "output")} | {
        "arrival_rate": 1,
        "targets": {"ttft_s": 5, "tpot_s": 0.1},
    }
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(asked))
    links = [{"transport": "cuda_ipc", "alpha_us": 5, "gbps": 3000}]
    devices = [{"device": "h200", "count": per_host, "price_per_hour": 3.5}]
    cluster = {
        "hosts": [{"name": "h200", "count": 8, "devices": devices, "links": links}],
        "between_hosts": {"transport": "nixl", "alpha_us": 12, "gbps": 400 * per_host},
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    inputs, facts = read_inputs(tmp_path / "cluster.yaml", model, tmp_path / "workload.yaml")
    texts = plan_texts(inputs, search(inputs), model=model, facts=facts)
    (tmp_path / "plan.yaml").write_text(texts[0])
    plan = read_plan(str(tmp_path / "plan.yaml"))
    assert sum(node.experts for node in plan.experts) == inputs.model.num_experts
    assert plan.network is not None
    assert {node.host for node in plan.attention}.isdisjoint(node.host for node in plan.experts)
    formats = {rule.format for rule in plan.precision if rule.part == "experts"}
    assert formats == (set() if name == "qwen3-235b-a22b" else {"fp8"})


def planned(name: str, place: Path) -> EnginePlan:
    """Return the plan that `topspin plan` writes for a large host without GPUs."""
    save_profile(samples.cpu(cores=8, memory_gib=1500), place / "device.json")
    links = [{"transport": "shm", "alpha_us": 10, "gbps": 100}]
    devices = [{"device": "device.json"}]
    cluster = {"hosts": [{"name": "box", "devices": devices, "links": links}]}
    (place / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (place / "workload.yaml").write_text(yaml.safe_dump(WORKLOAD))
    model = str(MODELS / name)
    inputs, facts = read_inputs(place / "cluster.yaml", model, place / "workload.yaml")
    (text,) = plan_texts(inputs, search(inputs), model=model, facts=facts)
    (place / "plan.yaml").write_text(text)
    return read_plan(str(place / "plan.yaml"))


def check_cache(name: str, plan: EnginePlan) -> None:
    """Check that an attention node's cache holds the longest sequence, as the node counts."""
    model, longest = load_model_config(MODELS / name), plan.model.max_model_len
    specs = kv_cache.layer_specs(model, torch.bfloat16, plan.kv_cache, max_len=longest)
    block = plan.kv_cache.block_size
    windows = [each.sliding_window for each in model.layers]
    for node in plan.attention:
        groups = kv_groups(windows, plan.kv_cache, max_len=longest)
        needs = BlockNeeds(
            groups.windows, block_size=block, max_step_tokens=node.max_num_batched_tokens
        )
        assert node.kv_cache_bytes is not None
        blocks = node.kv_cache_bytes // kv_cache.bytes_per_block(specs, block_size=block)
        assert needs.columns_within(blocks, 10**6) * block >= longest
