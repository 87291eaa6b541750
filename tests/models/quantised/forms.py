"""Tiny checkpoints of every family in every quantised form, and the same dequantised.

compressed-tensors itself compresses and decompresses its forms, dequantises fp8 blocks
(FP8BlockDequantizer) and converts AWQ's layout (AutoAWQConverter) and ModelOpt's
(ModelOptNvfp4Converter), transformers dequantises mxfp4. GPTQ's is packed here by its published
layout; test_layouts.py compares reading with matrices that AutoGPTQ, GPTQModel and AutoAWQ packed.
Shared by the tests of this folder, which load the dequantised checkpoint with transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import (
    FP8BlockDequantizer,
)
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints import make_checkpoint

# Whole words and groups, as the libraries ask for.
SIZES: dict[str, dict[str, Any]] = {
    "llama_bias": {"head_dim": 32},
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {},
    "olmoe": {"intermediate_size": 64},
    "glm4_moe": {},
    # A tied head has larger logits in these checkpoints, and so larger divergences.
    "ernie4_5_moe": {"head_dim": 32, "tie_word_embeddings": False},
    "minimax_m2": {"intermediate_size": 64, "head_dim": 32},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16},
}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Packed(NamedTuple):
    """The tensors of a quantised module by their last names, and the matrix they stand for."""

    tensors: dict[str, Tensor]
    matrix: Tensor


class Form(NamedTuple):
    """A form: its quantization_config, and the quantisation of one matrix [O, I].

    `within` is a part of the names of the projections that it quantises.
    """

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    within: str = ""

    def covers(self, name: str) -> bool:
        """Return whether a tensor is a matrix that is quantised."""
        ends = ("proj.weight", "proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")
        return self.within in name and name.endswith(ends)


def make_quantised(path: Path, variant: str, form: Form, *, seed: int = 0, **sizes: Any) -> None:
    """Write `variant` quantised to `path`/coded and dequantised to `path`/plain, both in fp32."""
    plain, coded = path / "plain", path / "coded"
    make_checkpoint(plain, variant, seed=seed, **{**SIZES[variant], **sizes})
    shutil.copytree(plain, coded)
    tensors = load_file(plain / "model.safetensors")
    written: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if not form.covers(name):
            written[name] = tensor
            continue
        packed = form.pack(tensor)
        tensors[name] = packed.matrix.float().contiguous()
        module = name.removesuffix(".weight")
        written |= {f"{module}.{own}": each for own, each in packed.tensors.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(
        {name: tensor.contiguous() for name, tensor in written.items()},
        coded / "model.safetensors",
        metadata={"format": "pt"},
    )
    set_quantisation(coded, form.config)


def make_mxfp4(path: Path, **sizes: Any) -> None:
    """Write gpt-oss with random experts in mxfp4 to `path`/coded, dequantised to `path`/plain."""
    plain, coded = path / "plain", path / "coded"
    make_checkpoint(plain, "gpt_oss", **sizes)
    shutil.copytree(plain, coded)
    generator = torch.Generator().manual_seed(4)
    numbers = load_file(plain / "model.safetensors")
    written = dict(numbers)
    for name in [name for name in numbers if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = numbers[name].shape
        size = (num_experts, num_out, num_in // 32, 16)
        blocks = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
        scales = torch.randint(121, 124, size[:-1], generator=generator).to(torch.uint8)
        del written[name]
        written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(written, coded / "model.safetensors", {"format": "pt"})
    set_quantisation(coded, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def set_quantisation(path: Path, config: dict[str, Any] | None) -> None:
    """Write `config` into the config.json of a checkpoint."""
    file = path / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["quantization_config"] = config
    file.write_text(json.dumps(raw), encoding="utf-8")


def compressed(kind: str, *, activations: dict[str, Any] | None = None, **weights: Any) -> Form:
    """Return a form of compressed-tensors: `kind` is its format, `weights` its arguments."""
    args = QuantizationArgs(**weights)
    rows = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=rows)
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    return Form(config, lambda matrix: _compress(matrix, kind, args, scheme))


def _compress(
    matrix: Tensor, kind: str, args: QuantizationArgs, scheme: QuantizationScheme
) -> Packed:
    low, high = _ranges(matrix, args)
    scale, zero = calculate_qparams(low, high, args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
    tensors = compressor.compress(state, scheme)
    return Packed(tensors, compressor.decompress(dict(tensors), scheme)["weight"])


def _ranges(matrix: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the least and greatest numbers that share a scale, in the scales' shape."""
    num_out, num_in = matrix.shape
    if args.strategy == "tensor":
        return matrix.min().view(1), matrix.max().view(1)
    if args.strategy == "channel":
        return matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
    if args.strategy in ("group", "tensor_group"):
        groups = matrix.view(num_out, -1, args.group_size)
        return groups.amin(-1), groups.amax(-1)
    height, width = args.block_structure
    padded = torch.nn.functional.pad(matrix, (0, -num_in % width, 0, -num_out % height))
    blocks = padded.view(-(-num_out // height), height, -1, width)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def fp8_blocks(size: int = 128, *, powers: torch.dtype | None = None) -> Form:
    """Return fp8 in blocks, as DeepSeek-V3 and Qwen3 are published.

    `powers`: scales are powers of two in this dtype, fp32 in DeepSeek-V3.1, exponents alone later.
    """
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [size, size],
        "modules_to_not_convert": ["lm_head"],
    }
    if powers is not None:
        config["scale_fmt"] = "ue8m0"

    def pack(matrix: Tensor) -> Packed:
        args = QuantizationArgs(
            num_bits=8, type="float", strategy="block", block_structure=[size, size]
        )
        low, high = _ranges(matrix, args)
        scales = torch.maximum(high.abs(), low.abs()) / 448.0
        if powers is not None:
            scales = scales.log2().ceil().exp2()
        wide = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
        wide = wide[: matrix.shape[0], : matrix.shape[1]]
        tensors = {
            "weight": (matrix / wide).to(torch.float8_e4m3fn),
            "weight_scale_inv": scales,
        }
        own = FP8BlockDequantizer(weight_block_size=(size, size), dtype=torch.float32)
        found = own.process({f"a.{name}": tensor for name, tensor in tensors.items()})
        tensors["weight_scale_inv"] = scales.to(powers or scales.dtype)
        return Packed(tensors, found["a.weight"])

    return Form(config, pack)


def nvfp4() -> Form:
    """Return compressed-tensors' nvfp4."""
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    config = compressed("nvfp4-pack-quantized").config
    groups = {"group_0": json.loads(scheme.model_dump_json())}

    def pack(matrix: Tensor) -> Packed:
        args = scheme.weights
        whole = generate_gparam(matrix.min(), matrix.max())
        low, high = _ranges(matrix, args)
        scale, _ = calculate_qparams(low, high, args, global_scale=whole)
        state = {"weight": matrix, "weight_scale": scale, "weight_global_scale": whole}
        compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        tensors = compressor.compress(state, scheme)
        beside = {"input_global_scale": torch.ones(1)}
        return Packed({**tensors, **beside}, _nvfp4_numbers(tensors))

    return Form({**config, "config_groups": groups}, pack)


def _nvfp4_numbers(tensors: dict[str, Tensor]) -> Tensor:
    """Return the numbers of compressed-tensors' tensors, in fp32 (its compressor has bf16)."""
    rows, num_bytes = tensors["weight_packed"].shape
    return dequantize(
        unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * num_bytes, torch.float32),
        tensors["weight_scale"].float(),
        args=NVFP4["weights"],
        dtype=torch.float32,
        global_scale=tensors["weight_global_scale"],
    )


