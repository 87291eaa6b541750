"""Tiny random checkpoints of every supported family, and the oracle that generates from them.

Owns the writing of named variants (tests.variants) by transformers itself in float32
with a byte-level tokenizer and a chat template, and oracle_generate: greedy decoding by
transformers with the top-1/top-2 logit margin, so that a test can tell a real difference from one
caused by the order of summation. Shared by all test folders; knows no module of Topspin.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.quality.transformers_names import CACHE
from tests.variants import BOS_TOKEN_ID as BOS_TOKEN_ID
from tests.variants import COMMON
from tests.variants import EOS_TOKEN_ID as EOS_TOKEN_ID
from tests.variants import HIDDEN_SIZE as HIDDEN_SIZE
from tests.variants import MOE_VARIANTS as MOE_VARIANTS
from tests.variants import VARIANTS as VARIANTS
from tests.variants import VOCAB_SIZE as VOCAB_SIZE

_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Generated(NamedTuple):
    """One prompt's continuation: its tokens, and the least top-1/top-2 logit margin."""

    tokens: list[int]
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleResult:
    """Per prompt: the greedy tokens, and the minimum logit margin over the steps."""

    tokens: list[list[int]]
    margins: list[float]


def make_checkpoint(path: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write variant `name` (a key of VARIANTS) into directory `path` and return it.

    Weights depend on `seed` only. `overrides` change options of the HuggingFace config.
    """
    variant = VARIANTS[name]
    options = {**COMMON, **variant.overrides, **overrides}
    model = _build(variant.model_type, options)
    randomise(model, seed=seed)
    path.mkdir(parents=True, exist_ok=True)
    _quietly(lambda: model.save_pretrained(path))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Write tokenizer.json (one token per byte, a few merges, specials) and its configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: idx for idx, symbol in enumerate(alphabet)}
    for idx, token in enumerate(_SPECIAL_TOKENS):
        vocab[token] = BOS_TOKEN_ID + idx
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("\u0120", "the"), ("e", "r")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def oracle_model(path: Path) -> Any:
    """Return transformers' float32 model of a checkpoint, in evaluation mode."""
    loader = _transformers().AutoModelForCausalLM
    return _quietly(
        lambda: loader.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    )


def oracle_generate(
    path: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    stop_at_eos: bool = False,
) -> OracleResult:
    """Continue each prompt alone (no padding) by transformers, greedily, in float32.

    Without stop_at_eos every continuation has max_new_tokens tokens.
    """
    results = list(oracle_continuations(path, prompts, max_new_tokens, stop_at_eos=stop_at_eos))
    return OracleResult(
        tokens=[result.tokens for result in results], margins=[result.margin for result in results]
    )


def oracle_continuations(
    path: Path,
    prompts: Iterable[list[int]],
    max_new_tokens: int,
    *,
    stop_at_eos: bool = False,
    least_margin: float = 0.0,
) -> Iterator[Generated]:
    """Yield what oracle_generate returns, a prompt at a time and only as asked for.

    A continuation ends where its margin is below `least_margin`.
    """
    model = oracle_model(path)
    eos = _eos_ids(model) if stop_at_eos else frozenset()
    for prompt in prompts:
        yield _generate(model, prompt, max_new_tokens, eos, least_margin)


def _build(model_type: str, options: Mapping[str, Any]) -> Any:
    library = _transformers()
    config = _quietly(lambda: library.AutoConfig.for_model(model_type, **options))
    loader = library.AutoModelForCausalLM
    return _quietly(lambda: loader.from_config(config).to(torch.float32).eval())


def _transformers() -> Any:
    # Imported late: it takes a second, which tests without an oracle should not spend.
    return importlib.import_module("transformers")


def randomise(model: Any, *, seed: int) -> None:
    """Give every parameter a random value by which each part of the network matters."""
    generator = torch.Generator().manual_seed(seed)
    is_tied = bool(model.config.tie_word_embeddings)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                # A gain of four makes up for the small tied embedding.
                gain = 4.0 if is_tied and name == "model.norm.weight" else 1.0
                parameter.copy_(gain * (1.0 + 0.2 * noise))
            else:
                parameter.copy_(_scale(name, noise.shape[-1], is_tied=is_tied) * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _scale(name: str, num_inputs: int, *, is_tied: bool) -> float:
    scale: float = num_inputs**-0.5
    if name.endswith("e_score_correction_bias"):  # of a softmax, whose scores are small
        return 0.1
    if name.endswith("bias"):
        return 0.3
    if "embed_tokens" in name:
        # With a large tied embedding the model would only repeat the last token.
        return 0.1 if is_tied else 1.0
    if name.endswith("gate.weight") or "shared_expert_gate" in name:
        return 2.0 * scale
    if "lm_head" in name:
        return 3.0 * scale
    return 1.3 * scale


def _generate(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: frozenset[int],
    least_margin: float,
) -> Generated:
    # Dynamic NTK frequencies are state of the module; a fresh module gives those that a request
    # sees alone.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    tokens: list[int] = []
    margin = float("inf")
    cache = _transformers().DynamicCache(config=model.config)
    input_ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(max_new_tokens):
            output = model(input_ids=input_ids, use_cache=True, **{CACHE: cache})
            best = output.logits[0, -1].float().topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            tokens.append(token)
            if token in eos or margin < least_margin:
                break
            input_ids = torch.tensor([[token]])
    return Generated(tokens=tokens, margin=margin)


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _quietly(action: Callable[[], Any]) -> Any:
    """Run `action` without transformers' progress bars and notices."""
    logging = _transformers().utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action()
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
