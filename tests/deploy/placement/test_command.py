"""`topspin plan`: its files, what it refuses, and what it says."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.main import main as topspin
from deploy.placement.command import SearchProgress, main
from deploy.placement.devices import save_profile
from deploy.placement.search.search import ImpossibleError
from tests.checkpoints import make_checkpoint
from tests.deploy.placement import samples
from topspin.errors import ConfigError
from topspin.plan.file import read_plan

MODELS = Path(__file__).parent / "models"
MODEL = str(MODELS / "qwen3-30b-a3b")
CLUSTER: dict[str, Any] = {
    "hosts": [
        {
            "name": "box",
            "devices": [{"device": "gpu.json", "count": 2}],
            "links": [{"transport": "cuda_ipc", "alpha_us": 8, "gbps": 2000}],
        }
    ]
}
WORKLOAD: dict[str, Any] = {
    "prompt": {"mean": 500, "p95": 1500},
    "output": {"mean": 150, "p95": 400},
    "arrival_rate": 2.0,
    "targets": {"ttft_s": 2.0, "tpot_s": 0.05},
}

DRAFTS: dict[str, Any] = {"draft_model": MODEL, "acceptance": 0.8, "max_tokens": 4}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with a device's profile."""
    save_profile(samples.gpu(), tmp_path / "gpu.json")
    return tmp_path


