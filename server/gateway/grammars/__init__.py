"""The encoders of answers, one per API; they share the events that a choice grows by."""

from __future__ import annotations
