"""The device, kernels and room of a node's draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from draft_nodes import drafter as drafter_module
from draft_nodes.drafter import MEMORY_SHARE, load_draft_model, make_drafter
from draft_nodes.model import DraftModel, Settings
from kernels.runtime import DeviceMemory, HostRuntime
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from tests.structs import changed
from topspin.plan.spec import NodeConfig
from topspin.plan.speculation import CACHED_TOKENS_PER_SEQUENCE, Speculation

SELF = Speculation(method="draft_model", model="self-int4")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings of all draft models that are asked for; none is loaded."""

    class Loaded:
        max_length = 100

        def __init__(self, path: Path) -> None:
            self.config = load_model_config(path)

    def load(path: Path, settings: Settings) -> Any:
        found.append(settings)
        return Loaded(path)

    found: list[Settings] = []
    monkeypatch.setattr(DraftModel, "load", load)
    return found


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., NodeConfig]:
    """Return what makes an attention node's configuration, with other fields of the node."""
    path = make_checkpoint(tmp_path, "llama")

    def make(**fields: Any) -> NodeConfig:
        config = engine_config(path, speculation=SELF).for_node()
        return msgspec.structs.replace(config, node=msgspec.structs.replace(config.node, **fields))

    return make


@pytest.mark.parametrize(
    ("device", "kernels", "wanted"),
    [
        ("cpu", "cpu", "cpu"),
        ("cpu", "deterministic", "cpu"),
        ("cpu", "triton", "triton"),
        ("cuda:1", "triton", "triton"),
    ],
)
def test_it_computes_on_its_nodes_device(
    config_of: Callable[..., NodeConfig],
    asked: list[Settings],
    device: str,
    kernels: str,
    wanted: str,
) -> None:
    config = config_of(device=device, kernels=kernels)
    load_draft_model(config, SELF, Path(config.model.path), num_slots=7)
    (settings,) = asked
    assert (settings.device, settings.kernels, settings.num_slots) == (device, wanted, 7)


def test_only_the_served_model_itself_gets_its_overrides(
    config_of: Callable[..., NodeConfig], asked: list[Settings]
) -> None:
    config = config_of()
    path, overrides = Path(config.model.path), {"max_position_embeddings": 512}
    config = changed(config, {"model.hf_overrides": overrides})
    for speculation in (SELF, msgspec.structs.replace(SELF, model=str(path))):
        load_draft_model(config, speculation, path, num_slots=7)
    assert [settings.hf_overrides for settings in asked] == [overrides, None]


@pytest.mark.parametrize(("dtype", "number_bytes"), [("auto", 4), ("fp8", 1)])
def test_beside_a_cache_of_known_size_it_has_room_for_as_many_tokens(
    config_of: Callable[..., NodeConfig], asked: list[Settings], dtype: str, number_bytes: int
) -> None:
    config = changed(config_of(kv_cache_bytes=10_000), {"kv_cache.dtype": dtype})
    make_drafter(config, Path(config.model.path))
    model = load_model_config(Path(config.model.path))
    token_bytes = 2 * number_bytes * model.num_layers * model.kv_size
    (settings,) = asked
    assert settings.num_slots == 10_000 // (4 * token_bytes) * 4 > 0


@pytest.mark.parametrize("is_short", [True, False])
def test_beside_a_cache_that_takes_what_is_left_it_has_a_share_of_what_is_free(
    config_of: Callable[..., NodeConfig],
    asked: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    is_short: bool,
) -> None:
    config = config_of(device="cuda:1", kernels="triton", kv_cache_bytes=None, max_num_seqs=6)
    model = load_model_config(Path(config.model.path))
    token_bytes = 2 * 4 * model.num_layers * model.kv_size
    free = 500 * token_bytes * MEMORY_SHARE + 1 if is_short else 2**40

    class Gpu(HostRuntime):
        def memory(self) -> DeviceMemory:
            return DeviceMemory(total=2**41, free=free)

    opened = []

    def open_runtime(*where: str) -> Gpu:
        opened.append(where)
        return Gpu()

    monkeypatch.setattr(drafter_module, "open_runtime", open_runtime)
    make_drafter(config, Path(config.model.path))
    (settings,) = asked
    assert opened == [("cuda:1", "triton")]
    length = config.model.max_model_len
    assert length < CACHED_TOKENS_PER_SEQUENCE
    assert settings.num_slots == (500 if is_short else 6 * length)
    assert settings.dtype == torch.float32
