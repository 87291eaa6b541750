"""Tests of a plan's rules."""
