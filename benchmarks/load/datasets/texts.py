"""Datasets of real text: ShareGPT, and custom JSONL.

Owns the two file formats. ShareGPT: a JSON list of {"conversations": [{"from", "value"}]}; of each
conversation the first message is the prompt and the second gives the output's length, as vllm bench
serve takes it. Custom: one JSON object per line with `prompt`, `messages` or `prompt_token_ids`,
and optionally `output_tokens` and `timestamp` (seconds).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.load.contracts import BenchRequest, Message
from benchmarks.load.datasets.lines import DatasetEntry, json_entries, jsonl_entries
from benchmarks.load.datasets.settings import DatasetSettings
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, InvalidRequest

# The roles, in the spellings that files use.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
}
# vllm bench serve leaves out ShareGPT prompts and replies shorter than this.
_SHAREGPT_MIN_LEN = 4


def sharegpt_requests(
    settings: DatasetSettings, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return the first question of each conversation, with the length of its answer.

    Conversations with fewer than two messages, or with lengths out of bounds, are left out.
    """
    if tokenizer is None:
        raise ConfigError("dataset sharegpt counts tokens: give --tokenizer DIRECTORY")
    assert settings.path is not None
    max_prompt_len, max_total_len = settings.lengths_allowed
    found: list[BenchRequest] = []
    for entry in _mixed(list(json_entries(settings.path)), settings, rng):
        if len(found) == settings.num_prompts:
            break
        # Messages after the first two are not used, so they may be of any kind.
        turns = _turns(entry, "conversations", most=2)
        if len(turns) < 2:
            continue
        prompt = turns[0]["content"]
        prompt_len = _length(entry, tokenizer, prompt)
        output_len = settings.sharegpt_output_len
        if output_len is None:
            reply = turns[1]["content"]
            output_len = _length(entry, tokenizer, reply)
            if output_len < _SHAREGPT_MIN_LEN:
                continue
        if prompt_len < _SHAREGPT_MIN_LEN or prompt_len > max_prompt_len:
            continue
        if prompt_len + output_len <= max_total_len:
            length = None if settings.chat else prompt_len
            found.append(BenchRequest(prompt=prompt, prompt_tokens=length, max_tokens=output_len))
    return found


def custom_requests(
    settings: DatasetSettings, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return the lines of a custom file; by time if it has timestamps, else shuffled."""
    assert settings.path is not None
    entries = list(jsonl_entries(settings.path))
    timed = [entry for entry in entries if entry.fields.get("timestamp") is not None]
    if timed and len(timed) != len(entries):
        untimed = next(e for e in entries if e.fields.get("timestamp") is None)
        raise untimed.place.error("has no timestamp, but other lines have one")
    if timed:
        entries = sorted(entries, key=lambda entry: entry.number("timestamp", least=0))
    else:
        entries = _mixed(entries, settings, rng)
    max_prompt_len, max_total_len = settings.lengths_allowed
    found = []
    start_s = float(entries[0].fields["timestamp"]) if timed else None
    for entry in entries:
        request = _custom(entry, settings, tokenizer, start_s)
        prompt_len = request.prompt_tokens or 0
        if prompt_len <= max_prompt_len and prompt_len + request.max_tokens <= max_total_len:
            found.append(request)
    return found[: settings.num_prompts]


def _custom(
    entry: DatasetEntry,
    settings: DatasetSettings,
    tokenizer: Tokenizer | None,
    start_s: float | None,
) -> BenchRequest:
    kinds = [key for key in ("prompt", "messages", "prompt_token_ids") if key in entry.fields]
    if len(kinds) != 1:
        raise entry.place.error(
            f"needs exactly one of prompt, messages and prompt_token_ids; has {kinds or 'none'}"
        )
    output_len = settings.custom_output_len
    if output_len is None:
        if "output_tokens" not in entry.fields:
            raise entry.place.error("has no output_tokens: give --custom-output-len N")
        output_len = entry.whole("output_tokens", least=1)
    arrival_s = None if start_s is None else float(entry.fields["timestamp"]) - start_s
    fields = _prompt(entry, kinds[0], settings, tokenizer)
    return BenchRequest(**fields, max_tokens=output_len, arrival_s=arrival_s)


def _prompt(
    entry: DatasetEntry, kind: str, settings: DatasetSettings, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the fields of a request that say what is asked."""
    if kind == "messages":
        if not settings.chat:
            raise entry.place.error("messages need a chat endpoint: --backend openai-chat")
        messages = _turns(entry, "messages")
        if not messages or messages[-1]["role"] == "assistant":
            raise entry.place.error("messages must end with a message to reply to")
        return {"messages": messages}
    if kind == "prompt_token_ids":
        if settings.chat:
            raise entry.place.error("prompt_token_ids need /v1/completions: --backend openai")
        ids = entry.ids("prompt_token_ids")
        if not ids:
            raise entry.place.error("prompt_token_ids is empty")
        return {"prompt": ids, "prompt_tokens": len(ids)}
    prompt = entry.fields["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise entry.place.error("prompt must be a text that is not empty")
    length = None
    if tokenizer is not None and not settings.chat:
        length = _length(entry, tokenizer, prompt)
    return {"prompt": prompt, "prompt_tokens": length}


def _turns(entry: DatasetEntry, key: str, *, most: int | None = None) -> list[Message]:
    """Return the entry's (first) messages as {"role", "content"}, from either spelling."""
    raw: Any = entry.fields.get(key)
    if not isinstance(raw, list):
        raise entry.place.error(f"{key} must be a list of messages")
    turns: list[Message] = []
    for idx, message in enumerate(raw[:most], 1):
        fields = message if isinstance(message, dict) else {}
        speaker = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise entry.place.error(
                f"message {idx} is from {speaker!r}; known: {', '.join(_ROLES)}"
            )
        if not isinstance(content, str):
            raise entry.place.error(f"message {idx} has no text")
        turns.append({"role": role, "content": content})
    return turns


def _mixed(
    entries: Sequence[DatasetEntry], settings: DatasetSettings, rng: np.random.Generator
) -> list[DatasetEntry]:
    """Return the entries shuffled by the seed, or in file order with --disable-shuffle."""
    if settings.in_order:
        return list(entries)
    return [entries[idx] for idx in rng.permutation(len(entries))]


def _length(entry: DatasetEntry, tokenizer: Tokenizer, text: str) -> int:
    try:
        return len(tokenizer.encode(text, add_special_tokens=True))
    except InvalidRequest as error:
        raise entry.place.error(str(error)) from error
