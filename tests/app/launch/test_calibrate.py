"""`--layout auto`: candidates, choice, cache and explanation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.serve import plan_of
from app.launch import calibrate
from app.launch.calibrate import CalibrationError, LayoutCandidate, choose_layout, measure_all
from app.launch.display import CompiledKernels
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from topspin.cores import LayoutChoice
from topspin.plan.precision import rules_of

SHARED = LayoutChoice("shared", "shm")
SPLIT = LayoutChoice("split", "shm")
ALONE = LayoutChoice("shared", "local")


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time."""
    monkeypatch.setattr(calibrate, "LOAD_LIMIT_S", 60.0)
    monkeypatch.setattr(calibrate, "MEASURE_LIMIT_S", 60.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("calibrate") / "tiny", "mixtral")


class Chooser:
    """Chooses with made-up times; keeps the measured layouts and the messages."""

    def __init__(self, checkpoint: Path, cache: Path, times: dict[LayoutChoice, float]) -> None:
        self.lines: list[str] = []
        self.tried: list[LayoutChoice] = []
        self._path = checkpoint
        self._cache = cache
        self._times = times

    def choose(self, *, cores: Sequence[int] = (0, 1), **asked: Any) -> LayoutChoice | None:
        model = load_model_config(self._path)
        return choose_layout(
            asked,
            model,
            self._path,
            lambda choice: plan_of(self._path, measured=choice, **asked),
            emit=self.lines.append,
            measure=self._measure,
            cores=cores,
            cache=self._cache / "layouts.json",
        )

    def _measure(self, candidates: Sequence[LayoutCandidate]) -> list[float]:
        self.tried += [each.choice for each in candidates]
        return [self._times.get(each.choice, 9.0) for each in candidates]


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ({SHARED: 1.0, SPLIT: 2.0, ALONE: 0.92}, SHARED),
        ({SHARED: 1.0, SPLIT: 2.0, ALONE: 0.90}, ALONE),
        ({SHARED: 1.02, SPLIT: 1.0, ALONE: 1.0}, SHARED),
        ({SHARED: 1.1, SPLIT: 1.0, ALONE: 1.0}, SPLIT),
    ],
)
def test_one_process_must_be_a_tenth_faster_and_the_simpler_one_wins_a_tie(
    checkpoint: Path, tmp_path: Path, times: dict[LayoutChoice, float], want: LayoutChoice
) -> None:
    assert Chooser(checkpoint, tmp_path, times).choose() == want


def test_a_choice_is_explained_in_a_line_and_remembered(checkpoint: Path, tmp_path: Path) -> None:
    chooser = Chooser(checkpoint, tmp_path, {SHARED: 1.0, SPLIT: 1.31, ALONE: 0.95})
    assert chooser.choose() == chooser.choose() == SHARED
    assert chooser.tried == [SHARED, SPLIT, ALONE]
    first, second = chooser.lines
    assert first.startswith("layout: shared, 2 threads (measured in 0.")
    assert first.endswith(
        "s; a step takes 1.31x with split, 1+1 threads, 0.95x with one process, 2 threads); "
        "attention and experts have a process each, --transport local puts them in one"
    )
    before = f"layout: shared, 2 threads (measured before: {tmp_path}/layouts.json); "
    assert second.startswith(before)
    assert second.endswith("--transport local puts them in one")
    # Nothing is known for other settings or on other cores.
    chooser.choose(transport="shm")
    chooser.choose(cores=(0, 1, 2))
    assert chooser.tried[3:] == [SHARED, SPLIT, SHARED, SPLIT, ALONE]


def test_many_cores_are_tried_by_halves_too(checkpoint: Path, tmp_path: Path) -> None:
    chooser = Chooser(checkpoint, tmp_path, {LayoutChoice("shared", "shm", 4): 1.0})
    chosen = chooser.choose(cores=range(8))
    assert chosen == LayoutChoice("shared", "shm", 4)
    assert chooser.tried == [
        *(LayoutChoice("shared", "shm", threads) for threads in (None, 4)),
        SPLIT,
        *(LayoutChoice("shared", "local", threads) for threads in (None, 4)),
    ]
    assert chooser.lines[0].startswith("layout: shared, 4 threads ")


def test_a_number_of_threads_that_was_asked_for_stays(checkpoint: Path, tmp_path: Path) -> None:
    chooser = Chooser(checkpoint, tmp_path, {})
    chooser.choose(cores=range(8), num_threads=3)
    assert {each.num_threads for each in chooser.tried if each.layout == "shared"} == {3}
    assert chooser.lines[0].startswith("layout: shared, 3 threads ")


@pytest.mark.parametrize("restart", [True, False])
def test_one_process_is_tried_whether_or_not_it_is_restarted(
    checkpoint: Path, tmp_path: Path, restart: bool
) -> None:
    chooser = Chooser(checkpoint, tmp_path, {ALONE: 0.1})
    assert chooser.choose(restart=restart) == ALONE
    assert chooser.tried == [SHARED, SPLIT, ALONE]
    chooser.choose(restart=not restart)
    assert "measured before" in chooser.lines[1]


