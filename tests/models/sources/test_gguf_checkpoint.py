"""Checkpoints in GGUF files: transformers' numbers and tokens, and what is refused, by name."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.mtp_weights import load_mtp_weights
from models.description.config import load_model_config
from models.quantised.precision import checkpoint_rules
from models.sources.hub import resolve_model
from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import effective_tokenizer
from tests.checkpoints import make_checkpoint, oracle_model
from tests.gguf_files import LATENTS, write_gguf
from tests.models.plain_model import plain_logits
from tests.models.text.test_rank_file import TEXTS
from tests.mtp_heads import add_head
from tests.pairwise import few
from tests.weights import load_attention_weights, load_expert_weights
from topspin.errors import CheckpointError, ConfigError
from topspin.plan.precision import format_of

PROMPT = [5, 17, 200, 33, 8, 120, 64, 91, 2, 77]
MODELS: dict[str, Mapping[str, Any]] = {
    **LATENTS,
    "llama_gqa_rope_linear": {},
    "llama3_rope": {},
    "llama_yarn": {},
    "llama_bias": {},
    "glm4_moe": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "minimax_m2": {},
    "mixtral": {"intermediate_size": 64},
    "olmoe_clip_qkv": {"norm_topk_prob": False, "intermediate_size": 64, "attention_bias": False},
    "qwen2_moe": {"mlp_only_layers": [], "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path / "cache"))


def made(
    tmp_path: Path,
    variant: str,
    kind: Kind = Kind.F32,
    *,
    sizes: Mapping[str, Any] = MappingProxyType({}),
    splits_heads: bool = True,
    **fields: Any,
) -> tuple[Path, Path]:
    """Return transformers' checkpoint, and the GGUF file of the same numbers."""
    plain = make_checkpoint(tmp_path / "plain", variant, **{**MODELS.get(variant, {}), **sizes})
    file = tmp_path / "tiny.gguf"
    return plain, write_gguf(plain, file, kind, splits_heads=splits_heads, **fields)


def logits_of(path: Path) -> torch.Tensor:
    config = load_model_config(path)
    of_layers = [range(0 if config.moe is None else config.moe.num_experts)] * len(
        config.moe_layers
    )
    with Checkpoint(path) as checkpoint:
        attention = load_attention_weights(checkpoint, config, dtype=torch.float32)
        experts = load_expert_weights(
            checkpoint, config, dtype=torch.float32, experts=[list(each) for each in of_layers]
        )
    return plain_logits(config, attention, experts, PROMPT)


def check_numbers(plain: Path, path: Path, *, tolerance: float = 2e-4) -> None:
    """Assert that the model at `path` has the logits of transformers' checkpoint."""
    with torch.no_grad():
        expected = oracle_model(plain)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(path), expected, atol=tolerance, rtol=tolerance)


BY_DEFAULT = ("gpt_oss-MXFP4", "deepseek_v3-Q4_0", "llama_yarn-F32", "qwen3_moe-Q8_0")


def kinds() -> Iterator[Any]:
    found: list[tuple[str, Kind]] = [
        *itertools.product(MODELS, (Kind.F32, Kind.Q4_0)),
        ("gpt_oss", Kind.MXFP4),
    ]
    found += [("qwen3_moe", kind) for kind in (Kind.F16, Kind.BF16, Kind.Q8_0)]
    for variant, kind in found:
        name = f"{variant}-{kind.name}"
        yield pytest.param(
            variant, kind, id=name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]
        )


@pytest.mark.parametrize(("variant", "kind"), list(kinds()))
def test_the_numbers_are_transformers(tmp_path: Path, variant: str, kind: Kind) -> None:
    plain, file = made(tmp_path, variant, kind)
    check_numbers(plain, resolve_model(str(file)))


@pytest.mark.parametrize(
    "kind", few([Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], Kind.Q6_K), ids=lambda kind: kind.name
)
def test_numbers_of_large_blocks_are_transformers(tmp_path: Path, kind: Kind) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    plain, file = made(tmp_path, "mixtral", kind, sizes=sizes, mixed={"v_proj": Kind.Q6_K})
    path = resolve_model(str(file))
    check_numbers(plain, path, tolerance=1e-3)
    on_cpu = {
        rule.part: rule.format for rule in checkpoint_rules(path, load_model_config(path))["cpu"]
    }
    small = "int4" if kind == Kind.Q4_K else "int8"
    # Where a part has matrices of two kinds, it has the larger format.
    assert on_cpu == {"attention": "int8", "experts": small, "lm_head": small}


