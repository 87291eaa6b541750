"""models.sources.hub: the meaning of a model's name, with a hub cache on disk and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from models.sources import hub
from models.sources.hub import cache_root, made_model_path, resolve_model
from topspin.errors import ConfigError

_REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds acme/tiny, in a process that may not use the network."""
    cache = tmp_path / "hub"
    repo = cache / "models--acme--tiny"
    snapshot = repo / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(_REVISION)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "smollm2-moe"
    checkpoint.mkdir()
    with pytest.raises(ConfigError, match=r"without config\.json"):
        resolve_model(str(checkpoint))
    (checkpoint / "config.json").write_text("{}")
    assert resolve_model(str(checkpoint)) == checkpoint
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-moe") == checkpoint


def test_the_default_model_must_have_been_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="topspin pull smollm2-moe"):
        resolve_model("smollm2-moe")
    made = made_model_path("smollm2-moe")
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    assert resolve_model("smollm2-moe") == made == tmp_path / "cache" / "models" / "smollm2-moe"


def test_the_cache_follows_the_environment() -> None:
    assert cache_root({"TOPSPIN_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/topspin")
    assert cache_root({}) == Path.home() / ".cache" / "topspin"


def test_a_hub_id_in_the_cache_needs_no_network(offline_hub: Path) -> None:
    assert resolve_model("acme/tiny") == offline_hub


def test_a_hub_id_that_is_not_cached_is_named_offline(offline_hub: Path) -> None:
    with pytest.raises(ConfigError, match="acme/absent: is not in the local hub cache"):
        resolve_model("acme/absent")


def test_a_snapshot_without_a_config_is_no_checkpoint(offline_hub: Path) -> None:
    (offline_hub / "config.json").unlink()
    (offline_hub / "README.md").write_text("x")
    with pytest.raises(ConfigError, match="acme/tiny"):
        resolve_model("acme/tiny")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "no such directory"),
        ("./nowhere", "no such directory"),
        ("/nowhere/at/all", "no such directory"),
        ("~/nowhere", "no such directory"),
        ("mixtral", "neither a directory"),
        ("a/b/c", "neither a directory"),
        ("acme/..bad", "not a hub id"),
    ],
)
def test_names_that_mean_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_hub: Path, model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve_model(model)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "licence"),
        (RepositoryNotFoundError, "no such model on the hub"),
        (OSError, "cannot be downloaded"),
    ],
)
def test_what_the_hub_answers_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str
) -> None:
    def answer(repo_id: str, **_: Any) -> str:
        if error is OSError:
            raise OSError("disk full")
        response = httpx.Response(404, request=httpx.Request("GET", "http://localhost"))
        raise error("no", response=response)  # type: ignore[call-arg]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(ConfigError, match=f"acme/x: .*{message}"):
        resolve_model("acme/x")


def test_only_safe_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def answer(repo_id: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model("acme/x") == tmp_path
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tiktoken.model",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "tokenizer_loader.pt",
        "modeling_custom.py",
    ]
    chosen = filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(chosen) == names[:5]
