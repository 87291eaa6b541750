"""The drafter that a node's configuration asks for, a draft model among them.

Owns the choice of the draft model's checkpoint, precision, cache and growth by the settings, and
whether it computes in the attention node's process or on a draft node; the same for the head of
multi-token prediction of the checkpoint itself. Composed with attention nodes by
beside_attention.py and app.launch; these nodes do not know of draft models.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from attention_nodes.step.kv_cache import AS_THE_MODEL, bytes_per_block, layer_specs
from attention_nodes.worker import text_drafter
from draft_nodes.asking import AskingDrafter
from draft_nodes.model import DraftModel, Settings
from draft_nodes.mtp import MtpDrafter, load_mtp_model
from kernels.runtime import open_runtime
from models.description.config import ModelConfig, load_model_config
from models.quantised.precision import checkpoint_rules
from spec_decode.draft import Drafter
from spec_decode.forest import MAX_CHUNK, MIN_CHUNK, Growth
from spec_decode.joined import JoinedDrafter
from spec_decode.serial import SerialDrafter
from spec_decode.suffix import SuffixDrafter, limits_of
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.precision import rules_of
from topspin.plan.spec import NodeConfig
from topspin.plan.speculation import SELF_INT4, Speculation, cached_tokens
from topspin.processes.channel import ControlClient

if TYPE_CHECKING:  # engines of one host have no keys, and may lack the package that reads them
    from topspin.processes.keys import KeyDirectory

DEFAULT_WIDTH: Final = 4
MEMORY_SHARE: Final = 8
"""Where the attention node's own cache takes what is left of a GPU, a draft model's takes one part
in so many of what is free before: the target's weights and larger cache come after it."""


def make_drafter(
    config: NodeConfig, model_path: Path, *, keys: KeyDirectory | None = None
) -> Drafter | None:
    """Return what drafts for an attention node of the model at `model_path`; None: nothing does.

    `keys` are for a draft node on another host. Without draft nodes a draft model is loaded here,
    which takes a while. Raises ConfigError if it does not fit the model.
    """
    speculation = config.speculation
    if speculation is None or not speculation.computes:
        return text_drafter(config, model_path)
    if speculation.method == "mtp":
        return _head_drafter(config, speculation, model_path)
    modelled = _model_drafter(config, speculation, model_path, keys)
    if speculation.method == "draft_model":
        return modelled
    return JoinedDrafter([SuffixDrafter(limits_of(speculation)), modelled])


def _model_drafter(
    config: NodeConfig, speculation: Speculation, model_path: Path, keys: KeyDirectory | None
) -> Drafter:
    """Return what asks a draft node, or has the draft model here."""
    if config.draft_address is not None:
        target = load_model_config(model_path, config.model.hf_overrides)
        assert config.draft_group is not None, "it comes with the address"
        connect = partial(ControlClient, keys=keys, server=config.draft_group)
        return AskingDrafter(config.draft_address, target.vocab_size, connect=connect)
    if config.node.num_threads is not None:
        torch.set_num_threads(config.node.num_threads)
    draft = load_model_config(*_draft_checkpoint(config, speculation, model_path))
    model = load_draft_model(
        config, speculation, model_path, num_slots=_num_slots(config, model_path, draft)
    )
    return SerialDrafter(model, growth_of(speculation), max_length=model.max_length)


def _head_drafter(config: NodeConfig, speculation: Speculation, model_path: Path) -> Drafter:
    """Return the drafter that computes with the head that the checkpoint carries."""
    if config.node.num_threads is not None:
        torch.set_num_threads(config.node.num_threads)
    target = load_model_config(model_path, config.model.hf_overrides)
    growth = growth_of(speculation)
    # The most rows of a pass: all sequences' leaves, or what a text and the others feed.
    each = max(MIN_CHUNK, growth.width)
    model = load_mtp_model(
        config,
        model_path,
        num_slots=_num_slots(config, model_path, target),
        max_rows=MAX_CHUNK + each * config.attention.max_num_seqs,
    )
    return MtpDrafter(model, growth)


def _num_slots(config: NodeConfig, model_path: Path, draft: ModelConfig) -> int:
    """Return the tokens for which what drafts beside an attention node has room.

    As many as the node's own cache has. If that is measured, which happens later: as many as a
    draft node has room for, in MEMORY_SHARE at most.
    """
    node = config.attention
    dtype: torch.dtype = getattr(torch, config.model.dtype)

    def token_bytes(model: ModelConfig, kept: KvCacheSpec = AS_THE_MODEL) -> int:
        return bytes_per_block(layer_specs(model, dtype, kept), block_size=1)

    if node.kv_cache_bytes is not None:
        target = load_model_config(model_path, config.model.hf_overrides)
        block_size = config.kv_cache.block_size
        num_blocks = node.kv_cache_bytes // (block_size * token_bytes(target, config.kv_cache))
        return num_blocks * block_size
    free = open_runtime(node.device, node.kernels).memory().free
    return min(
        cached_tokens(node.max_num_seqs, config.model.max_model_len),
        free // MEMORY_SHARE // token_bytes(draft),
    )


def _draft_checkpoint(
    config: NodeConfig, speculation: Speculation, model_path: Path
) -> tuple[Path, dict[str, Any] | None]:
    """Return the draft model's directory and overrides, which are the target's for itself only."""
    assert speculation.model is not None
    if speculation.model == SELF_INT4:
        return model_path, config.model.hf_overrides
    return Path(speculation.model), None


def load_draft_model(
    config: NodeConfig, speculation: Speculation, model_path: Path, *, num_slots: int
) -> DraftModel:
    """Load the draft model for the model at `model_path`, with room for `num_slots` tokens.

    It computes on the node's device. Raises ConfigError if it does not fit the model or the device.
    """
    is_self = speculation.model == SELF_INT4
    place = config.node.place
    draft_path, overrides = _draft_checkpoint(config, speculation, model_path)
    # On the CPU the fastest, whatever the target needs: a draft's sums may have any order.
    kernels = place.kernels if place.is_device else "cpu"
    quantization = "int4" if is_self else speculation.quantization
    if quantization is None:
        own = checkpoint_rules(draft_path, load_model_config(draft_path, overrides))
        precision = own.get(kernels, ())
    else:
        precision = rules_of(quantization)
    model = DraftModel.load(
        draft_path,
        Settings(
            dtype=getattr(torch, config.model.dtype),
            num_slots=num_slots,
            max_length=config.model.max_model_len,
            kernels=kernels,
            device=place.device,
            slow=config.node.slow,
            precision=precision,
            recordings=config.execution.recordings,
            hf_overrides=overrides,
        ),
    )
    num_tokens = load_model_config(model_path, config.model.hf_overrides).vocab_size
    if model.config.vocab_size != num_tokens:
        raise ConfigError(
            f"the draft model {speculation.model} has a vocabulary of {model.config.vocab_size} "
            f"tokens, {model_path} one of {num_tokens}"
        )
    return model


def growth_of(speculation: Speculation) -> Growth:
    """Return how trees grow: without branches one leaf at a time, which has one child."""
    most = speculation.num_speculative_tokens
    passes = speculation.draft_passes or most
    if not speculation.branches:
        return Growth(passes=passes, width=1, num_top=1)
    width = speculation.draft_width or DEFAULT_WIDTH
    return Growth(passes=passes, width=width, num_top=most)
