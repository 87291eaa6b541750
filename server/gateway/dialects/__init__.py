"""From the engine's outputs to an HTTP answer: text, stop strings, JSON and events."""

from __future__ import annotations
