"""The flags of `topspin serve`: their list, their settings, and refused values."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from app.cli import serve as serve_command
from app.cli.flags import add_arguments
from app.cli.main import main
from app.cli.serve import asked_for, serve_config
from tests.app.cli.checkpoint import MIXTRAL, write_checkpoint
from tests.app.cli.test_print_plan import golden


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-moe")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_flags_are_few_and_each_has_a_set_in_the_golden_file() -> None:
    """Settings for few users belong in --plan."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert len([flag for flag in flags if not flag.startswith("--no-")]) <= 56
    sets = " ".join(flags for flags, _ in golden()).split()
    unused = {flag for flag in flags if not {flag, flag.replace("--", "--no-", 1)} & set(sets)}
    assert unused - {flag for flag in flags if flag.startswith("--no-")} == {
        "--print-plan",
        "--api-key",
    }


def test_options_that_change_nothing_are_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    useless = ("--gpu-memory-utilization", "0.9")
    for flags, is_named in (
        ((), False),
        (useless, True),
        (("--attention-device", "cuda", *useless), False),
    ):
        asked_for(parse(str(checkpoint), "--layout", "shared", *flags))
        said = "--gpu-memory-utilization has no effect: attention is not on a GPU"
        assert (said in capsys.readouterr().err) == is_named


def test_the_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["serve", "--help"])
    assert exited.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "auto: 256.0 MiB on the CPU, what fits on a GPU (auto)",
        "address to listen on (127.0.0.1)",
        "(8000)",
        "(off)",
        "{auto,fp8,int4,int8,mxfp4,none}",
        "--no-enable-prefix-caching",
        "link: The data plane between attention and expert nodes.",
    ):
        assert words in shown


def test_a_model_is_named_as_users_name_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "resolve_model", lambda name: checkpoint)
    for model, name in (
        ((), "smollm2-moe"),
        (("organisation/model",), "organisation/model"),
        ((str(checkpoint),), "tiny-moe"),
    ):
        config = serve_config(asked_for(parse(*model, "--layout", "shared")))
        assert config.gateway.served_names == (name,)
        assert config.plan.model.path == str(checkpoint.resolve())


def test_a_draft_model_of_another_vocabulary_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    draft = write_checkpoint(tmp_path / "draft", {**MIXTRAL, "vocab_size": 300})
    flag = json.dumps({"method": "draft_model", "model": str(draft)})
    assert main(["serve", str(checkpoint), "--speculative-config", flag]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"the draft model {draft} has a vocabulary of 300 tokens, " in last
    assert "one of 260: they must have the same tokens" in last


def test_processes_get_the_draft_models_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_checkpoint(tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    for name, path in (("./draft", str(draft)), ("self-int4", "self-int4")):
        flag = json.dumps({"method": "draft_model", "model": name})
        for device in ("cpu", "cuda"):
            flags = ("--layout", "shared", "--attention-device", device)
            asked = asked_for(parse(str(checkpoint), *flags, "--speculative-config", flag))
            speculation = serve_config(asked).plan.speculation
            assert speculation is not None
            assert speculation.model == path