def test_a_tied_head_keeps_the_codes_of_the_embedding(tmp_path: Path) -> None:
    """Half of the bytes of a small model's step are its head's."""
    _, file = made(tmp_path, "qwen3_moe", Kind.Q8_0)
    path = resolve_model(str(file))
    config = load_model_config(path)
    rules = checkpoint_rules(path, config)["cpu"]
    assert format_of(rules, "lm_head") == "int8"
    with Checkpoint(path) as checkpoint:
        served = load_attention_weights(checkpoint, config, dtype=torch.float32, precision=rules)
        exact = load_attention_weights(checkpoint, config, dtype=torch.float32)
    assert not isinstance(served.lm_head, torch.Tensor)
    assert torch.equal(served.lm_head.dequantised(), served.embed)
    assert exact.lm_head is exact.embed


def test_matrices_per_head_may_be_in_large_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 256}
    plain, file = made(tmp_path, "deepseek_v3", Kind.Q4_K, sizes=sizes)
    check_numbers(plain, resolve_model(str(file)), tolerance=1e-3)


def test_older_files_of_latents_have_one_matrix_and_say_less(tmp_path: Path) -> None:
    sizes = {
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
    }
    unsaid = dict.fromkeys(
        (
            *("expert_gating_func", "expert_group_count", "expert_group_used_count"),
            *("expert_weights_norm", "expert_weights_scale", "leading_dense_block_count"),
        )
    )
    plain, file = made(tmp_path, "deepseek_v3", sizes=sizes, splits_heads=False, **unsaid)
    check_numbers(plain, resolve_model(str(file)))


def test_matrices_are_bit_for_bit_those_of_the_library(tmp_path: Path) -> None:
    plain, file = made(tmp_path, "qwen3_moe", Kind.Q4_0)
    path = resolve_model(str(file))
    expected = load_file(plain / "model.safetensors")
    config = load_model_config(path)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.names == expected.keys()
        experts = [[3], [0, 5]]
        weights = load_expert_weights(checkpoint, config, dtype=torch.float32, experts=experts)
        # An expert node reads its experts' tensors and no other.
        layer, own = "model.layers.{}.mlp.experts.{}.{}_proj.weight", ("gate", "up", "down")
        assert checkpoint.tensors_read == {
            layer.format(idx, expert, part)
            for idx, of_layer in enumerate(experts)
            for expert in of_layer
            for part in own
        }
    gate, up = (expected[layer.format(1, 5, part)] for part in ("gate", "up"))
    assert torch.equal(weights.layers[1].gate_up[1], torch.cat((gate, up)))


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
def test_heads_of_multi_token_prediction_are_layers_behind_the_others(
    tmp_path: Path, variant: str
) -> None:
    plain = add_head(make_checkpoint(tmp_path / "plain", variant, **MODELS[variant]))
    path = resolve_model(str(write_gguf(plain, tmp_path / "tiny.gguf", Kind.Q8_0)))
    config = load_model_config(path)
    assert (config.num_layers, config.num_mtp_layers) == (3, 1)
    expected = load_file(plain / "model.safetensors")
    per_head = {each for each in expected if "kv_b_proj" in each}
    split = {name.replace("kv_b", part) for name in per_head for part in ("k_b", "v_b")}
    with Checkpoint(path) as checkpoint:
        assert checkpoint.names == (expected.keys() - per_head) | split
        head = load_mtp_weights(checkpoint, config.of_mtp(), dtype=torch.float32)
    joined = expected[f"model.layers.{config.num_layers}.eh_proj.weight"]
    assert torch.equal(head.join, joined)


def test_a_file_is_made_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    _, file = made(tmp_path, "llama")
    path = resolve_model(str(file))
    assert path.name == "tiny"
    with Checkpoint(path) as checkpoint:
        before = checkpoint.fingerprint()
    marker = path / "config.json"
    state = marker.stat().st_ino
    assert resolve_model(str(file.parent / "." / file.name)) == path
    assert marker.stat().st_ino == state
    other = make_checkpoint(tmp_path / "other", "llama", seed=1, max_position_embeddings=512)
    write_gguf(other, file)
    with pytest.raises(CheckpointError, match="is not the file any more"):
        Checkpoint(path)
    assert resolve_model(str(file)) == path
    assert load_model_config(path).max_position_embeddings == 512
    with Checkpoint(path) as checkpoint:
        assert checkpoint.fingerprint() != before


