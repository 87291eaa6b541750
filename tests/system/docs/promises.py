"""The promises of reliability and security, with the tests that would fail if one were broken.

Owns the table, and docs/promises.md, which is written from it and from the results of the tests:
`python -m tests.system.docs.promises` runs them all (real processes, half an hour) and writes the
page; with words, those of promises and tests that have one of them. A test tells a figure by
pytest's `record_property("figure", "...")`. Knows no engine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "promises.md"
RECOVERY = "system/recovery/"
HTTP = "server/gateway/http/"
OVERLOAD = "server/scheduler/planning/policy/test_policy_overload.py::"


class Promise(NamedTuple):
    """A sentence, and the tests of it: files below tests/ and names of functions in them."""

    text: str
    tests: tuple[str, ...]


PROMISES: dict[str, tuple[Promise, ...]] = {
    "Losses": (
        Promise(
            "A process that is killed, frozen or hangs costs no request and changes no token, in "
            "any phase and on every layout.",
            (f"{RECOVERY}test_kill_matrix.py::test_pairs_of_faults",),
        ),
        Promise(
            "Where a spare has the weights, it takes the place of a node that is killed at once.",
            (f"{RECOVERY}test_spare_nodes.py::test_a_spare_takes_the_place_of_a_killed_node",),
        ),
        Promise(
            "A process that ends is noticed at once, one that freezes in a second, one that "
            "answers pings and does nothing by its progress.",
            (
                f"{RECOVERY}test_detection.py::test_a_process_that_ends_or_freezes",
                f"{RECOVERY}test_detection.py::test_a_node_that_answers_pings_and_does_nothing",
            ),
        ),
        Promise(
            "A silent link is noticed in 3 s, on the control plane and on the data plane.",
            (
                f"{RECOVERY}test_detection.py::test_a_control_link_that_carries_nothing_more",
                f"{RECOVERY}test_detection.py::test_a_data_link_that_carries_nothing_more",
            ),
        ),
        Promise(
            "A partition between hosts costs no request.",
            ("system/test_hosts.py::test_a_partition_costs_no_request",),
        ),
        Promise(
            "Weights and requests outlive the scheduler, on one host and on several.",
            (
                f"{RECOVERY}test_restarts.py::test_weights_and_requests_outlive_the_scheduler",
                "system/test_hosts.py::test_another_scheduler_costs_no_request",
            ),
        ),
        Promise(
            "The port outlives the gateway, and a stream that was cut goes on at any gateway.",
            (
                f"{RECOVERY}test_restarts.py::test_the_port_outlives_the_gateway",
                "server/gateway/generation/test_resumption.py::"
                "test_a_stream_goes_on_behind_any_event",
            ),
        ),
        Promise(
            "The supervisor's death leaves no process behind.",
            (f"{RECOVERY}test_restarts.py::test_nothing_outlives_the_supervisor",),
        ),
        Promise(
            "After SIGTERM requests end, new ones are refused, and a second signal cuts.",
            (
                f"{RECOVERY}test_restarts.py::"
                "test_after_sigterm_requests_end_and_new_ones_are_refused",
                f"{RECOVERY}test_restarts.py::test_a_second_signal_cuts_requests_at_once",
            ),
        ),
        Promise(
            "A node that comes back from the dead harms nobody: its frames are of a past life.",
            (
                f"{RECOVERY}test_failover.py::test_a_node_that_comes_back_from_the_dead_harms_nobody",
                "m2n_comm/host/frames/test_wire.py::test_random_bytes_are_frame_errors",
            ),
        ),
        Promise(
            "A frame that is damaged, cut, repeated or out of order is never used.",
            (f"{RECOVERY}test_failover.py::test_every_fault_of_a_frame_is_recovered_from",),
        ),
        Promise(
            "A loss while experts move leaves every expert once in use.",
            (f"{RECOVERY}test_failover.py::test_losses_while_the_expert_table_changes",),
        ),
        Promise(
            "A request that nodes die of is found, and ends alone; a node whose results are not "
            "numbers is replaced.",
            (
                "server/scheduler/planning/policy/test_policy_failover.py::"
                "test_of_many_requests_only_the_one_by_which_nodes_die_ends",
                "server/scheduler/test_service_ends.py::"
                "test_a_node_whose_results_are_not_numbers_is_lost",
            ),
        ),
        Promise(
            "A constrained answer survives a loss with the tokens of an undisturbed one.",
            (
                "system/test_grammars.py::"
                "test_a_constrained_stream_has_the_tokens_of_an_undisturbed_one",
            ),
        ),
        Promise(
            "A node with other weights does not join.",
            (f"{RECOVERY}test_frozen.py::test_a_restarted_node_does_not_mix_other_weights_in",),
        ),
        Promise(
            "Losses and aborts leak nothing: memory, descriptors, blocks.",
            (f"{RECOVERY}test_chaos.py::test_a_soak_of_losses_leaks_nothing",),
        ),
        Promise(
            "A rolling restart of pods fails no request.",
            ("system/test_kubernetes.py::test_a_rolling_restart_fails_no_request",),
        ),
    ),
    "Strangers and hostile clients": (
        Promise(
            "Messages are decoded by fixed schemas: any bytes are a typed error, never code.",
            (
                "topspin/test_messages.py::test_random_bytes_are_a_protocol_error",
                "m2n_comm/pairing/test_handshake.py::"
                "test_a_reader_of_any_bytes_raises_only_typed_errors_and_reads_no_more_than_it_may",
            ),
        ),
        Promise(
            "Lengths are checked before memory is taken.",
            (
                "m2n_comm/host/test_tcp_frames.py::"
                "test_random_headers_take_no_more_memory_than_a_window",
            ),
        ),
        Promise(
            "An address that others can reach needs keys, inside and outside.",
            (
                "topspin/processes/test_secure_channel.py::test_addresses_that_others_reach_need_keys",
                f"{HTTP}test_auth.py::test_a_host_that_others_reach_needs_keys",
            ),
        ),
        Promise(
            "A stranger on the network is refused and disturbs nobody; keys are replaced while the "
            "engine serves.",
            (
                "system/test_hosts.py::test_keys_are_rotated_under_load",
                "system/test_hosts.py::test_a_stranger_on_the_network_is_refused",
                "m2n_comm/pairing/test_keyed.py::"
                "test_strangers_are_refused_at_either_end_and_disturb_nobody",
            ),
        ),
        Promise(
            "Every route but those of probes, and the page's files, needs a key.",
            (f"{HTTP}test_auth.py::test_every_route_but_those_of_probes_needs_a_key",),
        ),
        Promise(
            "Tenants share no cached prefix and no stored response.",
            (
                f"{HTTP}test_auth.py::test_tenants_share_no_cached_prefix",
                f"{HTTP}test_auth.py::test_tenants_do_not_see_each_others_responses",
            ),
        ),
        Promise(
            "No grammar ends a process, holds others up or keeps memory.",
            ("system/test_hostile_grammars.py::test_no_grammar_harms_others",),
        ),
        Promise(
            "A template runs in a sandbox, and no request replaces it or shadows its machinery.",
            ("models/text/test_chat_template.py::test_a_request_may_not_shadow_the_machinery",),
        ),
        Promise(
            "What is ambiguous or endless in HTTP is refused: heads, chunks, trickling bodies.",
            (
                f"{HTTP}test_request_reader.py::test_what_rfc_9112_forbids_is_refused",
                f"{HTTP}test_request_reader.py::test_small_chunks_are_counted",
                "server/gateway/test_connections.py::"
                "test_a_body_that_comes_byte_by_byte_is_cut_off",
            ),
        ),
        Promise(
            "Any body is answered or refused with a 4xx.",
            ("server/gateway/bodies/test_any_body.py::test_any_body_is_answered_or_refused",),
        ),
        Promise(
            "Errors tell clients nothing of processes, hosts or bugs.",
            ("server/gateway/test_errors.py::test_a_bug_is_a_500_that_tells_nothing",),
        ),
        Promise(
            "A client that reads nothing, or too slowly, loses its stream; one that leaves frees "
            "its work.",
            (
                "server/gateway/test_connections.py::test_a_client_that_never_reads_loses_its_stream",
                "server/gateway/test_engine_client.py::"
                "test_a_client_that_reads_too_slowly_loses_its_request",
                "server/gateway/test_connections.py::test_a_client_that_leaves_frees_its_choices",
            ),
        ),
    ),
    "Overload": (
        Promise(
            "More load than can be served costs no goodput: who would wait too long is told so "
            "at once, and when to come again.",
            (
                f"{OVERLOAD}test_more_than_it_can_serve_costs_no_goodput",
                f"{OVERLOAD}test_who_is_refused_is_told_when_to_come_again",
            ),
        ),
        Promise(
            "Work whose time is over reaches no node.",
            (f"{OVERLOAD}test_a_request_whose_time_is_over_before_its_turn_gets_to_no_node",),
        ),
        Promise(
            "A tenant's flood leaves the others their share.",
            (
                f"{OVERLOAD}test_a_flood_leaves_another_tenant_its_share",
                f"{OVERLOAD}test_shares_are_in_proportion_to_weights",
            ),
        ),
        Promise(
            "A long prompt, many choices or a full cache hold up nobody for ever.",
            (
                f"{OVERLOAD}test_a_long_prompt_holds_up_no_short_ones",
                f"{OVERLOAD}test_many_choices_hold_up_no_request",
                f"{OVERLOAD}test_a_request_without_room_lets_some_others_pass_and_then_none",
                "server/scheduler/planning/policy/test_policy_cache.py::"
                "test_a_request_is_preempted_at_most_so_often",
            ),
        ),
    ),
}


class Outcome(NamedTuple):
    """How the cases of one test ended, and the figures that they told."""

    num_passed: int
    num_failed: int
    num_skipped: int
    figures: tuple[str, ...]


def all_tests(words: Sequence[str] = ()) -> list[str]:
    """Return the tests of the promises that have one of `words`, as pytest names them.

    Without words: of all promises.
    """
    promises = [promise for each in PROMISES.values() for promise in each]
    asked = [each for each in promises if not words or any(word in str(each) for word in words)]
    found = (test for promise in asked for test in promise.tests)
    return [f"tests/{test}" for test in dict.fromkeys(found)]


def measure(words: Sequence[str]) -> dict[str, Outcome]:
    """Run the tests of promises with one of `words`; returns their outcomes by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *all_tests(words)]
        subprocess.run(command, cwd=ROOT, check=False)
        return read_report(report.read_text())