def modelopt_nvfp4() -> Form:
    """Return ModelOpt's nvfp4, dequantised through compressed-tensors."""

    def pack(matrix: Tensor) -> Packed:
        own = nvfp4().pack(matrix).tensors
        tensors = {
            "weight": own["weight_packed"],
            "weight_scale": own["weight_scale"],
            "weight_scale_2": 1 / own["weight_global_scale"][0],
            "input_scale": torch.tensor(1.0),
        }
        converter = ModelOptNvfp4Converter(targets=["re:.*"])
        found = converter.process({f"a.{name}": each for name, each in tensors.items()})
        return Packed(
            tensors,
            _nvfp4_numbers({name.removeprefix("a."): each for name, each in found.items()}),
        )

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return Form({**config, "ignore": ["lm_head", "*.gate"]}, pack)


def modelopt_fp8() -> Form:
    """Return ModelOpt's fp8, with a scale per matrix."""

    def pack(matrix: Tensor) -> Packed:
        scale = matrix.abs().max() / 448.0
        codes = (matrix / scale).to(torch.float8_e4m3fn)
        beside = {"weight_scale": scale, "input_scale": torch.tensor(1.0)}
        return Packed({"weight": codes, **beside}, codes.float() * scale)

    return Form({**modelopt_nvfp4().config, "quant_algo": "FP8"}, pack)


