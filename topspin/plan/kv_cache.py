"""How attention nodes keep keys and values, as plans say it: for all layers, and for single ones.

Owns the settings of the paged KV cache and the checks that need no node. A layer's settings follow
from the layer alone: all attention nodes agree. Knows no tensors. Part of topspin.plan.spec; read
by attention_nodes.step.kv_cache.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from topspin.errors import ConfigError
from topspin.plan.retrieval import RetrievalPolicy, SpillSpec
from topspin.plan.settings import KvDtype, Section


class KvLayerRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Settings of single layers, which count from 0; what is None is as for all layers.

    `retrieval` false: tokens attend to their whole context in these layers.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    dtype: KvDtype | None = None
    retrieval: bool | None = None


class KvCacheSpec(Section, frozen=True, kw_only=True):
    """The paged KV cache, the same on all attention nodes.

    `dtype` auto: the model's. `retrieval` null: every token attends to its whole context. `spill`
    null: all keys and values are in memory. The last of the `layers` that sets something for a
    layer decides it.
    """

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    dtype: KvDtype = "auto"
    retrieval: RetrievalPolicy | None = None
    spill: SpillSpec | None = None
    layers: tuple[KvLayerRule, ...] = ()

    def dtype_of(self, layer: int) -> KvDtype:
        """Return how keys and values of a layer are kept."""
        asked = [rule.dtype for rule in self.layers if layer in rule.layers]
        return next((each for each in reversed(asked) if each is not None), self.dtype)

    def retrieves(self, layer: int) -> bool:
        """Return whether tokens may attend to a selection of a layer's keys."""
        asked = [rule.retrieval for rule in self.layers if layer in rule.layers]
        default = self.retrieval is not None
        return next((each for each in reversed(asked) if each is not None), default)

    @property
    def fp8_setting(self) -> str | None:
        """Return a setting by which some layer is kept in fp8 (e4m3), for people; None: none."""
        if self.dtype != "auto":
            return f"kv_cache.dtype (--kv-cache-dtype) {self.dtype}"
        for idx, rule in enumerate(self.layers):
            if rule.dtype not in (None, "auto"):
                return f"kv_cache.layers[{idx}].dtype {rule.dtype}"
        return None

    def check(self) -> None:
        """Raise ConfigError, naming the field, for settings that contradict each other."""
        if self.spill is not None and self.retrieval is None:
            raise ConfigError(
                "kv_cache.spill (--kv-spill-dir): without kv_cache.retrieval "
                "(--kv-retrieval-tokens) every token attends to keys that must be in memory"
            )
        if self.spill is not None and self.layers:
            raise ConfigError(
                "kv_cache.layers: with kv_cache.spill (--kv-spill-dir) the keys of all layers must "
                "be searched and of one type"
            )
        for idx, rule in enumerate(self.layers):
            if rule.dtype is None and rule.retrieval is None:
                raise ConfigError(f"kv_cache.layers[{idx}]: give a dtype, or retrieval, or both")
            if rule.retrieval is not None and self.retrieval is None:
                raise ConfigError(
                    f"kv_cache.layers[{idx}].retrieval: kv_cache.retrieval "
                    "(--kv-retrieval-tokens) says how many keys are selected; give it"
                )

    def check_layers(self, windows: tuple[int | None, ...]) -> None:
        """Raise ConfigError if a rule does not fit the layers of a model, by their windows."""
        last = len(windows) - 1
        for idx, rule in enumerate(self.layers):
            beyond = [layer for layer in rule.layers if layer > last]
            if beyond:
                raise ConfigError(
                    f"kv_cache.layers[{idx}]: layer {beyond[0]}: the model has layers 0 to {last}"
                )
            narrow = [layer for layer in rule.layers if windows[layer] is not None]
            if rule.retrieval and narrow:
                raise ConfigError(
                    f"kv_cache.layers[{idx}].retrieval: layer {narrow[0]} has a window of "
                    f"{windows[narrow[0]]} tokens, in which all keys are attended to"
                )
