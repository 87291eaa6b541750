"""Ratios, spreads and agreement of answers, by hand."""

from __future__ import annotations

import pytest

from benchmarks.load import comparison
from benchmarks.load.comparison import RoundFigures
from tests.benchmarks.load.records import record, run_of


def test_ratios_are_taken_within_a_round() -> None:
    # The machine halves its speed in round 2: the ratio must not change.
    rounds = [
        {"a": RoundFigures(output_throughput=100.0), "b": RoundFigures(output_throughput=120.0)},
        {"a": RoundFigures(output_throughput=50.0), "b": RoundFigures(output_throughput=65.0)},
        {"a": RoundFigures(output_throughput=100.0), "b": RoundFigures(output_throughput=110.0)},
    ]
    table = comparison.summarise(rounds)
    a, b = table["a"]["output_throughput"], table["b"]["output_throughput"]
    assert (a["median"], a["least"], a["greatest"]) == (100.0, 50.0, 100.0)
    assert "ratio" not in a
    assert b["rounds"] == [120.0, 65.0, 110.0]
    assert b["ratio"]["rounds"] == pytest.approx([1.2, 1.3, 1.1])
    assert b["ratio"]["median"] == pytest.approx(1.2)
    assert (b["ratio"]["least"], b["ratio"]["greatest"]) == pytest.approx((1.1, 1.3))


def test_what_was_not_measured_is_left_out_and_not_taken_as_zero() -> None:
    rounds = [
        {"a": RoundFigures(median_ttft_ms=None), "b": RoundFigures(median_ttft_ms=4.0)},
        {"a": RoundFigures(median_ttft_ms=2.0), "b": RoundFigures(median_ttft_ms=6.0)},
    ]
    table = comparison.summarise(rounds)
    assert table["a"]["median_ttft_ms"]["rounds"] == [2.0]
    assert table["b"]["median_ttft_ms"]["rounds"] == [4.0, 6.0]
    assert table["b"]["median_ttft_ms"]["ratio"]["rounds"] == [3.0]
    assert "output_throughput" not in table["a"]


def test_prefill_counts_prompt_tokens_from_the_first_send_to_the_last_token() -> None:
    records = [record(0, 1.0, [(3.0, 1)]), record(1, 2.0, [(5.0, 1)])]
    assert comparison.prefill_throughput(run_of(records, duration_s=9.0)) == pytest.approx(20 / 4.0)
    failed = record(2, 0.0, [], error_kind="timeout", end_s=9.0)
    assert comparison.prefill_throughput(run_of([*records, failed], duration_s=9.0)) == 5.0
    unknown = record(2, 2.0, [(4.0, 1)], prompt_tokens=None)
    assert comparison.prefill_throughput(run_of([*records, unknown], duration_s=9.0)) is None
    assert comparison.prefill_throughput(run_of([failed], duration_s=9.0)) is None


def test_a_rounds_figures_are_those_of_its_runs() -> None:
    # Two streams with 2 and 4 tokens; the first tokens come after 1 s and 2 s.
    whole = [record(0, 0.0, [(1.0, 1), (4.0, 1)]), record(1, 0.0, [(2.0, 1), (5.0, 3)])]
    prefill = run_of([record(0, 0.0, [(2.0, 1)])], duration_s=9.0)
    found = comparison.figures_of(run_of(whole, duration_s=6.0), prefill=prefill, streams=2)
    assert found == RoundFigures(
        output_throughput=1.0,
        median_ttft_ms=1500.0,
        median_tpot_ms=2000.0,
        prefill_throughput=5.0,
        decode_throughput=0.5,
    )


def test_a_round_without_an_answer_has_no_figures() -> None:
    run = run_of([], duration_s=1.0)
    assert comparison.figures_of(run, prefill=run, streams=1) == RoundFigures()


def test_agreement_says_how_far_answers_are_equal() -> None:
    found = comparison.agreement(
        ["one two", "same", "abc"], ["one three", "same", "abcdef"], lambda text: [*text.encode()]
    )
    assert found.identical == pytest.approx(1 / 3)
    assert found.common_prefix_characters == pytest.approx((5 + 4 + 3) / 3)
    assert found.common_prefix_tokens == found.common_prefix_characters
    assert found.first_difference == "'one two' against 'one three'"
    equal = comparison.agreement(["x"], ["x"], None)
    assert (equal.identical, equal.common_prefix_tokens, equal.first_difference) == (1, None, None)
