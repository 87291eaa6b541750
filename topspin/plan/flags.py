"""The table of flags: the fields that they write, and those that stand for several.

Owns the settings of flags that write no field of a plan (Shorthand), and the list of all settings,
in the groups of the help. The others stand with their fields. Knows no command line:
app.cli.flags derives it from here, topspin.plan.from_flags makes the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from topspin.cores import DEFAULT_LAYOUT, Layout
from topspin.devices import CPU, KernelName
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.precision import Format
from topspin.plan.retrieval import MAX_TOKENS, MIN_TOKENS
from topspin.plan.setting import AUTO, Field, Setting, fields_of
from topspin.plan.settings import (
    ExecutionPolicy,
    FailoverPolicy,
    GatewaySection,
    Natural,
    SchedulingPolicy,
    Section,
)
from topspin.plan.spec import AttentionNode, EnginePlan, LinkSpec, PlannedModel

NumNodes = Annotated[int, Meta(ge=1, le=1024)]


class Shorthand(Section, frozen=True, kw_only=True):
    """Few words for many fields of a plan: equal nodes of each role, and one precision.

    `kernels` of all nodes, `expert_kernels` of expert nodes only; None: by their devices.
    """

    quantization: Annotated[
        Format | None,
        Setting(
            "keep experts, MLPs and attention projections in 8 or 4 bits, quantised while they "
            "are read: faster and smaller, with some loss of quality (`topspin bench "
            "quantization MODEL` measures it); auto: as the checkpoint has them",
            flag="--quantization",
            unset=AUTO,
            group="model",
        ),
    ] = None
    attention_nodes: Annotated[
        NumNodes,
        Setting(
            "attention nodes, each a replica with its own KV cache", flag="--attention-nodes M"
        ),
    ] = 1
    expert_nodes: Annotated[
        NumNodes,
        Setting("expert nodes, which share the routed experts", flag="--expert-nodes N"),
    ] = 1
    draft_nodes: Annotated[
        Annotated[int, Meta(ge=0, le=1024)],
        Setting(
            "draft nodes, which compute the draft model of --speculative-config while attention "
            "nodes verify; 0: it computes on the attention nodes, in turns with them",
            flag="--draft-nodes D",
        ),
    ] = 0
    redundant_experts: Annotated[
        Natural,
        Setting(
            "slots per MoE layer, over all expert nodes, for second copies",
            flag="--redundant-experts R",
        ),
    ] = 0
    attention_device: Annotated[
        str,
        Setting(
            "where attention nodes compute: cpu, cuda:N, or cuda, which gives each a GPU of its "
            "own",
            flag="--attention-device DEVICE",
        ),
    ] = CPU
    expert_device: Annotated[
        str,
        Setting(
            "where expert nodes compute: cpu, cuda:N, or cuda: with --transport local (auto: one "
            "attention node on cuda) the same GPU, else one each of their own",
            flag="--expert-device DEVICE",
        ),
    ] = CPU
    layout: Annotated[
        Layout | None,
        Setting(
            "nodes of this host take turns on all cores, or have cores of their own; auto: "
            f"measured at the first start and remembered ({DEFAULT_LAYOUT} where it cannot be)",
            flag="--layout",
            unset=AUTO,
        ),
    ] = None
    kv_retrieval_tokens: Annotated[
        Annotated[int, Meta(ge=MIN_TOKENS, le=MAX_TOKENS)] | None,
        Setting(
            "keys that a decoded token attends to in a longer context, found by product-quantised "
            "codes; auto: all",
            flag="--kv-retrieval-tokens TOKENS",
            unset=AUTO,
            group="kv_cache",
        ),
    ] = None
    kernels: KernelName | None = None
    expert_kernels: KernelName | None = None


GROUPS: Final = {
    "model": "The checkpoint, and how it is read.",
    "nodes": "Equal nodes of each role, and where they compute.",
    "link": "The data plane between attention and expert nodes.",
    "kv_cache": "The paged KV cache of each attention node.",
    "scheduling": "Limits of the batch and of the queue, of tokens per attention node and step.",
    "speculation": "Speculative decoding: guess tokens and check several in one step.",
    "execution": "How nodes compute.",
    "failover": "The reaction to the loss of a node.",
    "gateway": "The HTTP side.",
}
GATEWAY: Final = "gateway"
_PARTS: Final[tuple[tuple[str, type[Section]], ...]] = (
    ("model", PlannedModel),
    ("nodes", Shorthand),
    ("nodes", AttentionNode),
    ("link", LinkSpec),
    ("kv_cache", KvCacheSpec),
    ("scheduling", SchedulingPolicy),
    ("execution", ExecutionPolicy),
    ("failover", FailoverPolicy),
)
# Parts of a plan that are asked for whole, if at all.
_WHOLE: Final = ("speculation", "balance", "trace")
_ENGINE: Final = (
    *(field for group, kind in _PARTS for field in fields_of(kind, group)),
    *(each for each in fields_of(EnginePlan, "speculation") if each.name in _WHOLE),
)
_HTTP: Final = tuple(fields_of(GatewaySection, GATEWAY))
FLAGS: Final = tuple(field for field in (*_ENGINE, *_HTTP) if field.setting is not None)
"""The settings with a flag."""

Part = TypeVar("Part", bound=Section)


def settled(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an engine in `asked` that are not None or "auto".

    Raises ConfigError naming the first that is not of its type, or out of its range.
    """
    return _settled(_ENGINE, asked)


def gateway_of(asked: Mapping[str, Any]) -> GatewaySection:
    """Return the settings of the HTTP side in `asked`; raises ConfigError as settled() does."""
    return msgspec.convert(_settled(_HTTP, asked), GatewaySection)


def _settled(fields: Sequence[Field], asked: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name: field for field in fields}
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise TypeError(f"no settings: {', '.join(unknown)}")
    found = {}
    for name, value in asked.items():
        if value is not None and value != known[name].unset:
            known[name].check(value)
            found[name] = value
    return found


def part(kind: type[Part], asked: Mapping[str, Any], **others: Any) -> Part:
    """Return a part of the plan with its fields of `asked`, which come before those of `others`."""
    names = zip(kind.__struct_fields__, fields_of(kind, ""), strict=True)
    found = {name: asked[field.name] for name, field in names if field.name in asked}
    return kind(**{**others, **found})
