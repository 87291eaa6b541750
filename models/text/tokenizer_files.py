"""A checkpoint's tokenizer files: the effective tokenizer, and the names of its special tokens.

Owns what tokenizer_config.json, special_tokens_map.json and added_tokens.json add to
tokenizer.json; the result has the tokens that transformers.AutoTokenizer's has, in its order. The
steps (normaliser, splitting, decoder) are always those of tokenizer.json or, without one, of the
family that has a file of ranks (rank_file.py). Knows no requests and no chat template, imports no
torch. models.text.tokenizer, models.text.chat_template and the attention nodes' grammars call it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from models.description.config_fields import read_json
from models.families import FAMILIES
from models.text.rank_file import rank_tokenizer
from models.text.tokenizer_names import RANK_FILE, TOKENIZER_FILE, has_tokenizer
from topspin.errors import ConfigError

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_ADDED_FILE = "added_tokens.json"
_END = "<|endoftext|>"
# The special tokens of transformers' classes, unless the files name others.
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPTNeoXTokenizer": {
        "bos_token": _END,
        "eos_token": _END,
        "unk_token": _END,
        "pad_token": "<|padding|>",
    },
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
}
# The class of a model whose files name none, where only its tokenizer is read here (a load test).
_OTHER_CLASSES = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_log = logging.getLogger("tokenizer")


class _Tokens(NamedTuple):
    """What the files say beside tokenizer.json.

    `listed` by id; None: tokenizer_config.json has no list, and the older files count, of which
    `older` is added_tokens.json's. `named` are those called `bos_token` and the like, `extra` those
    without a name. `is_split`: special tokens in a text are spelt in pieces.
    """

    class_name: str
    listed: dict[int, AddedToken] | None
    older: dict[int, AddedToken]
    named: dict[str, AddedToken]
    extra: list[AddedToken]
    is_split: bool


def effective_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of the checkpoint directory `path`, with the added tokens of all files.

    Its `to_str()` is a tokenizer.json that has them all. A token that would get an id outside the
    model's vocabulary is left out, with a warning. Raises ConfigError naming the file that is
    missing or cannot be used.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE
    tokens = _read(path)
    if not file.exists():
        if not has_tokenizer(path):
            raise ConfigError(
                f"{file}: no such file; Topspin needs a checkpoint with a fast tokenizer"
            )
        model_type = str(_read_if_any(path / "config.json").get("model_type"))
        backend = rank_tokenizer(path / RANK_FILE, model_type, tokens.listed or {})
        backend.encode_special_tokens = tokens.is_split
        return backend
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
        own = backend.get_added_tokens_decoder()
        if tokens.listed is not None and tokens.class_name in _CLASS_TOKENS:
            backend = _without_added(backend, own, tokens.listed, path=path)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file}: is not a tokenizer: {error}") from error
    _add(backend, _to_add(backend, tokens, own), path=path)
    backend.encode_special_tokens = tokens.is_split
    return backend


def read_special_tokens(path: Path) -> dict[str, str]:
    """Return name -> text of the special tokens that a chat template may write by name."""
    return {name: token.content for name, token in _read(Path(path)).named.items()}


def _without_added(
    backend: tokenizers.Tokenizer,
    own: Mapping[int, AddedToken],
    listed: Mapping[int, AddedToken],
    *,
    path: Path,
) -> tokenizers.Tokenizer:
    """Return the tokenizer without added tokens: some classes take those of the list only."""
    lost = {token.content for token in own.values()} - {each.content for each in listed.values()}
    if lost:
        _log.warning(
            "%s: tokens of %s that added_tokens_decoder lacks are spelt in pieces, as in "
            "transformers: %s",
            path / _CONFIG_FILE,
            TOKENIZER_FILE,
            ", ".join(sorted(lost)),
        )
    description = json.loads(backend.to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))


def _to_add(
    backend: tokenizers.Tokenizer, tokens: _Tokens, own: Mapping[int, AddedToken]
) -> list[AddedToken]:
    """Return the tokens to add in transformers' order, by which new ones get their ids.

    `own` are those of tokenizer.json.
    """
    listed = {**tokens.older, **own} if tokens.listed is None else tokens.listed
    result = [token for _, token in sorted(listed.items(), key=lambda item: item[0])]
    present = backend.get_added_tokens_decoder().values()
    known = {token.content for token in (*present, *result)}
    others = [*tokens.named.values(), *tokens.extra]
    result += [token for token in others if token.content not in known]
    if tokens.class_name == "Qwen2Tokenizer":
        result += [AddedToken(token.content, special=True) for token in others]
    special = {token.content for token in (*tokens.named.values(), *present) if token.special}
    for token in result:
        token.special = token.special or token.content in special
        if token.special:  # the library goes on skipping it, whatever follows
            special.add(token.content)
    return result


def _add(backend: tokenizers.Tokenizer, tokens: list[AddedToken], *, path: Path) -> None:
    """Add `tokens` that have an id, or get one inside the model's vocabulary."""
    limit = _read_if_any(path / "config.json").get("vocab_size")
    num_tokens = backend.get_vocab_size(with_added_tokens=True)
    kept: list[AddedToken] = []
    seen: set[str] = set()
    for token in tokens:
        if token.content not in seen and backend.token_to_id(token.content) is None:
            if isinstance(limit, int) and num_tokens >= limit:
                _log.warning("%s: %r is no token: the model has %d", path, token.content, limit)
                continue
            num_tokens += 1
        seen.add(token.content)
        kept.append(token)
    backend.add_tokens(kept)


