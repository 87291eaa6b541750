"""Matrices that GPTQ's and AWQ's own libraries packed are read as these libraries do.

packed.safetensors was written by AutoGPTQ 0.7.1 (qlinear_cuda), GPTQModel 7.7.0 (TorchLinear) and
AutoAWQ 0.2.9 (WQLinear_GEMM), each with the matrix [32, 64] that the library dequantised; scales
are such that its fp16 arithmetic is exact.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.coded import mxfp4_codes
from kernels.cpu.quantised import QuantisedOps, QuantisedWeight
from models.checkpoints.checkpoint import Checkpoint
from models.description.config_fields import ConfigFields
from models.quantised.config import parse_quantisation
from models.quantised.matrices import MatrixReader, Source
from tests.kernels.cases.quantised import dequantise
from tests.models.quantised.forms import FORMS, fp8_blocks
from topspin.errors import CheckpointError

PACKED = Path(__file__).with_name("packed.safetensors")
GPTQ = {"quant_method": "gptq", "desc_act": False}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("autogptq-4", {**GPTQ, "bits": 4, "group_size": 32}),
    ("autogptq-8", {**GPTQ, "bits": 8, "group_size": -1}),
    ("autogptq-4-desc-act", {**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}),
    ("gptqmodel-4-v2", {**V2, "bits": 4, "group_size": 32}),
    ("gptqmodel-8-v2-desc-act", {**V2, "bits": 8, "group_size": 32, "desc_act": True}),
    ("autoawq-4", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
]


def reader_of(
    path: Path, config: dict[str, Any], *, dtype: torch.dtype = torch.float32
) -> MatrixReader:
    (path / "config.json").write_text("{}", encoding="utf-8")
    quantisation = parse_quantisation(
        ConfigFields({"quantization_config": config}, source="config.json")
    )
    return MatrixReader(Checkpoint(path), quantisation, dtype=dtype)


@pytest.mark.parametrize(("name", "config"), CASES)
def test_the_librarys_matrix(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    shutil.copyfile(PACKED, tmp_path / "model.safetensors")
    reader = reader_of(tmp_path, config)
    wanted = load_file(PACKED)[f"{name}.matrix"].float()
    source = Source(f"{name}.proj.weight", 32)
    assert torch.equal(reader.read([source], 64), wanted)
    coded = reader.coded([source, source], 64)
    assert coded is not None
    assert torch.equal(coded.dequantised(), torch.cat((wanted, wanted)))


def test_the_first_pattern_that_matches_gives_dynamic_options(tmp_path: Path) -> None:
    shutil.copyfile(PACKED, tmp_path / "model.safetensors")
    own = {r"+:autogptq-8.*": {"bits": 8, "group_size": -1}, r"autogptq": {"bits": 8}}
    config = {**GPTQ, "bits": 4, "group_size": 32, "dynamic": {r"-:autogptq-4-d": {}, **own}}
    reader = reader_of(tmp_path, config)
    wanted = load_file(PACKED)["autogptq-8.matrix"].float()
    assert torch.equal(reader.read([Source("autogptq-8.proj.weight", 32)], 64), wanted)
    with pytest.raises(CheckpointError, match=r"desc-act.proj is quantised .* it is not"):
        reader.read([Source("autogptq-4-desc-act.proj.weight", 32)], 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_blocks_of_mxfp4(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every number exactly, with all steps; int8 on a CPU holds the numbers exactly too."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 96, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (3, 96, 2), generator=generator).to(torch.uint8)
    save_file({"a.up_blocks": blocks, "a.up_scales": scales}, tmp_path / "model.safetensors")
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    reader = reader_of(tmp_path, config, dtype=dtype)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert "a.up" in reader
    assert torch.equal(reader.read([Source("a.up", 96, 1)], 64), wanted[1])
    halves = [Source("a.up", 48, 2, start=start, step=2) for start in (0, 1)]
    in_turn = torch.cat((wanted[2, ::2], wanted[2, 1::2]))
    out = torch.zeros(96, 64, dtype=dtype)
    assert len(list(reader.pieces(halves, out, num_numbers=32 * 64))) == 6
    assert torch.equal(out, in_turn)
    coded = reader.coded(halves, 64)
    assert coded is not None
    assert torch.equal(coded.dequantised(), in_turn)
    packed = QuantisedOps().pack_linear(coded, "int8")
    assert isinstance(packed, QuantisedWeight)
    assert torch.equal(dequantise(packed), in_turn.float())
    with pytest.raises(CheckpointError, match=r"a.up_blocks has shape \[3, 96, 2, 16\]"):
        reader.read([Source("a.up", 96, 1)], 96)


@pytest.mark.parametrize("powers", [torch.float32, torch.float8_e8m0fnu])
def test_powers_of_two_as_scales_of_blocks(tmp_path: Path, powers: torch.dtype) -> None:
    form = fp8_blocks(32, powers=powers)
    packed = form.pack(torch.randn(70, 96))
    assert packed.tensors["weight_scale_inv"].dtype == powers
    tensors = {f"a.proj.{name}": each for name, each in packed.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = reader_of(tmp_path, form.config)
    assert torch.equal(reader.read([Source("a.proj.weight", 70)], 96), packed.matrix)


@pytest.mark.parametrize("form", ["nvfp4", "modelopt-nvfp4"])
def test_nvfp4_is_none_of_mxfp4s_numbers(tmp_path: Path, form: str) -> None:
    """Both have e2m1's codes; a single group of 16 inputs is no group of 32 with a power of two."""
    packed = FORMS[form].pack(torch.randn(32, 16))
    tensors = {f"a.proj.{name}": each for name, each in packed.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    coded = reader_of(tmp_path, FORMS[form].config).coded([Source("a.proj.weight", 32)], 16)
    assert coded is not None
    for found, wanted in zip(mxfp4_codes(coded), mxfp4_codes(coded.dequantised()), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_in_pieces_is_the_same(tmp_path: Path, form: str) -> None:
    matrix = torch.randn(192, 64, generator=torch.Generator().manual_seed(2))
    packed = FORMS[form].pack(matrix)
    tensors = {f"a.proj.{name}": each.contiguous() for name, each in packed.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = reader_of(tmp_path, FORMS[form].config)
    source = Source("a.proj.weight", 192)
    whole = reader.read([source], 64)
    torch.testing.assert_close(whole, packed.matrix.float(), rtol=1e-6, atol=1e-7)
    out = torch.zeros(192, 64)
    assert len(list(reader.pieces([source], out, num_numbers=64 * 64))) == 3
    assert torch.equal(out, whole)


@pytest.mark.parametrize("order", ["zeros", "reversed", "random"])
@pytest.mark.parametrize("says", [{"desc_act": False}, {}])
def test_gptq_without_desc_act_has_consecutive_groups(
    tmp_path: Path, says: dict[str, Any], order: str
) -> None:
    """Some writers leave g_idx at 0, and other servers do not read it then."""
    packed = FORMS["gptq-4"].pack(torch.randn(64, 128))
    g_idx = packed.tensors["g_idx"]
    orders = {"zeros": torch.zeros_like(g_idx), "reversed": g_idx.flip(0)}
    orders["random"] = torch.randint(0, 4, (128,), dtype=torch.int32)
    tensors = {f"a.proj.{name}": each.contiguous() for name, each in packed.tensors.items()}
    save_file(tensors | {"a.proj.g_idx": orders[order]}, tmp_path / "model.safetensors")
    config = {key: value for key, value in FORMS["gptq-4"].config.items() if key != "desc_act"}
    reader = reader_of(tmp_path, config | says)
    found = reader.read([Source("a.proj.weight", 64)], 128)
    torch.testing.assert_close(found, packed.matrix, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["ct-int4-zeros", "ct-int4-groups", "awq", "gptq-4", "gptq-8-v2"])
@pytest.mark.parametrize("num_out", [1, 5, 8, 9])
@pytest.mark.parametrize("num_in", [32, 96])
def test_matrices_of_few_outputs_and_groups(
    tmp_path: Path, form: str, num_out: int, num_in: int
) -> None:
    """A dimension of one is contiguous whatever its stride, which no other dtype can have.

    They are parts of larger matrices: the libraries themselves fail for such sizes.
    """
    is_transposed = form.startswith(("gptq", "awq"))
    num_out = num_out * 8 if is_transposed else num_out
    num_words = -(-num_out // 8) if form != "gptq-8-v2" else num_out // 4
    packed = FORMS[form].pack(torch.randn(96, num_in))
    rows = {"weight_zero_point": num_words}
    columns = {"qweight": num_words if form == "awq" else num_out, "qzeros": num_words}
    tensors = {
        f"a.proj.{name}": (
            each[:, : columns.get(name, num_out)].contiguous()
            if is_transposed
            else each[: rows.get(name, num_out)].contiguous()
        )
        for name, each in packed.tensors.items()
        if name not in ("g_idx", "weight_shape")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    reader, source = reader_of(tmp_path, FORMS[form].config), Source("a.proj.weight", num_out)
    found = reader.read([source], num_in)
    torch.testing.assert_close(found, packed.matrix[:num_out].float(), rtol=1e-6, atol=1e-7)
    coded = reader.coded([source], num_in)
    assert coded is not None
    assert torch.equal(coded.dequantised(), found)


@pytest.mark.parametrize(
    ("form", "name", "shape", "message"),
    [
        ("awq", "qzeros", (3, 8), r"qzeros has shape \[3, 8\].*needs \[2, 8\]"),
        ("gptq-4", "scales", (2, 32), r"scales has shape \[2, 32\].*needs \[2, 64\]"),
        ("gptq-4", "qweight", (4, 64), r"qweight has shape \[4, 64\].*needs \[8, 64\]"),
        ("ct-int4-zeros", "weight_zero_point", (9, 2), r"zero_point has shape \[9, 2\].*\[8, 2\]"),
        ("fp8-blocks", "weight_scale_inv", (2, 3), r"inv has shape \[2, 3\].*needs \[2, 2\]"),
        ("nvfp4", "weight_packed", (64, 16), r"packed has shape \[64, 16\].*needs \[64, 32\]"),
        ("nvfp4", "weight_scale", (64, 2), r"scale has shape \[64, 2\].*needs \[64, 4\]"),
        ("modelopt-nvfp4", "weight_scale_2", (2,), r"scale_2 has shape \[2\].*needs \[1\]"),
        ("modelopt-fp8", "weight_scale", (2,), r"scale has shape \[2, 1\].*needs \[64, 1\]"),
    ],
)
def test_tensors_of_another_size_are_named(
    tmp_path: Path, form: str, name: str, shape: tuple[int, ...], message: str
) -> None:
    packed = FORMS[form].pack(torch.randn(64, 64))
    tensors = {f"a.proj.{each}": tensor.contiguous() for each, tensor in packed.tensors.items()}
    tensors[f"a.proj.{name}"] = torch.zeros(shape, dtype=packed.tensors[name].dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        reader_of(tmp_path, FORMS[form].config).read([Source("a.proj.weight", 64)], 64)


@pytest.mark.parametrize(
    ("form", "scale", "message"),
    [
        ("ct-w8a8", "weight_scale", r"a\.proj\.weight_scale_inv or .* is missing"),
        ("nvfp4", "weight_global_scale", r"a\.proj\.weight_global_scale is missing"),
        ("modelopt-nvfp4", "weight_scale_2", r"a\.proj\.weight_scale_2 is missing"),
    ],
)
def test_a_missing_scale_is_named(tmp_path: Path, form: str, scale: str, message: str) -> None:
    packed = FORMS[form].pack(torch.randn(64, 64))
    tensors = {f"a.proj.{name}": t for name, t in packed.tensors.items() if name != scale}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        reader_of(tmp_path, FORMS[form].config).read([Source("a.proj.weight", 64)], 64)


@pytest.mark.parametrize(("form", "config"), [("nvfp4", "modelopt-fp8"), ("modelopt-nvfp4", "awq")])
def test_codes_of_another_layout_are_named(tmp_path: Path, form: str, config: str) -> None:
    packed = FORMS[form].pack(torch.randn(64, 64))
    tensors = {f"a.proj.{name}": each for name, each in packed.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.proj is quantised .* it is stored as"):
        reader_of(tmp_path, FORMS[config].config).read([Source("a.proj.weight", 64)], 64)
