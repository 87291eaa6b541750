"""From a request's body to a checked call of the engine: fields, defaults, prompts, tokens."""

from __future__ import annotations