def _read(path: Path) -> _Tokens:
    """Read the files of `path`; raises ConfigError for one that is no JSON object."""
    config = _read_if_any(path / _CONFIG_FILE)
    class_name = _class_name(path, config)
    names, extra = config.get("extra_special_tokens"), config.get("additional_special_tokens")
    if not isinstance(names, dict):
        names, extra = {}, names if names or extra is None else extra
    listed = _by_id(config.get("added_tokens_decoder"))
    of_map: dict[str, object] = {}
    older: dict[int, AddedToken] = {}
    if listed is None:
        of_map = _read_if_any(path / _MAP_FILE)
        if extra is None or names:
            extra = of_map.get("additional_special_tokens", extra)
        more = of_map.get("extra_special_tokens")
        names |= more if isinstance(more, dict) else {}
        extra = [*_items(extra), *_items(more)]
        # A name of tokenizer_config.json makes these special only as a text.
        texts = [_text(of_map.get(name)) or config.get(name) for name in SPECIAL_TOKEN_NAMES]
        special = {str(text) for text in (*texts, *extra)}
        older = {
            idx: AddedToken(text, normalized=text not in special, special=text in special)
            for text, idx in _read_if_any(path / _ADDED_FILE).items()
            if isinstance(idx, int)
        }
    standard = {**_CLASS_TOKENS.get(class_name, {}), **config, **of_map}
    given = {name: standard.get(name) for name in SPECIAL_TOKEN_NAMES}
    # Other names: texts of tokenizer_config.json win.
    texts_last = {name: value for name, value in config.items() if isinstance(value, str)}
    for name, value in {**config, **of_map, **texts_last}.items():
        if name.endswith("_token"):
            given.setdefault(name, value)
    given |= names
    named = {
        name: token
        for name, value in given.items()
        if isinstance(value, str | dict) and (token := _token(value)) is not None
    }
    for token in named.values():
        token.special = True
    extra = [token for each in _items(extra) if (token := _token(each)) is not None]
    is_split = config.get("split_special_tokens") is True
    return _Tokens(class_name, listed, older, named, extra, is_split)


def _by_id(listed: object) -> dict[int, AddedToken] | None:
    """Return the tokens of `added_tokens_decoder`, None if there is none."""
    if not isinstance(listed, dict):
        return None
    found = {int(idx): _token(value) for idx, value in listed.items() if idx.isdecimal()}
    return {idx: token for idx, token in found.items() if token is not None}


def _token(value: object) -> AddedToken | None:
    """Return the token of a text or an object; None, with a warning, for anything else."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], **flags)
    _log.warning("%r is no special token: it has no text", value)
    return None


def _class_name(path: Path, config: Mapping[str, object]) -> str:
    """Return the class of transformers that reads the files, "" for the general one."""
    model = _read_if_any(path / "config.json")
    model_type = str(model.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is not None and not family.takes_class:
        return ""
    of_model = _OTHER_CLASSES.get(model_type) if family is None else family.tokenizer_class
    named = config.get("tokenizer_class") or model.get("tokenizer_class") or of_model
    name = str(named).removesuffix("Fast")
    if name not in _CLASS_TOKENS:
        return ""
    file = path / TOKENIZER_FILE
    if name == "LlamaTokenizer" and file.exists() and b'"ByteLevel"' in file.read_bytes():
        return ""
    return name


def _read_if_any(file: Path) -> dict[str, object]:
    return read_json(file) if file.exists() else {}


def _text(value: object) -> object:
    return value.get("content") if isinstance(value, dict) else value


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
