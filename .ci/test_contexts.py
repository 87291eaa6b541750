"""A pytest plugin: what a process of the tests runs is recorded under the name of its test.

Coverage is started in every process by COVERAGE_PROCESS_START; the others find the name of their
test in the environment (coverage.ini).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coverage import Coverage


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record a test, its fixtures included."""
    recording = Coverage.current()
    assert recording is not None
    recording.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        recording.switch_context("")
