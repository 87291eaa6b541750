"""topspin bench spec: paired intervals, counters of drafts, the refusal, and a whole small run."""

from __future__ import annotations

import json
import math
import shlex
from functools import partial
from pathlib import Path

import pytest

from app.cli.main import main
from benchmarks.experiment import can_draw
from benchmarks.servers.topspin import Metrics
from benchmarks.speculation import command as spec
from benchmarks.speculation.figures import (
    NothingAccepted,
    ServerPhase,
    VerifiedDrafts,
    check_accepted,
    paired_ratio,
    summarise,
)
from benchmarks.speculation.prompts import KINDS, PROMPTS_PER_KIND, TEXTS, requests_of
from benchmarks.tables import block
from models.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from topspin.errors import ConfigError, EngineUnavailable

NONE = VerifiedDrafts(0, 0, 0)
SOME = VerifiedDrafts(10, 40, 15)


def test_an_interval_is_students_on_the_logarithms_of_the_rounds_ratios() -> None:
    # Logarithms 0.1, 0.2 and 0.3 of pairs at very different speeds: mean 0.2, s 0.1.
    bases = [10.0, 200.0, 3.0]
    values = [base * math.exp(log) for base, log in zip(bases, (0.1, 0.2, 0.3), strict=True)]
    found = paired_ratio(values, bases)
    half = 4.30265 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.2))
    assert found.low == pytest.approx(math.exp(0.2 - half), rel=1e-5)
    assert found.high == pytest.approx(math.exp(0.2 + half), rel=1e-5)
    assert found.rounds == pytest.approx([math.exp(log) for log in (0.1, 0.2, 0.3)])
    assert paired_ratio([3.0], [2.0]) == (pytest.approx(1.5), None, None, [pytest.approx(1.5)])


def test_counters_are_read_and_their_changes_are_a_phases() -> None:
    name = "topspin_spec_decode_num"
    lines = [
        f'{name}_drafts_total{{model_name="m"}} 12.0',
        f'{name}_draft_tokens_total{{model_name="m"}} 50.0',
        f'{name}_accepted_tokens_total{{model_name="m"}} 20.0',
        f'{name}_accepted_tokens_total{{model_name="other"}} 1.0',
        f'{name}_accepted_tokens_per_pos_total{{model_name="m",position="0"}} 11.0',
    ]
    after = VerifiedDrafts.of(Metrics.read("\n".join(lines) + "\n"))
    assert after == VerifiedDrafts(drafts=12, draft_tokens=50, accepted_tokens=21)
    assert after.since(VerifiedDrafts(2, 10, 6)) == SOME
    with pytest.raises(EngineUnavailable, match="counters of drafts fell"):
        NONE.since(SOME)
    with pytest.raises(EngineUnavailable, match=r"/metrics has no .*draft_tokens_total"):
        VerifiedDrafts.of(Metrics.read(lines[0] + "\n"))


def _phase(
    rate: float,
    tpot_ms: float | None,
    drafts: VerifiedDrafts = NONE,
    answers: tuple[str, ...] = ("a", "b"),
) -> ServerPhase:
    return ServerPhase(rate, tpot_ms, drafts, answers)


ROUNDS = [
    {
        "off": _phase(10.0, 8.0),
        "forced": _phase(20.0, 4.0, SOME),
        "adaptive": _phase(10.0, None, answers=("a", "c")),
    },
    {
        "off": _phase(30.0, 8.0),
        "forced": _phase(60.0, 4.0, SOME, ("a", "c")),
        "adaptive": _phase(30.0, 8.0, answers=("a", "c")),
    },
]


def test_rounds_are_paired_counts_summed_and_answers_compared_with_off() -> None:
    table = summarise(ROUNDS)
    assert table["off"]["output_throughput"] == {"median": 20.0, "rounds": [10.0, 30.0]}
    assert "equal_answers" not in table["off"]
    assert table["off"]["accepted_per_draft"] is None
    forced = table["forced"]
    ratio = forced["output_throughput"]["ratio"]
    assert [ratio["mean"], ratio["low"], ratio["high"], *ratio["rounds"]] == pytest.approx(
        [2.0] * 5
    )
    assert forced["median_tpot_ms"]["ratio"]["mean"] == pytest.approx(0.5)
    assert (forced["drafts"], forced["draft_tokens"], forced["accepted_tokens"]) == (20, 80, 30)
    assert forced["accepted_per_draft"] == 1.5
    assert forced["equal_answers"] == 0.75
    assert table["adaptive"]["equal_answers"] == 0.5
    # One round had no answer of two tokens, so there is no pair.
    assert table["adaptive"]["median_tpot_ms"] is None


