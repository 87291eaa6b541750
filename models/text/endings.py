"""The token ids that end a generation.

Owns their sources: generation_config.json before config.json, and the tokenizer's end-of-sequence
token where the checkpoint's chat template ends a turn with it. All roles get them by
models.description.config, so that they agree. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from models.description.config_fields import ConfigFields, read_json
from models.text.chat_template import ChatTemplate
from models.text.tokenizer_files import effective_tokenizer, read_special_tokens
from models.text.tokenizer_names import TOKENIZER_FILE, has_tokenizer
from topspin.errors import ConfigError, InvalidRequest

_MARK: Final = "0123456789"


class _Listed(msgspec.Struct):
    id: int
    content: str


class _Added(msgspec.Struct):
    """The part of tokenizer.json that is read at once, whatever the vocabulary's size."""

    added_tokens: list[_Listed] = []


def ending_token_ids(
    path: Path, fields: ConfigFields, *, vocab_size: int, notes: list[str]
) -> tuple[int, ...]:
    """Return the ids that end a generation, without duplicates; what is to be said goes to `notes`.

    generation_config.json overrides config.json if it names any, as in transformers' generate;
    otherwise config.json's hold, since a server must be able to stop. An id without a logit could
    never be sampled: it is left out, or raises ConfigError if there is no other.
    """
    source = fields
    generation_path = path / "generation_config.json"
    if generation_path.exists():
        generation = ConfigFields(read_json(generation_path), source=str(generation_path))
        if generation.int_list("eos_token_id"):
            source = generation
    given = dict.fromkeys(source.int_list("eos_token_id"))
    ids = [token_id for token_id in given if 0 <= token_id < vocab_size]
    if len(ids) < len(given):
        reason = f"must be in 0..{vocab_size - 1} (vocab_size)"
        if not ids and not source.is_default("eos_token_id"):
            raise source.error("eos_token_id", reason)
        notes.append(f"{source.error('eos_token_id', reason)}; the others are ignored")
    own = _end_of_turn(path, ids)
    if own is not None and 0 <= own < vocab_size:
        ids.append(own)
        notes.append(
            f"{path}: token {own}, the tokenizer's eos_token, ends a generation as well: "
            f"{source.source} does not name it, but the chat template ends a turn with it"
        )
    return tuple(ids)


def _end_of_turn(path: Path, known: list[int]) -> int | None:
    """Return the id of the tokenizer's end if it is not `known` and the template writes it."""
    text = read_special_tokens(path).get("eos_token")
    file = path / TOKENIZER_FILE
    if text is None or not has_tokenizer(path):
        return None
    try:
        added: list[_Listed] = []
        if file.exists():
            added = msgspec.json.decode(file.read_bytes(), type=_Added).added_tokens
        if any(token.id in known for token in added if token.content == text):
            return None
        template = ChatTemplate.find(path)
        if template is None or not _ends_turn(template, text):
            return None
        found: int | None = effective_tokenizer(path).token_to_id(text)
    except (ConfigError, msgspec.DecodeError):
        return None  # whoever needs the template or the tokenizer says what is wrong
    return None if found in known else found


def _ends_turn(template: ChatTemplate, text: str) -> bool:
    """Return whether `text` follows an assistant's message, the last one or an earlier one."""
    chat = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
    for messages in (chat, chat[:2]):
        try:
            shown = template.render(messages, add_generation_prompt=False)
        except InvalidRequest:
            continue
        turns = shown.split(_MARK)
        if len(turns) > 2 and turns[2].lstrip().startswith(text):
            return True
    return False
