"""The form of cached keys and values, as plans say it: for all layers, and for single ones.

Owns the settings of the paged KV cache. A layer's settings follow from the layer alone: all
attention nodes agree. Knows no tensors. Part of topspin.plan.spec; read by
attention_nodes.step.kv_cache.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from topspin.plan.retrieval import RetrievalPolicy, SpillSpec, parse_spill
from topspin.plan.setting import AUTO, Setting
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
    dtype: Annotated[
        KvDtype,
        Setting(
            "type of cached keys and values; auto: the model's; fp8, which is fp8_e4m3: half the "
            "memory of bf16, with some loss of quality; only on the CPU",
            flag="--kv-cache-dtype",
            name="kv_cache_dtype",
        ),
    ] = "auto"
    retrieval: RetrievalPolicy | None = None
    spill: Annotated[
        SpillSpec | None,
        Setting(
            "directory and size of an unlinked file for all keys and values of an attention node, "
            "--kv-cache-memory of which are in memory, for example /var/tmp:8GiB; host:8GiB beside "
            "a GPU: memory of the host; needs --kv-retrieval-tokens; auto: none",
            flag="--kv-spill-dir DIR:SIZE",
            parse=parse_spill,
            unset=AUTO,
            name="kv_spill",
        ),
    ] = None
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