def arguments(
    place: Path, *more: str, cluster: object = CLUSTER, workload: object = WORKLOAD
) -> list[str]:
    """Return the command's flags for these files."""
    (place / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (place / "workload.yaml").write_text(yaml.safe_dump(workload))
    flags = ["--cluster", str(place / "cluster.yaml"), "--workload", str(place / "workload.yaml")]
    return [*flags, "--model", MODEL, "-o", str(place / "plan.yaml"), *more]


def test_a_plan_and_its_report_are_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = place / "front.png"
    assert topspin(["plan", *arguments(place, "--picture", str(picture))]) == 0
    plan = read_plan(str(place / "plan.yaml"))
    assert plan.expected is not None
    assert plan.expected.tpot_s <= 0.05
    report = json.loads((place / "plan.json").read_text())
    assert report["engines"][0]["file"] == str(place / "plan.yaml")
    assert report["front"]
    assert any(answer.startswith("Do not disaggregate") for answer in report["answers"])
    assert any("no divergence" in answer for answer in report["answers"])
    lost = {each["kind"]: each["reason"] for each in report["losers"]}
    assert "per hour against" in lost["box: attention on gpu, experts on gpu"]
    (estimated,) = report["estimates"]
    assert estimated.startswith(
        "gpu (literature): attention in none, experts in none, head in none"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Do not disaggregate" in capsys.readouterr().out.replace("\n", " ")


LINK = {"transport": "nixl", "alpha_us": 12, "gbps": 400}


def two_kinds(place: Path, *, count: int = 2) -> dict[str, Any]:
    """Return a cluster whose hosts have no room for the whole model."""
    save_profile(samples.gpu("NVIDIA Wide", memory_gib=24), place / "wide.json")
    save_profile(samples.gpu("NVIDIA Deep", memory_gib=20, gb_per_s=900), place / "deep.json")
    links = CLUSTER["hosts"][0]["links"]
    return {
        "hosts": [
            {"name": name, "count": count, "devices": [{"device": f"{name}.json"}], "links": links}
            for name in ("wide", "deep")
        ],
        "between_hosts": LINK,
    }


def test_an_engine_over_hosts_is_planned_and_reported_in_80_columns(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments(place, "--explain", cluster=two_kinds(place, count=3))) == 0
    plan = read_plan(str(place / "plan.yaml"))
    assert plan.network is not None
    assert len({node.host for node in plan.nodes}) == len(plan.nodes)
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    # Cells break between words only.
    words = {word for line in lines for word in line.split()}
    report = json.loads((place / "plan.json").read_text())
    (engine,) = report["engines"]
    for field in ("hosts", "devices", "precision", "engine", "binding"):
        assert set(engine[field].split()) <= {word.rstrip(".,:;") for word in words} | words
    assert f"{engine['num_attention']} x {engine['num_experts']}" in said
    assert "What binds: " in said
    assert "Runner-up, " in said
    assert "The front" in said
    price = report["price_per_hour"]
    assert engine["price_per_million"] == pytest.approx(
        price / (engine["copies"] * engine["tokens_per_s"] * 3600e-6)
    )


def test_the_report_is_printed_as_json_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(place, "--json")) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((place / "plan.json").read_text())


def test_a_long_search_says_how_it_gets_on() -> None:
    now, out = [0.0], io.StringIO()
    with SearchProgress(out, is_shown=True, clock=lambda: now[0]) as progress:
        for at in (1.0, 1.9, 2.5, 2.6, 4.0):
            now[0] = at
            progress(0)
        assert out.getvalue() == "\r3 engines rated in 2 s\r5 engines rated in 4 s"
    assert out.getvalue().endswith("\r" + " " * 22 + "\r")


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command says of a cluster that it finds no plan for."""
    with pytest.raises(ImpossibleError, match="nothing was written"):
        main(flags)
    return " ".join(capsys.readouterr().out.split())


def test_a_refusal_says_the_smallest_changes_that_would_do(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing holds 54 GiB of experts: more hosts would, or a quarter of the bits."""
    flags = arguments(place, cluster=two_kinds(place, count=1), workload=WORKLOAD)
    said = refusal(flags, capsys)
    assert "No plan: no engine of these hosts meets the targets. The nearest is " in said
    assert re.search(r"experts need 54.0 GiB.*% too much", said)
    for change in (
        r"With \d more hosts? wide \(1 NVIDIA Wide each\): 1 x ",
        "With 4 bits for the experts, if their quality does: 1 x ",
        r"With \d times the memory on every device: 1 x ",
    ):
        assert re.search(change, said), said
    assert "TPOT of" not in said


def test_what_a_target_would_have_to_be_is_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments(place, workload=WORKLOAD | {"targets": {"ttft_s": 2.0, "tpot_s": 0.004}})
    said = refusal(flags, capsys)
    assert re.search(r"TPOT .* ms > 4 ms: .*% too much", said)
    found = re.search(r"With a TPOT of ([\d.]+) s instead of 0.004 s", said)
    assert found is not None, said
    later = WORKLOAD | {"targets": {"ttft_s": 2.0, "tpot_s": float(found[1])}}
    assert main(arguments(place, workload=later)) == 0


@pytest.mark.parametrize(("hidden", "is_taken"), [(256, True), (2048, False)])
def test_drafts_are_decided_and_reported(
    place: Path, capsys: pytest.CaptureFixture[str], hidden: int, is_taken: bool
) -> None:
    """A small draft model pays; one as large as the model does not."""
    config = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
    config |= {"hidden_size": hidden, "num_hidden_layers": 2 if is_taken else 48}
    draft = place / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config))
    asked = {"speculation": DRAFTS | {"draft_model": str(draft)}, "users": 1}
    workload = {k: v for k, v in (WORKLOAD | asked).items() if k != "arrival_rate"}
    assert main(arguments(place, workload=workload)) == 0
    plan = read_plan(str(place / "plan.yaml"))
    assert (plan.speculation is not None) == is_taken
    (said,) = json.loads((place / "plan.json").read_text())["drafts"]
    assert (": taken, serially" in said) == is_taken
    assert ("drafts refused: " in said) != is_taken
    assert said[:60] in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"targets": {"tpot_s": 1e-4}}, "TPOT .* > 0.1 ms: .* of a step"),
        ({"arrival_rate": 1e5}, r"together carry .* of 1e\+05 \(0.1%\); what binds"),
        ({"max_price_per_hour": 0.5}, "cost 2 per hour at least"),
    ],
)
def test_impossible_targets_are_refused_once(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    flags = arguments(place, workload=WORKLOAD | change)
    assert topspin(["plan", *flags]) == 1
    out, err = capsys.readouterr()
    assert re.search(said, " ".join(out.split()))
    assert err.startswith("topspin plan: error: nothing was written: ")
    assert not (place / "plan.yaml").exists()
    assert not (place / "plan.json").exists()


def test_a_model_that_does_not_fit_is_refused_with_its_size(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(samples.gpu(memory_gib=24), place / "gpu.json")
    assert "experts need 54.0 GiB, their nodes have" in refusal(arguments(place), capsys)


@pytest.mark.parametrize(
    ("cluster", "workload", "said"),
    [
        ({"hostz": []}, {}, "unknown field `hostz`"),
        ({}, {"users": 3}, "give arrival_rate or users"),
        ({}, {"prompt": {"mean": 500, "p95": 5}}, "p95 5 is less than the mean"),
        ({}, {"prompt": {"mean": 9, "histogram": [[1, 2]]}}, "give a mean"),
        ({}, {"output": {"mean": 1}}, "answers of one token"),
        ({}, {"prompt": {"mean": 500, "p95": 50000}}, "the model has 40960 positions"),
        ({}, {"max_model_len": 100}, "max_model_len 100"),
        ({"between_hosts": LINK | {"transport": "shm"}}, {}, "shm joins nodes of one host"),
        ({"hosts": [CLUSTER["hosts"][0] | {"addresses": ["a", "b"]}]}, {}, "2 addresses for 1"),
        ({}, {"speculation": DRAFTS | {"acceptance": 1.5}}, r"speculation.acceptance"),
        ({}, {"speculation": DRAFTS | {"draft_model": "a/b"}}, "draft_model a/b: no directory"),
        (
            {},
            {"speculation": DRAFTS | {"draft_model": str(MODELS / "mixtral-8x7b")}},
            "speculation.draft_model .* has a vocabulary of 32000 tokens, the model one of 151936",
        ),
    ],
)
def test_files_with_mistakes_are_refused_by_the_field(
    place: Path, cluster: dict[str, Any], workload: dict[str, Any], said: str
) -> None:
    flags = arguments(place, cluster=CLUSTER | cluster, workload=WORKLOAD | workload)
    with pytest.raises(ConfigError, match=said):
        main(flags)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ({"device": "none.json"}, "none.json"),
        ({"device": "gpu.json", "slow": 2}, "is a GPU; leave them out"),
        ({"device": "gpu.json", "memory": "lots"}, "memory: 'lots' is not a size"),
    ],
)
def test_devices_with_mistakes_are_refused(place: Path, device: dict[str, Any], said: str) -> None:
    host = CLUSTER["hosts"][0] | {"devices": [device]}
    with pytest.raises(ConfigError, match=said):
        main(arguments(place, cluster={"hosts": [host]}))