def test_what_no_round_or_only_one_has_is_shown() -> None:
    result = {
        "model": "some/where/tiny",
        "servers": {"adaptive": "x"},
        "output_len": 8,
        "rounds_measured": 2,
        "warnings": ["the client was saturated."],
        "concurrencies": {
            "4": {kind: summarise(ROUNDS[:n]) for kind, n in (("chat", 2), ("json", 1))}
        },
    }
    shown = spec.EXPERIMENT.markdown(result)
    assert "| chat | adaptive | 20.0 (1.00x [1.00..1.00]) | - | - | 0 | 50% |" in shown
    assert "| json | forced | 20.0 (2.00x) | 4.00 (0.50x) |" in shown
    assert shown.endswith("Warning: the client was saturated.")


def test_a_forced_server_that_accepts_nothing_is_no_result() -> None:
    drafted = VerifiedDrafts(5, 20, 0)
    turns = {
        "chat": {"off": _phase(1.0, 1.0, SOME), "forced": _phase(1.0, 1.0, drafted)},
        "json": {"off": _phase(1.0, 1.0, SOME), "forced": _phase(1.0, 1.0, NONE)},
    }
    message = r"the forced server accepted no token .* at 16 at once \(20 were drafted\)"
    with pytest.raises(NothingAccepted, match=message):
        check_accepted(turns, "forced", 16)
    turns["json"]["forced"] = _phase(1.0, 1.0, VerifiedDrafts(5, 20, 1))
    check_accepted(turns, "forced", 16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # A byte of text is a token here.
    return make_checkpoint(folder, "qwen3_moe", max_position_embeddings=2048)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_repeat_and_no_two_with_one_salt_are_the_same(kind: str, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_directory(checkpoint)
    made = partial(requests_of, kind, output_len=7, tokenizer=tokenizer, seed=[3, 1])
    asked = made(2 * PROMPTS_PER_KIND + 1, salt="x")
    assert asked == made(2 * PROMPTS_PER_KIND + 1, salt="x")
    salts = [each.extra_body["cache_salt"] for each in asked]
    pairs = {(salt, str(each.prompt)) for salt, each in zip(salts, asked, strict=True)}
    assert len(pairs) == len(asked) == 2 * PROMPTS_PER_KIND + 1
    assert len(set(salts)) == 3
    assert not set(salts) & {each.extra_body["cache_salt"] for each in made(9, salt="y")}
    assert {(each.extra_body["temperature"], each.max_tokens) for each in asked} == {(0.0, 7)}


def test_every_kind_has_as_many_prompts() -> None:
    assert [len(set(texts)) for texts in TEXTS.values()] == [PROMPTS_PER_KIND] * 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; it must be above 0"),
        (["--output-len", "-1"], "--output-len is -1"),
        (["--concurrencies", "1,x"], "--concurrencies 1,x: not numbers"),
        (["--config", '{"method": "crystal ball"}'], "crystal ball"),
        (["--speculative-config=off"], "the benchmark sets it itself; see --config"),
        (["--port", "8000"], "--port: the benchmark sets it itself"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(
    flags: list[str], message: str, checkpoint: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec.main([str(checkpoint), *flags])


def words_of(plan: spec.SpeculationFlags, name: str) -> str:
    """Return the command of a server up to its port, which is another each time."""
    return shlex.join(plan.server(name).words[:-2])


def test_the_servers_differ_in_their_speculation_only(checkpoint: Path) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}'
    plan = spec.SpeculationFlags.of([str(checkpoint), "--config", config, "--expert-nodes", "2"])
    commands = {name: words_of(plan, name) for name in plan.servers}
    shared = {command.replace(plan.servers[name], "X") for name, command in commands.items()}
    assert {text.replace("'X'", "X") for text in shared} == {
        commands["off"].replace(" off ", " X ")
    }
    assert commands["off"].endswith("--speculative-config off --expert-nodes 2")
    assert json.loads(plan.servers["forced"]) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    assert json.loads(plan.servers["adaptive"]) == {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("flags", [["--draft-nodes", "1"], ["--draft-nodes=1"]])
def test_with_draft_nodes_a_server_drafts_serially(checkpoint: Path, flags: list[str]) -> None:
    config = '{"method": "draft_model", "model": "self-int4"}'
    plan = spec.SpeculationFlags.of(
        [str(checkpoint), "--config", config, *flags, "--expert-nodes", "2"]
    )
    assert list(plan.servers) == ["off", "forced", "adaptive", "serial"]
    assert plan.servers["serial"] == plan.servers["forced"]
    assert words_of(plan, "serial").endswith(" --expert-nodes 2")
    assert "--draft-nodes" not in words_of(plan, "serial")
    assert "--draft-nodes" in words_of(plan, "forced")


def _rounds(monkeypatch: pytest.MonkeyPatch, *accepted: int | BaseException) -> None:
    """Let the servers' turns end at once: a round's accepted tokens, or what ends it."""
    counts = iter(accepted)

    def measured(plan: spec.SpeculationFlags, number: int, warnings: list[str]) -> spec.Round:
        count = next(counts)
        if isinstance(count, BaseException):
            raise count
        drafts = {"off": NONE, "forced": VerifiedDrafts(5, 20, count), "adaptive": NONE}
        turn = {name: _phase(10.0 + number, 4.0, each) for name, each in drafts.items()}
        return {at: dict.fromkeys(KINDS, turn) for at in plan.concurrencies}

    monkeypatch.setattr(spec, "_round", measured)


@pytest.mark.slow
def test_a_refused_run_is_written_with_its_reason_and_fails(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _rounds(monkeypatch, 0, 3)
    assert main(["bench", "spec", str(checkpoint), "--result-dir", str(tmp_path)]) == 1
    assert "the forced server accepted no token of a draft" in capsys.readouterr().err
    result = json.loads((tmp_path / "spec.json").read_text())
    assert (result["rounds_measured"], result["rounds_asked"]) == (1, 5)
    assert "accepted no token of a draft in any kind of prompt at 1 at once" in result["error"]
    # What was refused is no table of the README.
    with pytest.raises(ConfigError, match="accepted no token"):
        block("spec", tmp_path)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (KeyboardInterrupt(), 130),
        pytest.param(SystemExit(143), 143, marks=pytest.mark.slow),
    ],
)
def test_complete_rounds_are_kept_after_an_interrupt(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: BaseException,
    status: int,
) -> None:
    _rounds(monkeypatch, 3, 3, end)
    flags = ["--result-dir", str(tmp_path), "--concurrencies", "1,4"]
    assert spec.main([str(checkpoint), *flags]) == status
    result = json.loads((tmp_path / "spec.json").read_text())
    assert (result["rounds_measured"], result["error"]) == (2, None)
    assert list(result["concurrencies"]) == ["1", "4"]
    assert (tmp_path / "spec.png").exists() == can_draw()


FLAGS = (
    *("--concurrencies", "2", "--rounds", "1", "--output-len", "24", "--quiet"),
    *("--dtype", "float32", "--kv-cache-memory", "16MiB", "--layout", "shared"),
)


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(checkpoint), "--result-dir", str(tmp_path), *FLAGS]
    assert main(["bench", "spec", *flags]) == 0
    result = json.loads((tmp_path / "spec.json").read_text())
    assert (result["rounds_measured"], result["error"]) == (1, None)
    tables = result["concurrencies"]["2"]
    assert tuple(tables) == KINDS
    for servers in tables.values():
        assert list(servers) == ["off", "forced", "adaptive"]
        assert servers["off"]["draft_tokens"] == 0
        for name in ("forced", "adaptive"):
            assert servers[name]["equal_answers"] == 1.0
            assert servers[name]["output_throughput"]["ratio"]["mean"] > 0
    forced = [servers["forced"] for servers in tables.values()]
    assert all(each["accepted_tokens"] <= each["draft_tokens"] for each in forced)
    assert sum(each["accepted_tokens"] for each in forced) > 0
    shown = capsys.readouterr().out
    assert "2 at once" in shown
    assert spec.EXPERIMENT.markdown(result)
