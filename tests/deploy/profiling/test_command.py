"""`topspin profile` on a tiny model, end to end: tables, rallies and links of real parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main as topspin
from deploy.placement.cost import (
    AttentionLayer,
    BatchRows,
    ExpertLayer,
    StepEnds,
    unmeasured,
)
from deploy.placement.devices import LinkProfile, load_profile
from deploy.placement.shapes import ModelShape, precision_by
from deploy.profiling import command
from deploy.profiling.rally import Load, RallyReport, Sample
from deploy.profiling.reports import fastest, rallies_of
from deploy.profiling.solo import Grid
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from topspin.errors import EngineError
from topspin.plan.precision import PrecisionRule

TINY = Grid(
    rows=(1, 4),
    keys=(16, 64),
    chunks=(4, 8),
    starts=(0, 16),
    touched=(1, 4),
    pairs=(1, 2),
    rounds=2,
    steps=2,
    budget_s=1.0,
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_profile_answers_for_the_model_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")
    monkeypatch.setattr(command, "quick_grid", lambda: TINY)
    output = tmp_path / "box.json"
    flags = ["profile", "-o", str(output), "--model", str(path), "--quick", "--dtype", "bfloat16"]
    assert topspin([*flags, "--formats", "none", "--threads", "1"]) == 0
    device = load_profile(output)
    shape = ModelShape.from_config(load_model_config(path))
    plain = precision_by(())
    for role in ("attention", "expert"):
        assert unmeasured(device, shape, plain, role=role, threads=1) == []
    coded = precision_by((PrecisionRule(format="int8", part="experts"),))
    assert unmeasured(device, shape, coded, role="expert", threads=1) == ["experts in int8"]
    rows = BatchRows(decode=2, context=8)
    assert 0 < AttentionLayer(device, shape, 0, plain, threads=1).seconds(rows) < 1
    experts = ExpertLayer(device, shape, 0, "none", threads=1)
    assert 0 < experts.seconds(rows=2, pairs=4, touched=3) < 1
    assert 0 < StepEnds(device, shape, "none", threads=1).seconds(2) < 1
    assert {(each.name, each.shares_cores) for each in device.links} >= {("shm", True)}
    assert {each.micro_batches for each in device.rallies} == {1, 2, 3, 4}
    assert {each.shape for each in device.rallies} == {shape.experts_key()}
    # An attention node has more: the vocabulary of grammars.
    assert device.process.attention > device.process.expert > 20e6

    # A second run with another format adds to the file.
    assert topspin([*flags, "--formats", "int8", "--threads", "1"]) == 0
    both = load_profile(output)
    assert both.formats == ("none", "int8")
    assert len(both.rallies) == len(device.rallies)
    assert {each.format for each in both.tables if each.operation == "experts"} == {"none", "int8"}
    assert set(device.tables) - set(both.tables) <= {
        each for each in device.tables if each.operation == "head"
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--formats", "fp8"), "the kernels cpu have none, int8, int4, mxfp4"),
        (("--threads", "100000"), "--threads 100000"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str], said: str
) -> None:
    assert topspin(["profile", "-o", str(tmp_path / "box.json"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_of_several_models_the_fastest_trip_of_a_link_is_kept() -> None:
    slow, fast, own = (
        LinkProfile(name="tcp", alpha_s=alpha, bytes_per_s=1e9, shares_cores=shares)
        for alpha, shares in ((9e-5, True), (2e-5, True), (4e-5, False))
    )
    assert fastest([slow, fast, own]) == (fast, own)


def test_a_link_that_could_not_be_measured_is_said() -> None:
    sample = Sample(
        load=Load(rows=2, context=8),
        attention_s=1e-4,
        experts_s=1e-4,
        link_s=None,
        fixed_s=1e-4,
        steps_s=[1e-3],
        num_layers=2,
    )
    report = RallyReport(transport="shm", shares_cores=True, samples=[sample])
    unused: Any = None
    with pytest.raises(EngineError, match=r"shm: .* other processes use these cores"):
        rallies_of([report], unused, unused)
