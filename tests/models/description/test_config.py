"""models.description.config reads like transformers, and refuses what Topspin cannot serve."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.description.config import ModelConfig, load_model_config
from models.rope import inverse_frequencies
from tests.checkpoints import EOS_TOKEN_ID, VARIANTS, VOCAB_SIZE, make_checkpoint, oracle_model
from tests.models.quantised.forms import FORMS
from tests.pairwise import few
from tests.variants import DIFFERENT
from topspin.errors import ConfigError


def _rewrite(
    path: Path, file: str = "config.json", *, without: Sequence[str] = (), **changes: Any
) -> None:
    """Leave options out of a file, and set others."""
    raw = json.loads((path / file).read_text())
    kept = {name: value for name, value in raw.items() if name not in without}
    (path / file).write_text(json.dumps(kept | changes))


@pytest.mark.parametrize("variant", few(VARIANTS, *DIFFERENT))
def test_shapes_and_layers_equal_the_model_that_transformers_builds(
    tmp_path: Path, variant: str
) -> None:
    make_checkpoint(tmp_path, variant)
    config = load_model_config(tmp_path)
    model = oracle_model(tmp_path)
    attn = model.model.layers[0].self_attn
    assert config.family == model.config.model_type
    assert config.num_layers == len(model.model.layers)
    assert (config.vocab_size, config.hidden_size) == tuple(model.lm_head.weight.shape)
    inv_freq = inverse_frequencies(config.rope, config.rotated_dim, seq_len=1).inv_freq
    rotated, others = np.split(inv_freq, [len(model.model.rotary_emb.inv_freq)])
    np.testing.assert_allclose(rotated, model.model.rotary_emb.inv_freq.numpy(), rtol=2.5e-7)
    assert not others.any()
    if config.latent is None:
        assert config.head_dim == attn.head_dim
        assert config.q_size == attn.q_proj.out_features
        assert config.kv_size == attn.k_proj.out_features == attn.v_proj.out_features
        assert config.qkv_bias == (attn.q_proj.bias is not None)
    else:
        assert config.attention_scale == pytest.approx(attn.scaling)
        latent = config.latent
        rows = latent.num_head_weights(config.num_heads) // latent.rank
        assert (rows, latent.rank) == tuple(attn.kv_b_proj.weight.shape)
        assert config.cached_size == attn.kv_a_proj_with_mqa.out_features
        assert config.qkv_bias == (attn.kv_a_proj_with_mqa.bias is not None)
        assert latent.norm_eps == attn.kv_a_layernorm.variance_epsilon
    assert config.o_bias == (attn.o_proj.bias is not None)
    assert config.rms_norm_eps == model.model.norm.variance_epsilon
    assert config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert config.moe_layers == tuple(
        idx for idx, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")
    )
    assert config.eos_token_ids == (EOS_TOKEN_ID,)
    assert config.dtype == "float32"
    norm = getattr(attn, "q_norm", None)
    size = {"none": None, "head": config.head_dim, "full": config.q_size}[config.qk_norm]
    assert size == (None if norm is None else len(norm.weight))


def test_families_differ_as_their_variants_say(tmp_path: Path) -> None:
    def load(name: str) -> Any:
        return load_model_config(make_checkpoint(tmp_path / name, name))

    assert load("qwen2_moe").moe_layers == (0, 2, 3)
    stepped = load("qwen2_moe_sparse_step")
    assert stepped.moe_layers == (1, 3)
    assert [layer.sliding_window for layer in stepped.layers] == [8, None, 8, None]
    assert stepped.moe.router.renormalise
    assert stepped.moe.shared_intermediate_size == 40
    assert [layer.sliding_window for layer in load("mixtral_sliding_window").layers] == [8, 8]
    assert load("mixtral").moe.router.renormalise
    assert not load("qwen3_moe_unnormalised").moe.router.renormalise
    assert load("olmoe_clip_qkv").clip_qkv == 0.7
    assert load("olmoe").clip_qkv is None
    dense = load("llama")
    assert dense.moe is None
    assert dense.moe_layers == ()


def test_generation_config_decides_what_ends_a_generation(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").unlink()
    _rewrite(tmp_path, eos_token_id=[5, 6, 5])
    assert load_model_config(tmp_path).eos_token_ids == (EOS_TOKEN_ID,)
    _rewrite(tmp_path, "generation_config.json", eos_token_id=[7, 8, 7])
    assert load_model_config(tmp_path).eos_token_ids == (7, 8)
    _rewrite(tmp_path, "generation_config.json", eos_token_id=None)
    assert load_model_config(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").unlink()
    _rewrite(tmp_path, eos_token_id=None)
    assert load_model_config(tmp_path).eos_token_ids == ()


_CHATML = (
    "{% for message in messages %}<|user|>{{ message.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (_CHATML, True),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }} {{ eos_token }}{% endfor %}", True),
        # Not after the last message, which the model is to continue.
        (
            "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|eos|>{% endif %}"
            "{% endfor %}",
            True,
        ),
        ("{% for m in messages %}<|eos|>{{ m.role }}: {{ m.content }}\n{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}</end>{% endfor %}<|eos|>", False),
        ("{{ raise_exception('tools only') }}", False),
        ("{% for", False),
        (None, False),
    ],
)
def test_the_tokenizers_end_counts_where_the_template_writes_it(
    tmp_path: Path, template: str | None, ends: bool
) -> None:
    make_checkpoint(tmp_path, "llama")
    _rewrite(tmp_path, "generation_config.json", eos_token_id=[7, 8])
    _rewrite(tmp_path, "tokenizer_config.json", chat_template=template)
    config = load_model_config(tmp_path)
    assert config.eos_token_ids == ((7, 8, EOS_TOKEN_ID) if ends else (7, 8))
    said = [note for note in config.notes if "eos_token" in note]
    assert len(said) == ends
    # Also a token that only the other files add.
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    added = [each for each in backend["added_tokens"] if each["content"] != "<|eos|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**backend, "added_tokens": added}))
    assert load_model_config(tmp_path).eos_token_ids == config.eos_token_ids
    _rewrite(tmp_path, "generation_config.json", eos_token_id=EOS_TOKEN_ID)
    assert load_model_config(tmp_path).eos_token_ids == (EOS_TOKEN_ID,)
    assert not load_model_config(tmp_path).notes


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**6, -1])
def test_an_eos_id_outside_the_vocabulary_does_not_count(tmp_path: Path, token_id: int) -> None:
    make_checkpoint(tmp_path, "llama")
    last = VOCAB_SIZE - 1
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").unlink()
    _rewrite(tmp_path, "generation_config.json", eos_token_id=[last, token_id])
    config = load_model_config(tmp_path)
    assert config.eos_token_ids == (last,)
    assert len(config.notes) == 1
    assert f"[{last}, {token_id}]" in config.notes[0]
    _rewrite(tmp_path, "generation_config.json", eos_token_id=last)
    _rewrite(tmp_path, eos_token_id=token_id)
    assert load_model_config(tmp_path).eos_token_ids == (last,)  # the other is not used
    _rewrite(tmp_path, "generation_config.json", eos_token_id=None)
    with pytest.raises(ConfigError, match=rf"/config\.json: eos_token_id = {token_id}"):
        load_model_config(tmp_path)


def _read_fields(path: Path) -> ModelConfig:
    return dataclasses.replace(load_model_config(path), dtype="float32", notes=())


_FAMILIES = ("Llama", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "Ernie4_5_Moe")


@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True}])
@pytest.mark.parametrize("family", _FAMILIES)
def test_an_absent_option_has_transformers_default(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Every option of the family's class, one at a time and all together."""
    theirs = getattr(importlib.import_module("transformers"), f"{family}Config")(**changes)
    every = {**theirs.to_dict(), "sliding_window": getattr(theirs, "sliding_window", None) or None}
    if not hasattr(theirs, "layer_types"):
        every.pop("layer_types", None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(every))
    expected = _read_fields(tmp_path)
    assert expected.vocab_size == theirs.vocab_size
    assert expected.max_position_embeddings == theirs.max_position_embeddings
    assert expected.rms_norm_eps == theirs.rms_norm_eps
    assert expected.num_kv_heads == theirs.num_key_value_heads
    has_windows = "use_sliding_window" in changes and family.startswith("Qwen")
    assert any(layer.sliding_window == 4096 for layer in expected.layers) == has_windows
    for option in every.keys() - {"model_type", *changes}:
        rest = {name: value for name, value in every.items() if name != option}
        file.write_text(json.dumps(rest))
        assert _read_fields(tmp_path) == expected, option
    file.write_text(json.dumps({"model_type": theirs.model_type, **changes}))
    assert _read_fields(tmp_path) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_dtype_it_is_the_tensors(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path, "llama")
    _rewrite(tmp_path, without=("dtype", "torch_dtype"))
    file = tmp_path / "model.safetensors"
    kind = getattr(torch, dtype)
    save_file(
        {name: each.to(kind) for name, each in load_file(file).items()}, file, {"format": "pt"}
    )
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    assert auto.from_pretrained(tmp_path).dtype == kind
    assert load_model_config(tmp_path).dtype == dtype
    file.unlink()
    assert load_model_config(tmp_path).dtype == "float32"


