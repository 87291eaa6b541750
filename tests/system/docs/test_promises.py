"""The page of promises is that of the table, and every test that it names is there."""

from __future__ import annotations

import re

import pytest

from tests.system.docs.promises import PAGE, PROMISES, ROOT, Outcome, all_tests, page, read_report

REPORT = """<testsuites><testsuite>
<testcase classname="tests.system.test_hosts" name="test_a[x]">
<properties><property name="figure" value="1.5 s"/></properties></testcase>
<testcase classname="tests.system.test_hosts" name="test_a[y]"><failure/></testcase>
<testcase classname="tests.system.test_hosts" name="test_b"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("test", all_tests())
def test_every_named_test_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_page_has_every_promise_and_no_failure() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    told = [row.split(" | ")[:2] for row in rows if not row.startswith("| promise")]
    expected = [row.split(" | ")[:2] for row in page({}).splitlines() if row.startswith("| ")]
    assert told == [each for each in expected if each[0] != "| promise"]
    assert sum(map(len, PROMISES.values())) == len(told)
    assert "fail**" not in text
    assert "**not run**" not in text


def test_a_report_is_read_by_test() -> None:
    assert read_report(REPORT) == {
        "system/test_hosts.py::test_a": Outcome(1, 1, 0, ("1.5 s",)),
        "system/test_hosts.py::test_b": Outcome(0, 0, 1, ()),
    }
