"""Reading the defaults of sampling parameters from a checkpoint's generation_config.json."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from server.gateway.bodies.sampling_defaults import (
    SamplingDefaults,
    load_sampling_defaults,
    unapplied_defaults,
)
from topspin.errors import ConfigError


def write(path: Path, value: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(value))
    return path


def test_the_files_values(tmp_path: Path) -> None:
    def loaded(**value: object) -> SamplingDefaults:
        return load_sampling_defaults(write(tmp_path, value), "auto")

    given = {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    assert loaded(
        do_sample=True, max_new_tokens=512, eos_token_id=[1, 2], **given
    ) == SamplingDefaults(max_tokens=512, **given)
    assert loaded(temperature=None, max_tokens=7) == SamplingDefaults()
    assert loaded(do_sample=False, temperature=0.7) == SamplingDefaults(temperature=0.0)


def test_the_source_is_chosen(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", {"temperature": 0.2})
    other = write(tmp_path / "other", {"temperature": 0.4})
    assert load_sampling_defaults(checkpoint, "none") == SamplingDefaults()
    assert load_sampling_defaults(checkpoint, str(other)) == SamplingDefaults(temperature=0.4)
    assert load_sampling_defaults(tmp_path, "auto") == SamplingDefaults(), "there is no file"


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"top_p": 0})
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*top_p.*none"):
        load_sampling_defaults(tmp_path, "auto")
    with pytest.raises(ConfigError, match=r"--generation-config .*generation_config\.json"):
        load_sampling_defaults(tmp_path, str(tmp_path / "none"))


# What generate returns does not depend on these, or another option of the server stands for them.
_ELSEWHERE = {
    "bos_token_id", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "decoder_start_token_id", "disable_compile", "do_sample",
    "early_stopping", "eos_token_id", "length_penalty", "low_memory", "max_cache_len",
    "num_beam_groups", "pad_token_id", "prefill_chunk_size", "remove_invalid_values",
    "renormalize_logits", "return_dict_in_generate", "speculation_type",
    "transformers_version", "use_cache", "use_mtp", "_from_model_config",
}  # fmt: skip
_OF_DRAFTS = ("assistant_", "is_assistant", "num_assistant", "target_lookbehind", "output_")
_OF_DRAFTS += ("prompt_lookup", "max_matching_ngram")


def test_every_option_of_transformers_is_applied_or_named(tmp_path: Path) -> None:
    """An option of a later version fails here until it is one of the three kinds."""
    config = importlib.import_module("transformers").GenerationConfig()
    options = {each for each in vars(config) if not each.startswith(_OF_DRAFTS)} - _ELSEWHERE
    applied = set(SamplingDefaults.__struct_encode_fields__)
    write(tmp_path, {option: [7] for option in options - applied})
    (said,) = unapplied_defaults(tmp_path, "auto")
    assert sorted(re.findall(r"(\w+) = \[7\]", said)) == sorted(options - applied)
    assert unapplied_defaults(tmp_path, "none") == []
    write(tmp_path, config._get_default_generation_params())
    assert unapplied_defaults(tmp_path, "auto") == []


def test_the_operators_values_count_more(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", {"temperature": 0.2, "top_k": 5})
    overrides = {"temperature": 0.6, "max_new_tokens": 9}
    expected = SamplingDefaults(temperature=0.6, top_k=5, max_tokens=9)
    assert load_sampling_defaults(checkpoint, "auto", overrides) == expected
    greedy = load_sampling_defaults(checkpoint, "none", {"do_sample": False})
    assert greedy == SamplingDefaults(temperature=0.0)
    for wrong in ({"beams": 2}, {"top_p": 7}):
        with pytest.raises(ConfigError, match="--override-generation-config: "):
            load_sampling_defaults(checkpoint, "auto", wrong)