@pytest.mark.parametrize(
    ("variant", "changes", "word"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window = 16"),
        ("olmoe", {"sliding_window": 16}, "sliding_window = 16"),
        ("qwen3_moe", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention"),
    ],
)
def test_what_is_ignored_is_noted(
    tmp_path: Path, variant: str, changes: dict[str, Any], word: str
) -> None:
    make_checkpoint(tmp_path, variant)
    expected = load_model_config(tmp_path)
    assert not expected.notes
    _rewrite(tmp_path, **changes)
    found = load_model_config(tmp_path)
    assert found == expected
    assert len(found.notes) == 1
    assert word in found.notes[0]


def test_qwen3_as_published_says_num_experts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    expected = load_model_config(tmp_path)
    assert expected.moe is not None
    _rewrite(tmp_path, without=["num_local_experts"], num_experts=expected.moe.num_experts)
    assert load_model_config(tmp_path) == expected
    _rewrite(tmp_path, num_local_experts=4)
    with pytest.raises(ConfigError, match="disagree"):
        load_model_config(tmp_path)


def test_a_transformers_4_config_of_qwen2_derives_its_windows(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2_moe_sparse_step")
    expected = load_model_config(tmp_path)
    _rewrite(tmp_path, without=["layer_types"])
    assert load_model_config(tmp_path) == expected


def test_rope_scaling_wins_over_rope_parameters(tmp_path: Path) -> None:
    """As in transformers 5, whose own reading of the same file is the oracle."""
    make_checkpoint(tmp_path, "llama")
    _rewrite(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5000.0)
    theirs = oracle_model(tmp_path).config.rope_parameters
    rope = load_model_config(tmp_path).rope
    assert (rope.rope_type, rope.factor, rope.theta) == (
        theirs["rope_type"],
        theirs["factor"],
        theirs["rope_theta"],
    )


def test_the_trained_length_may_stand_outside_the_rope_options(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama_yarn")
    _rewrite(tmp_path, original_max_position_embeddings=64)
    theirs = oracle_model(tmp_path).config.rope_parameters
    rope = load_model_config(tmp_path).rope
    assert rope.original_max_position_embeddings == 64
    assert rope.original_max_position_embeddings == theirs["original_max_position_embeddings"]


_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gemma2"}, "model_type.*gemma2.*supported.*mixtral"),
    (
        "llama",
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures.*LlamaForCausalLM",
    ),
    ("llama", {"hidden_act": "gelu"}, "hidden_act.*gelu.*silu"),
    ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "quant_method.*aqlm.*gptq"),
    ("llama", {"dtype": "float64"}, "dtype.*float64.*bfloat16"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ("llama", {"head_dim": 15}, "head_dim = 15.*even"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type.*longrope.*yarn"),
    ("llama", {"rope_scaling": {"type": "mrope"}}, "type.*mrope"),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "low_freq_factor is missing",
    ),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9.*8"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts or num_experts is missing"),
    ("mixtral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types.*use_sliding_window"),
    ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types.*4 layers"),
    ("qwen2_moe", {"layer_types": ["linear_attention"] * 4}, "layer_types.*supported"),
    ("olmoe", {"head_dim": 8}, "head_dim = 8"),
    ("ernie4_5_moe", {"moe_k": 9}, "moe_k = 9.*8"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias = True.*LM head"),
]


@pytest.mark.parametrize(("variant", "changes", "message"), _REFUSED)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, variant: str, changes: dict[str, Any], message: str
) -> None:
    make_checkpoint(tmp_path, variant)
    (tmp_path / "generation_config.json").unlink()
    load_model_config(tmp_path)
    _rewrite(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What config.json says, by variant and, of quantised checkpoints, by form."""
    found = {}
    for variant in VARIANTS:
        path = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
        found[variant] = json.loads((path / "config.json").read_text())
    for name, form in FORMS.items():
        found[name] = {**found["mixtral"], "quantization_config": form.config}
    return found


def _places(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every option, also of those in objects."""
    if not isinstance(value, dict):
        return [at]
    own = [place for name, each in value.items() for place in _places(each, (*at, name))]
    return [*own, at] if at else own


# What is named is the option that does not go with them.
_MEANT = {"num_attention_heads", "num_local_experts", "moe_num_experts"}
_WRONG = (None, True, -1, 0, 2**31 - 1, 10**30, 0.5, 1e30, "", "x", [], ["x"], [-1], {}, {"x": {}})


def test_any_value_of_any_option_is_read_or_refused_by_its_name(
    configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    rng = random.Random(0)
    for _ in range(300):
        raw = copy.deepcopy(configs[rng.choice(sorted(configs))])
        *parents, name = rng.choice(_places(raw))
        where = raw
        for parent in parents:
            where = where[parent]
        where[name] = rng.choice(_WRONG)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        try:
            load_model_config(tmp_path)
        except ConfigError as error:
            said = str(error)
        else:
            continue
        assert "config.json" in said
        assert parents or name in said or name in _MEANT, (name, where[name], said)


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"])
def test_an_unreadable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        data = content.encode("utf-8", errors="surrogateescape")
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)