def test_where_the_cache_cannot_be_written_the_home_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, which only read what is at TOPSPIN_CACHE."""
    _, file = made(tmp_path, "llama")
    for name, value in (("TOPSPIN_CACHE", file), ("HOME", tmp_path / "home")):
        monkeypatch.setenv(name, str(value))
    path = resolve_model(str(file))
    assert tmp_path / "home" in path.parents
    assert resolve_model(str(file)) == path
    monkeypatch.setenv("HOME", str(file))
    with pytest.raises(ConfigError, match="cannot be written"):
        resolve_model(str(file))


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    plain, file = made(tmp_path, "llama")
    inside = file.rename(folder / "only.gguf")
    assert resolve_model(str(folder)) == resolve_model(str(inside))
    (folder / "second.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several GGUF files; name one of only.gguf, second"):
        resolve_model(str(folder))
    (plain / "model.gguf").write_bytes(b"")
    assert resolve_model(str(plain)) == plain


def test_tokens_template_and_ends_are_the_checkpoints(tmp_path: Path) -> None:
    plain, file = made(tmp_path, "llama")
    path = resolve_model(str(file))
    texts = ("the other anthem in <|user|> 12\n\n  end\u00e9\u4e2d", "", "<|bos|>the")
    own, expected = Tokenizer.from_directory(path), Tokenizer.from_directory(plain)
    for text in texts:
        ids = expected.encode(text, add_special_tokens=False)
        assert own.encode(text, add_special_tokens=False) == ids
        assert own.decode(ids, skip_special_tokens=True) == expected.decode(
            ids, skip_special_tokens=True
        )
    assert (own.bos_token_id, own.eos_token_id) == (256, 257)
    assert load_model_config(path).eos_token_ids == (257,)
    chat = [{"role": "user", "content": "hi"}]
    templates = [ChatTemplate.find(each) for each in (path, plain)]
    shown = [each and each.render(chat, add_generation_prompt=True) for each in templates]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("pre", "known"),
    [
        ("llama-bpe", "llama-bpe"),
        ("qwen2", "qwen2"),
        ("gpt-4o", "gpt-4o"),
        # As llama.cpp, for transformers does not know them.
        ("glm4", "llama-bpe"),
        ("minimax-m2", "gpt-4o"),
    ],
)
def test_text_is_cut_as_transformers_cuts_it(tmp_path: Path, pre: str, known: str) -> None:
    _, file = made(tmp_path, "llama", pre=known)
    loader = importlib.import_module("transformers").AutoTokenizer
    wanted = loader.from_pretrained(tmp_path, gguf_file=file.name).backend_tokenizer
    _, file = made(tmp_path, "llama", pre=pre)
    found = effective_tokenizer(resolve_model(str(file)))
    for text in TEXTS:
        cut = found.pre_tokenizer.pre_tokenize_str(text)
        assert cut == wanted.pre_tokenizer.pre_tokenize_str(text)
        if found.normalizer is None or found.normalizer.normalize_str(text) == text:
            assert found.encode(text, add_special_tokens=False).ids == (
                wanted.encode(text, add_special_tokens=False).ids
            )


# By the patterns of DeepSeek's tokenizer.json, one after the other.
CUTS = {
    "deepseek-llm": (
        "Don|'|t| | stop|,|\r|\n|X|2|0|2|4|:| |1|\u00bd| stra|\u00df|e|_|1| #|tag| |\u10d0\u10d1| |"
        "\u6a21\u578b|\uff01| |\u0e01| |1|2|  "
    ),
    "deepseek-v3": (
        "Don|'t| | stop|,\r\n|X|202|4|:| |1\u00bd| stra\u00dfe|_|1| #|tag| \u10d0\u10d1| |"
        "\u6a21\u578b|\uff01| \u0e01| |12|  "
    ),
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_deepseeks_tokenizers_cut_it(tmp_path: Path, pre: str) -> None:
    _, file = made(tmp_path, "llama", pre=pre)
    cutter = effective_tokenizer(resolve_model(str(file))).pre_tokenizer
    text = CUTS[pre].replace("|", "")
    found = [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]
    assert "|".join(found) == CUTS[pre]


@pytest.mark.parametrize(("pre", "joins"), [("glm4", True), ("deepseek-v3", False)])
def test_words_that_are_tokens_need_no_merges(tmp_path: Path, pre: str, *, joins: bool) -> None:
    _, file = made(tmp_path, "llama", pre=pre)
    assert effective_tokenizer(resolve_model(str(file))).model.ignore_merges is joins


@pytest.mark.parametrize(
    ("pre", "fields", "around"),
    [
        ("llama-bpe", {}, ([256], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("qwen2", {}, ([], [])),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ([256], [257])),
    ],
)
def test_tokens_around_a_text(
    tmp_path: Path, pre: str, fields: dict[str, bool], around: tuple[list[int], list[int]]
) -> None:
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    _, file = made(tmp_path, "llama", pre=pre, **named)
    own = Tokenizer.from_directory(resolve_model(str(file)))
    inner = own.encode("the 12", add_special_tokens=False)
    assert own.encode("the 12", add_special_tokens=True) == around[0] + inner + around[1]


def test_unused_tokens_are_no_text_and_turns_have_ends_of_their_own(tmp_path: Path) -> None:
    _, file = made(tmp_path, "llama", **{"tokenizer.ggml.eot_token_id": 258})
    path = resolve_model(str(file))
    assert load_model_config(path).eos_token_ids == (257, 258)
    own = Tokenizer.from_directory(path)
    unused = load_model_config(path).vocab_size - 1
    assert (
        own.decode([own.encode("a", add_special_tokens=False)[0], unused], skip_special_tokens=True)
        == "a"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention.head_count_kv": None}, None),
        ({"block_count": None}, r"llama: has no block_count"),
        ({"attention.sliding_window": 8}, r"attention.sliding_window = 8: .* not read"),
        ({"rope.scaling.type": "longrope"}, r"rope.scaling.type = 'longrope'.*linear, yarn"),
        ({"rope.dimension_count": 8}, r"rope.dimension_count = 8: supported: 16"),
        ({"split.count": 2}, r"split.count"),
        (
            {"pre": "command-r"},
            r"tokenizer.ggml.pre = 'command-r': supported: deepseek-llm, deepseek-v3, glm4",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str | None
) -> None:
    _, file = made(tmp_path, "llama", **fields)
    if message is None:
        assert load_model_config(resolve_model(str(file))).num_kv_heads == 4
        return
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention.kv_lora_rank": None}, r"attention.kv_lora_rank is missing"),
        ({"attention.value_length": 16}, r"attention.value_length = 16: supported: 32"),
        ({"expert_gating_func": 1}, r"expert_gating_func = 1: supported: 2"),
        ({"attention.temperature_scale": 0.1}, r"attention.temperature_scale = 0.1: .* not read"),
    ],
)
def test_fields_of_latents_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    _, file = made(tmp_path, "deepseek_v3", **fields)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(file))


def bare(path: Path, architecture: str, tensors: dict[str, tuple[Any, Kind]]) -> Path:
    """Write a file with some tensors and no more metadata than an architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, None, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "name", "kind", "message"),
    [
        (
            "gemma3",
            "token_embd.weight",
            Kind.F32,
            r"'gemma3': supported: deepseek2, glm4moe, gpt-oss",
        ),
        ("llama", "blk.0.attn_q.weight", Kind.TQ1_0, r"blk.0.attn_q.weight is TQ1_0; .*F32.*Q8_0"),
        ("llama", "blk.0.attn_qkv.weight", Kind.F32, r"blk.0.attn_qkv.weight is not one of"),
        ("llama", "blk.0.attn_q_norm.weight", Kind.F32, r"blk.0.attn_q_norm.weight is not one of"),
    ],
)
def test_tensors_and_architectures_are_refused_by_name(
    tmp_path: Path, architecture: str, name: str, kind: Kind, message: str
) -> None:
    data = gguf.quants.quantize(np.ones((4, 256), np.float32), kind)
    file = bare(tmp_path / "bad.gguf", architecture, {name: (data, kind)})
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(file))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    _, file = made(tmp_path, "llama")
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ConfigError, match=r"tiny.gguf: is not a GGUF file, or is truncated"):
        resolve_model(str(file))
    file.write_text("no model at all")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        resolve_model(str(file))