def sensitivity_file(place: Path, *entries: dict[str, Any]) -> str:
    """Return the flag for a sensitivity file."""
    path = place / "sensitivity.json"
    path.write_text(json.dumps({"model": "m", "positions": 10, "entries": entries}))
    return str(path)


def test_quantisation_is_chosen_where_it_is_allowed(place: Path) -> None:
    config = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    entries = [
        {"layer": layer, "part": part, "format": "int4", "indicator": 1.0, "kl": 1e-4}
        for layer in range(8)
        for part in ("attention", "experts")
    ]
    save_profile(samples.gpu(memory_gib=7), place / "gpu.json")
    measured = ["--sensitivity", sensitivity_file(place, *entries), "--model", str(place)]
    flags = arguments(place, *measured, workload=WORKLOAD | {"max_kl": 0.004})
    assert main(flags) == 0
    plan = read_plan(str(place / "plan.yaml"))
    assert {rule.format for rule in plan.precision} == {"int4"}
    assert plan.expected is not None
    assert plan.expected.kl == pytest.approx(0.0016, abs=0.0008)
    answers = json.loads((place / "plan.json").read_text())["answers"]
    assert any(answer.startswith("Quantise") for answer in answers)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"layer": 48}, "the model has layers 0 to 47"),
        ({"layer": None}, "part experts with layer None"),
        ({"part": "mlp"}, "layer 0 has no part mlp"),
        ({"kl": -1.0}, "kl"),
    ],
)
def test_a_sensitivity_file_of_another_model_is_refused(
    place: Path, entry: dict[str, Any], said: str
) -> None:
    whole = {"layer": 0, "part": "experts", "format": "int4", "indicator": 1.0, "kl": 1e-4}
    path = sensitivity_file(place, whole | entry)
    with pytest.raises(ConfigError, match=said):
        main(arguments(place, "--sensitivity", path))


def test_a_sensitivity_of_another_checkpoint_is_refused(place: Path, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral")
    short = {"prompt": {"mean": 20}, "output": {"mean": 20}}
    flags = arguments(place, "--sensitivity", sensitivity_file(place), workload=WORKLOAD | short)
    flags[flags.index("--model") + 1] = str(path)
    with pytest.raises(ConfigError, match="measured on another checkpoint"):
        main(flags)
