"""Parsers of command lines whose errors are one line: what is wrong, and what was probably meant.

Owns the words of other servers' flags and values, and what has their place here. Knows no command;
app.cli.main makes the parsers.
"""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import Final, NoReturn

# Flags of vLLM, SGLang and llama.cpp.
OTHERS_FLAGS: Final = {
    "--block-size": "blocks of the cache have one size",
    "--config": "--plan FILE has all settings of an engine; --print-plan writes one",
    "--context-length": "--max-model-len is its name here",
    "--ctx-size": "--max-model-len is its name here",
    "--data-parallel-size": "--attention-nodes M is the number of replicas of attention",
    "--disable-log-requests": "--no-access-log is its name here",
    "--download-dir": "HF_HUB_CACHE or HF_HOME says where models are kept",
    "--enable-chunked-prefill": "long prompts are always computed in parts",
    "--enable-expert-parallel": "experts are always spread over the --expert-nodes",
    "--enable-force-include-usage": "requests ask by `stream_options`",
    "--enable-lora": "adapters are not served; merge them into the checkpoint",
    "--enable-prompt-tokens-details": "the usage always tells cached tokens",
    "--enable-reasoning": "it is on where the chat template has it; see --reasoning-parser",
    "--enable-request-id-headers": "every answer has x-request-id",
    "--enable-server-load-tracking": "GET /load always tells it",
    "--enable-tokenizer-info-endpoint": "GET /tokenizer_info is always there",
    "--load-format": "it is found out by the files",
    "--mem-fraction-static": "--gpu-memory-utilization is its name here",
    "--model": "the model is the first argument: topspin serve MODEL",
    "--model-path": "the model is the first argument: topspin serve MODEL",
    "--n-gpu-layers": "--attention-device and --expert-device say where a role computes",
    "--pipeline-parallel-size": "stages of layers are nodes of a plan (--plan)",
    "--return-tokens-as-token-ids": "requests ask by `return_tokens_as_token_ids`",
    "--revision": "of the hub's models the main one is served; give a directory for another",
    "--seed": "requests have seeds of their own: the field `seed`",
    "--swap-space": "--kv-spill-dir moves cold parts of the cache to files",
    "--tensor-parallel-size": "a node is one device; --attention-nodes and --expert-nodes add some",
    "--tokenizer": "it is the checkpoint's",
    "--tp-size": "a node is one device; --attention-nodes and --expert-nodes add some",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--uds": "--host and --port say where the server listens",
}
_SHORT: Final = {
    "-c": "--ctx-size",
    "-m": "--model",
    "-ngl": "--n-gpu-layers",
    "-pp": "--pipeline-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--max-seq-len": "--context-length",
}
_OTHERS_VALUES: Final = {
    ("--dtype", "half"): "weights of this type are served as bfloat16, or as float32",
    ("--dtype", "float16"): "weights of this type are served as bfloat16, or as float32",
    ("--dtype", "float"): "float32 is its name here",
}
_CHOICE: Final = re.compile(r"argument ([^:]+): invalid choice: '([^']*)'")


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are one line."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})  # type: ignore[arg-type]
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """End the process with the message, and a hint if a value is another server's."""
        found = _CHOICE.match(message)
        hint = _OTHERS_VALUES.get((found[1], found[2])) if found else None
        self.exit(2, f"{self.prog}: error: {message}{f'; {hint}' if hint else ''}\n")

    def refuse(self, words: list[str]) -> NoReturn:
        """End the process because it has no use for `words`, which are not empty."""
        flag = next((word for word in words if word.startswith("-")), None)
        if flag is None:
            self.error(f"unrecognized arguments: {' '.join(words)}")
        self.error(f"unknown flag {flag.partition('=')[0]}{self._hint(flag)}")

    def _hint(self, flag: str) -> str:
        name = flag.partition("=")[0].replace("_", "-")
        known = [each for each in self._option_string_actions if each.startswith("--")]
        if name in known:
            return f": did you mean {name}?"
        other = OTHERS_FLAGS.get(_SHORT.get(name, name))
        if other is not None and self.prog.endswith(" serve"):
            return f": {other}"
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        return f": did you mean {near[0]}?" if near else f" ({self.prog} --help shows all)"