def gptq(
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool = False,
    version: str = "gptq",
    desc_act: bool = False,
) -> Form:
    """Return GPTQ's form; with `desc_act` the inputs of a group are spread."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": is_symmetric,
        "desc_act": desc_act,
        "checkpoint_format": version,
    }

    def pack(matrix: Tensor) -> Packed:
        num_in = matrix.shape[1]
        size = num_in if group_size == -1 else group_size
        order = torch.arange(num_in) // size
        if desc_act:
            order = order[torch.randperm(num_in, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros = _codes(matrix, order, bits, is_symmetric=is_symmetric)
        stored = zeros if version == "gptq_v2" else (zeros - 1) & ((1 << bits) - 1)
        tensors = {
            "qweight": words(codes, bits).t(),
            "qzeros": words(stored.t(), bits),
            "scales": scales.t().half(),
            "g_idx": order.int(),
        }
        matrix = (codes - zeros[:, order]) * scales[:, order]
        return Packed(tensors, matrix)

    return Form(config, pack)


def awq(group_size: int, *, has_zeros: bool = True) -> Form:
    """Return AWQ's form, dequantised through compressed-tensors."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": has_zeros,
        "modules_to_not_convert": ["gate"],
    }

    def pack(matrix: Tensor) -> Packed:
        order = torch.arange(matrix.shape[1]) // group_size
        codes, scales, zeros = _codes(matrix, order, 4, is_symmetric=not has_zeros)
        tensors = {
            "qweight": words(_interleaved(codes.t()), 4),
            "scales": scales.t().half(),
        }
        if has_zeros:
            tensors["qzeros"] = words(_interleaved(zeros.t()), 4)
        own = AutoAWQConverter(group_size=group_size, zero_point=has_zeros)
        found = own.process({f"a.{name}": each.clone() for name, each in tensors.items()})
        found["a.weight_scale"] = found["a.weight_scale"].float()
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(
                num_bits=4, symmetric=not has_zeros, strategy="group", group_size=group_size
            ),
        )
        local = {name.removeprefix("a."): each for name, each in found.items()}
        own_compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        return Packed(tensors, own_compressor.decompress(local, scheme)["weight"])

    return Form(config, pack)


def _codes(
    matrix: Tensor, order: Tensor, bits: int, *, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [O, I], and scales (exact in fp16) and zeros [O, groups]."""
    most, num_groups = (1 << bits) - 1, int(order.max()) + 1
    columns = [matrix[:, order == group] for group in range(num_groups)]
    low = torch.stack([each.amin(1).clamp(max=0.0) for each in columns], dim=1)
    high = torch.stack([each.amax(1).clamp(min=0.0) for each in columns], dim=1)
    if is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp(min=1e-6).half().float()
    middle = torch.full_like(low, (most + 1) // 2)
    zeros = (middle if is_symmetric else (-low / scales).round().clamp(0, most)).int()
    codes = (matrix / scales[:, order]).round() + zeros[:, order]
    return codes.clamp(0, most).int(), scales, zeros


def words(codes: Tensor, bits: int) -> Tensor:
    """Return codes [n, m] packed along m in int32 words, the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.long().view(len(codes), -1, per_word) << (bits * torch.arange(per_word))
    total = parts.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def _interleaved(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[..., _AWQ_ORDER].flatten(1)


INT8_ROWS = {"num_bits": 8, "strategy": "token", "dynamic": True}
FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FORMS: dict[str, Form] = {
    "fp8-blocks": fp8_blocks(32),
    "fp8-ue8m0": fp8_blocks(32, powers=torch.float8_e8m0fnu),
    "nvfp4": nvfp4(),
    "modelopt-nvfp4": modelopt_nvfp4(),
    "modelopt-fp8": modelopt_fp8(),
    "ct-int4-groups": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-int4-zeros": compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "ct-int8-channels": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "ct-w8a8": compressed("int-quantized", activations=INT8_ROWS, strategy="channel"),
    "ct-w8-zeros": compressed(
        "int-quantized", activations=INT8_ROWS, strategy="channel", symmetric=False
    ),
    "ct-fp8-tensors": compressed(
        "float-quantized", activations=FP8_ROWS, type="float", strategy="tensor"
    ),
    "ct-fp8-channels": compressed(
        "float-quantized", activations=FP8_ROWS, type="float", strategy="channel"
    ),
    "ct-fp8-blocks": compressed(
        "float-quantized",
        activations=FP8_ROWS,
        type="float",
        strategy="block",
        block_structure=[32, 32],
    ),
    "gptq-4": gptq(4, 32),
    "gptq-4-sym-channel": gptq(4, -1, is_symmetric=True),
    "gptq-8-v2": gptq(8, 32, version="gptq_v2"),
    "gptq-4-desc-act": gptq(4, 32, is_symmetric=True, desc_act=True),
    "awq": awq(32),
    "awq-no-zeros": awq(32, has_zeros=False),
}
FAMILIES = tuple(SIZES)
_INT4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
ROUTED_ONLY = Form(
    _INT4.config
    | {
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ]
    },
    _INT4.pack,
    within=".experts.",
)
"""As Kimi-K2-Thinking is published: routed experts in 4 bits, and nothing else."""
