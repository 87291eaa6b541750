"""Tests of the HTTP gateway."""

from __future__ import annotations