@pytest.mark.parametrize(
    ("asked", "cores", "reason"),
    [
        ({"expert_nodes": 2}, (0, 1), "measured for one attention and"),
        ({"transport": "local"}, (0, 1), "nothing to choose with --transport"),
        ({"latency_us": 5}, (0, 1), "the link is emulated"),
        ({}, (0,), "one core"),
    ],
)
def test_the_default_holds_where_nothing_is_measured(
    checkpoint: Path, tmp_path: Path, asked: Any, cores: Sequence[int], reason: str
) -> None:
    chooser = Chooser(checkpoint, tmp_path, {})
    assert chooser.choose(cores=cores, **asked) is None
    [line] = chooser.lines
    assert line.startswith(f"layout: shared, the default ({reason}")


def test_gpus_and_large_experts_are_not_measured(checkpoint: Path) -> None:
    model = load_model_config(checkpoint)
    on_gpu = plan_of(checkpoint, attention_device="cuda")
    assert "only nodes on the CPU" in str(calibrate._reason_against(on_gpu, model, 2))
    plan = plan_of(checkpoint)
    assert calibrate._reason_against(plan, model, 2) is None
    assert model.moe is not None
    each = calibrate.expert_layer_bytes("bfloat16", (), model) // model.moe.num_experts
    most = calibrate.MAX_LAYER_BYTES // each
    large = replace(model, moe=replace(model.moe, num_experts=most + 1))
    assert "so large" in str(calibrate._reason_against(plan, large, 2))
    in_4_bits = plan_of(checkpoint, quantization="int4")
    assert calibrate._reason_against(in_4_bits, large, 2) is None


def test_a_layers_experts_have_the_bytes_of_their_format(checkpoint: Path) -> None:
    model = load_model_config(checkpoint)
    assert model.moe is not None
    hidden, width = model.hidden_size, model.moe.intermediate_size
    plain = 3 * model.moe.num_experts * hidden * width * 2
    assert calibrate.expert_layer_bytes("bfloat16", (), model) == plain
    assert calibrate.expert_layer_bytes("float32", (), model) == 2 * plain
    rules = rules_of("mxfp4")
    assert calibrate.expert_layer_bytes("bfloat16", rules, model) < plain / 2


def test_a_trial_that_fails_leaves_the_default_and_is_not_remembered(
    checkpoint: Path, tmp_path: Path
) -> None:
    chooser = Chooser(checkpoint, tmp_path, {})

    def fail(candidates: Sequence[LayoutCandidate]) -> list[float]:
        raise CalibrationError("it broke")

    chooser._measure = fail  # type: ignore[method-assign]
    assert chooser.choose() is None
    assert chooser.lines == ["layout: shared, the default (not measured: it broke)"]
    assert not list(tmp_path.iterdir())


def candidates(
    path: Path, *choices: LayoutChoice, model_len: int | None = None, num_seqs: int | None = None
) -> list[LayoutCandidate]:
    asked = {"max_model_len": model_len, "max_num_seqs": num_seqs}
    cores = sorted(os.sched_getaffinity(0))
    return [
        calibrate._candidate(
            each, lambda choice: plan_of(path, measured=choice, **asked), path, cores
        )
        for each in choices
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("patience")
def test_real_candidates_are_timed(checkpoint: Path) -> None:
    tried = [SHARED, ALONE, *([SPLIT] if len(os.sched_getaffinity(0)) > 1 else [])]
    for step_s in measure_all(candidates(checkpoint, *tried, model_len=40, num_seqs=3)):
        assert 0 < step_s < 10


def test_a_candidate_that_cannot_run_says_why(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = (sys.executable, "-c", "raise SystemExit('there is no /nowhere')")
    monkeypatch.setattr(calibrate, "module_argv", lambda name: trial)
    with pytest.raises(CalibrationError, match="there is no /nowhere"):
        measure_all(candidates(checkpoint, ALONE))


def test_a_compiled_kernel_renews_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    count = CompiledKernels.line

    def count_slowly(self: CompiledKernels, text: str) -> bool:
        nonlocal now_s
        now_s += 10.0
        return count(self, text)

    monkeypatch.setattr(calibrate.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(CompiledKernels, "line", count_slowly)
    kernel = "INFO compiled kernel k for this processor"
    for log, is_answered in ((kernel, True), ("INFO loading", False)):
        now_s = 0.0
        script = f"import sys\nfor _ in range(3): print({log!r}, file=sys.stderr)\nprint('yes')"
        trial = subprocess.Popen(
            [sys.executable, "-c", script],
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with trial:
            answers = calibrate._Answers(trial)
            if is_answered:
                assert answers.next(15.0) == b"yes\n"
            else:
                with pytest.raises(CalibrationError, match="too long"):
                    answers.next(15.0)
            trial.communicate()