def read_report(text: str) -> dict[str, Outcome]:
    """Return the outcomes in a report of pytest (xunit1), by the tests' names in the table."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    figures: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.fromstring(text).iter("testcase"):
        module = case.attrib["classname"].replace(".", "/")
        name = f"{module.removeprefix('tests/')}.py::{case.attrib['name'].partition('[')[0]}"
        failed = case.find("failure") is not None or case.find("error") is not None
        place = 1 if failed else 2 if case.find("skipped") is not None else 0
        counts[name][place] += 1
        told = case.iterfind("properties/property")
        figures[name] += [each.attrib["value"] for each in told if each.attrib["name"] == "figure"]
    return {name: Outcome(*found, tuple(figures[name])) for name, found in counts.items()}


def page(outcomes: dict[str, Outcome], before: str = "") -> str:
    """Return docs/promises.md; promises whose tests were not run keep their row of `before`."""
    kept = {row.split(" | ")[0]: row for row in before.splitlines() if row.startswith("| ")}
    num_promises = sum(map(len, PROMISES.values()))
    lines = [
        "# Promises",
        "",
        f"{num_promises} promises of reliability and security, the tests that would fail if one",
        "were broken, and what these showed when the page was written, on two cores",
        "(`python -m tests.system.docs.promises` writes it).",
    ]
    for title, promises in PROMISES.items():
        lines += ["", f"## {title}", "", "| promise | tests | result |", "|---|---|---|"]
        for promise in promises:
            if promise.tests[0] not in outcomes and f"| {promise.text}" in kept:
                lines.append(kept[f"| {promise.text}"])
                continue
            results = [outcomes.get(test, Outcome(0, 0, 0, ())) for test in promise.tests]
            tests = "<br>".join(f"`{test}`" for test in promise.tests)
            lines.append(f"| {promise.text} | {tests} | {_result(results)} |")
    return "\n".join(lines) + "\n"


def _result(outcomes: Iterable[Outcome]) -> str:
    found = list(outcomes)
    passed, failed, skipped = (sum(each[idx] for each in found) for idx in range(3))
    words = [f"{passed} cases pass"]
    words += [f"**{failed} fail**"] if failed else []
    words += [f"{skipped} skipped"] if skipped else []
    if any(sum(each[:3]) == 0 for each in found):
        words.append("**not run**")
    return "; ".join([", ".join(words), *(text for each in found for text in each.figures)])


def main(words: Sequence[str]) -> int:
    """Run the tests and write the page; returns 0 if all passed."""
    outcomes = measure(words)
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(page(outcomes, before), encoding="utf-8")
    return int(any(each.num_failed for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
