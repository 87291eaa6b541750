"""The weights of each role, read from a checkpoint into their serving layout.

Owns the sets of tensors that the attention and expert roles read, and how they are fused: q, k and
v rows in one matrix, gate above up rows in another. Knows no device policy and computes nothing.
Each node calls its role's loader, which never reads the other's tensors.

Shapes: V vocabulary, H hidden, E experts, F an expert's (or the dense MLP's) width,
q = heads * head_dim, kv = kv_heads * head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_sources import ExpertSources, moe_block
from models.checkpoints.head_order import HeadOrder, LatentOrder
from models.checkpoints.tensor_names import EMBED, FINAL_NORM, LM_HEAD, layer_name
from models.description.config import ModelConfig
from models.quantised.matrices import Matrix, MatrixReader, Source
from topspin.errors import ConfigError
from topspin.plan.precision import UNQUANTISED, Format, Part, Rules, format_of

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertWeights:
    """The expert that every token takes: gate_up [2F, H], down [H, F], and the row [1, H] of its
    sigmoid gate, if it has one."""

    gate_up: Matrix
    down: Matrix
    gate: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMlpWeights:
    """The MLP of a layer without experts: gate_up [2F, H], down [H, F], biases [2F], [H]."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """A router's weight [E, H], the bias [E] of its logits and that of its scores, f32[E]."""

    weight: Tensor
    bias: Tensor | None
    score_bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWeights:
    """What makes queries, keys and values of latents; see models.description.parts.LatentConfig.

    queries [N * (nope + rope), q rank], None if they have no latent. to_latent [N, rank, nope]
    turns a query's first numbers into those that are multiplied with latents; to_values
    [N, value, rank] makes a head's value of a latent.
    """

    queries: Matrix | None
    to_latent: Tensor
    to_values: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The attention role's part of one layer.

    input_norm [H], qkv [q + 2 kv, H] (query rows, then key, then value; the numbers of query and
    key heads in the order of models.checkpoints.head_order, those of their bias and norms too),
    qkv_bias [q + 2 kv], o [H, q], o_bias [H], q_norm and k_norm [head_dim] ("head") or [q], [kv]
    ("full"), sinks f32[heads], post_norm [H] (before the MLP). A layer has router (and maybe
    shared) or dense, never both.

    With `latent`, qkv is [q rank + rank + rope, H], rows of the queries' latent (without one, of
    the queries: N * (nope + rope)), then of the latent and the key that heads share; q_norm
    [q rank] and k_norm [rank] are those of the latents, and o is [H, N * value].
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    post_norm: Tensor
    router: RouterWeights | None
    shared: SharedExpertWeights | None
    dense: DenseMlpWeights | None
    latent: LatentWeights | None = None


class _Attention(TypedDict):
    """The fields of LayerWeights that are read with its attention."""

    qkv: Matrix
    qkv_bias: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    latent: LatentWeights | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """All but the routed experts: embed [V, H], lm_head [V, H] (the same tensor object as embed
    when tied, or the codes of both), final_norm [H]. If `layers` is not a list, each is read when
    it is taken."""

    embed: Tensor
    lm_head: Matrix
    final_norm: Tensor
    layers: list[LayerWeights] | Iterator[LayerWeights]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayerWeights:
    """The experts of one MoE layer in slot order: gate_up [slots, 2F, H] (gate rows above
    up rows), down [slots, H, F], and biases [slots, 2F] and [slots, H], if they have some."""

    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | None = None


class ExpertStream(NamedTuple):
    """The experts of one MoE layer in slot order, each matrix read when it is taken.

    Take all of gate_up, [2F, H] each, before down, [H, F] each, and both before the next
    layer's. Biases are as in ExpertLayerWeights, and read.
    """

    gate_up: Iterable[Matrix]
    down: Iterable[Matrix]
    biases: tuple[Tensor, Tensor] | None = None


def take(items: list[Item] | Iterator[Item]) -> Iterator[Item]:
    """Yield `items` in order, emptying a list meanwhile, so that used items can be freed."""
    if not isinstance(items, list):
        yield from items
        return
    while items:
        yield items.pop(0)


def stream_attention_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    precision: Rules = (),
    layers: range | None = None,
) -> AttentionWeights:
    """Read everything but the routed experts, converted to `dtype`, contiguous.

    Each of `layers` (None: all) is read only when it is taken. Projections to which `precision`
    gives a format stay coded, where the checkpoint has codes. Raises CheckpointError naming a
    tensor that is missing or has another shape, those of a layer when it is taken.
    """
    reader = _Reader(checkpoint, config, dtype=dtype, device=device, precision=precision)
    embed = reader.read(_embed_name(reader), config.vocab_size, config.hidden_size)
    lm_head = _load_lm_head(reader, embed)
    return AttentionWeights(
        embed=embed,
        lm_head=lm_head,
        final_norm=reader.read(FINAL_NORM, config.hidden_size),
        layers=_stream_layers(reader, layers or range(config.num_layers)),
    )


def stream_layers(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    layers: range,
    device: torch.device | str = "cpu",
    precision: Rules = (),
) -> Iterator[LayerWeights]:
    """Read the attention role's part of some layers as stream_attention_weights() does."""
    reader = _Reader(checkpoint, config, dtype=dtype, device=device, precision=precision)
    return _stream_layers(reader, layers)


def _stream_layers(reader: _Reader, layers: range) -> Iterator[LayerWeights]:
    for layer_idx in layers:
        yield _load_layer(reader, layer_idx)
    reader.checkpoint.close()


def stream_expert_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    experts: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    precision: Rules = (),
) -> Iterator[ExpertStream]:
    """Read the routed experts that a node holds, each matrix only when it is taken.

    experts[i] lists, in slot order, the logical expert ids of MoE layer config.moe_layers[i]; it
    may be empty and may repeat an id. Reads nothing else. Raises ConfigError for ids out of range,
    CheckpointError as stream_attention_weights. Matrices are converted to `dtype`, contiguous;
    those of experts to which `precision` gives a format stay coded, where the checkpoint has codes.
    """
    _check_experts(config, experts)
    reader = _Reader(checkpoint, config, dtype=dtype, device=device, precision=precision)
    return _stream_experts(reader, experts)


def _stream_experts(reader: _Reader, experts: Sequence[Sequence[int]]) -> Iterator[ExpertStream]:
    for layer_idx, expert_ids in zip(reader.config.moe_layers, experts, strict=True):
        sources = ExpertSources(reader.matrices, reader.config, layer_idx)
        formats = [format_of(reader.precision, "experts", layer_idx, each) for each in expert_ids]
        of_each = list(zip(expert_ids, formats, strict=True))
        _, hidden = sources.gate_up_shape
        _, width = sources.down_shape
        yield ExpertStream(
            gate_up=(reader.matrix(sources.gate_up(e), hidden, f) for e, f in of_each),
            down=(reader.matrix(sources.down(e), width, f) for e, f in of_each),
            biases=_stack_biases(reader, sources, expert_ids),
        )
    reader.checkpoint.close()


def _stack_biases(
    reader: _Reader, sources: ExpertSources, expert_ids: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    found = [sources.biases(each) for each in expert_ids]
    places = [each for each in found if each is not None]
    if not places:
        return None
    read = reader.matrices.read
    gate_up = torch.stack([read(of_gate_up) for of_gate_up, _ in places])
    return gate_up, torch.stack([read(of_down) for _, of_down in places])


def _check_experts(config: ModelConfig, experts: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError unless every layer has a list of the model's experts."""
    if len(experts) != len(config.moe_layers):
        raise ConfigError(
            f"experts: {len(experts)} entries; the model has {len(config.moe_layers)} MoE layers"
        )
    for layer_idx, expert_ids in zip(config.moe_layers, experts, strict=True):
        assert config.moe is not None
        wrong = [each for each in expert_ids if not 0 <= each < config.moe.num_experts]
        if wrong:
            raise ConfigError(
                f"experts: layer {layer_idx} has no expert {wrong[0]}; "
                f"the model has experts 0 to {config.moe.num_experts - 1}"
            )


class _Reader:
    """A checkpoint, its configuration, and the destination of its tensors.

    A matrix whose rule in `precision` has a format stays coded if the checkpoint has codes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        precision: Rules = (),
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.precision = precision
        self.device = device
        self.matrices = MatrixReader(checkpoint, config.quantisation, dtype=dtype, device=device)

    def read(self, name: str, *shape: int) -> Tensor:
        """Return tensor `name`, which must have `shape`."""
        return self.matrices.read([Source(name, shape[0])], *shape[1:])

    def read_fp32(self, name: str, size: int) -> Tensor:
        """Return vector `name`, stored as [size] or [1, size], f32 whatever the others are."""
        is_row = self.checkpoint.shape(name)[:-1] == (1,)
        out = torch.empty(size, dtype=torch.float32)
        self.checkpoint.read_into(name, out, index=0 if is_row else None)
        return out.to(self.device)

    def read_rows(self, parts: Iterable[tuple[str, int]]) -> Tensor:
        """Return the named vectors, each with its number of rows, one behind the other."""
        return self.matrices.read([Source(*part) for part in parts])

    def matrix(self, sources: Sequence[Source], num_in: int, weight_format: Format) -> Matrix:
        """Return matrices [rows, num_in] above one another, coded if they are to be."""
        coded = None
        if weight_format != UNQUANTISED:
            coded = self.matrices.coded(sources, num_in)
        return self.matrices.read(sources, num_in) if coded is None else coded

    def matrix_of(
        self, part: Part, layer_idx: int | None, parts: Iterable[tuple[str, int]], num_in: int
    ) -> Matrix:
        """Return the named matrices of a part of the model as matrix() does."""
        weight_format = format_of(self.precision, part, layer_idx)
        return self.matrix([Source(*each) for each in parts], num_in, weight_format)


def _embed_name(reader: _Reader) -> str:
    """Return the embedding's name; a tied checkpoint may hold its one matrix as lm_head."""
    is_tied, matrices = reader.config.tie_word_embeddings, reader.matrices
    return LM_HEAD if is_tied and EMBED not in matrices and LM_HEAD in matrices else EMBED


def _load_lm_head(reader: _Reader, embed: Tensor) -> Matrix:
    """Return the checkpoint's lm_head; when tied `embed` itself, or the codes that it was made of.

    As in transformers, a checkpoint that claims to be tied and stores two different matrices
    is not.
    """
    config, matrices = reader.config, reader.matrices
    shape = (config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        return reader.matrix_of("lm_head", None, [(LM_HEAD, shape[0])], shape[1])
    if EMBED in matrices and LM_HEAD in matrices:
        lm_head = reader.read(LM_HEAD, *shape)
        return embed if torch.equal(lm_head, embed) else lm_head
    coded = None
    if format_of(reader.precision, "lm_head") != UNQUANTISED:
        coded = matrices.coded([Source(_embed_name(reader), shape[0])], shape[1])
    return embed if coded is None else coded


def _load_layer(reader: _Reader, layer_idx: int) -> LayerWeights:
    config = reader.config
    hidden = config.hidden_size
    is_moe = config.layers[layer_idx].is_moe
    sinks = layer_name(layer_idx, "self_attn.sinks")
    load_attention = _load_heads if config.latent is None else _load_latent
    return LayerWeights(
        input_norm=reader.read(layer_name(layer_idx, "input_layernorm.weight"), hidden),
        **load_attention(reader, layer_idx),
        sinks=reader.read_fp32(sinks, config.num_heads) if config.has_sinks else None,
        post_norm=reader.read(layer_name(layer_idx, "post_attention_layernorm.weight"), hidden),
        router=_load_router(reader, layer_idx) if is_moe else None,
        shared=_load_shared(reader, layer_idx) if is_moe else None,
        dense=None if is_moe else _load_dense(reader, layer_idx),
    )


def _load_heads(reader: _Reader, layer_idx: int) -> _Attention:
    """Read attention whose keys and values are projections of their own."""
    config, order = reader.config, HeadOrder(reader.config)
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    num_values = config.num_kv_heads * order.value_dim
    projections = (("q_proj", q), ("k_proj", kv), ("v_proj", num_values))

    def attn(suffix: str) -> str:
        return layer_name(layer_idx, f"self_attn.{suffix}")

    is_full = config.qk_norm == "full"
    has_norm = config.qk_norm != "none"
    return _Attention(
        qkv=order.qkv(
            reader.matrix_of(
                "attention", layer_idx, ((attn(f"{p}.weight"), n) for p, n in projections), hidden
            )
        ),
        qkv_bias=order.bias(
            reader.read_rows((attn(f"{p}.bias"), rows) for p, rows in projections)
            if config.qkv_bias
            else None
        ),
        o=order.out(
            reader.matrix_of(
                *("attention", layer_idx, [(attn("o_proj.weight"), hidden)]),
                config.num_heads * order.value_dim,
            )
        ),
        o_bias=reader.read(attn("o_proj.bias"), hidden) if config.o_bias else None,
        q_norm=order.norm(
            reader.read(attn("q_norm.weight"), q if is_full else config.head_dim)
            if has_norm
            else None
        ),
        k_norm=order.norm(
            reader.read(attn("k_norm.weight"), kv if is_full else config.head_dim)
            if has_norm
            else None
        ),
        latent=None,
    )


def _load_latent(reader: _Reader, layer_idx: int) -> _Attention:
    """Read attention whose keys and values are made of latents."""
    config, own = reader.config, reader.config.latent
    assert own is not None
    num_heads, hidden = config.num_heads, config.hidden_size
    num_queries = num_heads * own.head_dim

    def attn(suffix: str) -> str:
        return layer_name(layer_idx, f"self_attn.{suffix}")

    def read_matrix(parts: list[tuple[str, int]], num_in: int) -> Matrix:
        named = [(attn(f"{name}.weight"), rows) for name, rows in parts]
        return reader.matrix_of("attention", layer_idx, named, num_in)

    first = ("q_proj", num_queries) if own.q_rank is None else ("q_a_proj", own.q_rank)
    inputs = [first, ("kv_a_proj_with_mqa", own.cached_dim)]
    order = LatentOrder(config)
    queries = None
    if own.q_rank is not None:
        queries = order.queries(read_matrix([("q_b_proj", num_queries)], own.q_rank))
    to_latent, to_values = _load_per_head(reader, attn("{}.weight"))
    return _Attention(
        qkv=order.inputs(read_matrix(inputs, hidden)),
        qkv_bias=_latent_bias(reader, layer_idx, order) if config.qkv_bias else None,
        o=read_matrix([("o_proj", hidden)], num_heads * own.value_dim),
        o_bias=reader.read(attn("o_proj.bias"), hidden) if config.o_bias else None,
        q_norm=(
            None if own.q_rank is None else reader.read(attn("q_a_layernorm.weight"), own.q_rank)
        ),
        k_norm=reader.read(attn("kv_a_layernorm.weight"), own.rank),
        latent=LatentWeights(
            queries=queries,
            to_latent=to_latent.contiguous(),
            to_values=to_values.contiguous(),
        ),
    )


def _load_per_head(reader: _Reader, name: str) -> tuple[Tensor, Tensor]:
    """Read to_latent and to_values of tensors whose names have the form `name`.

    They are one tensor, or as llama.cpp has them, two, the first transposed already.
    """
    heads, own = reader.config.num_heads, reader.config.latent
    assert own is not None
    if name.format("k_b_proj") in reader.matrices:
        to_latent = reader.read(name.format("k_b_proj"), heads * own.rank, own.nope_dim)
        to_values = reader.read(name.format("v_b_proj"), heads * own.value_dim, own.rank)
        return to_latent.view(heads, own.rank, -1), to_values.view(heads, -1, own.rank)
    sizes = [own.nope_dim, own.value_dim]
    made = reader.read(name.format("kv_b_proj"), heads * sum(sizes), own.rank)
    to_keys, to_values = torch.split(made.view(heads, -1, own.rank), sizes, dim=1)
    return to_keys.transpose(1, 2), to_values


def _latent_bias(reader: _Reader, layer_idx: int, order: LatentOrder) -> Tensor:
    """Return the bias of `qkv`: queries that are made at once have none."""
    own = reader.config.latent
    assert own is not None
    name = layer_name(layer_idx, "self_attn.kv_a_proj_with_mqa.bias")
    if own.q_rank is None:
        bias = reader.read(name, own.cached_dim)
        return order.bias(F.pad(bias, (reader.config.num_heads * own.head_dim, 0)))
    first = layer_name(layer_idx, "self_attn.q_a_proj.bias")
    return order.bias(reader.read_rows([(first, own.q_rank), (name, own.cached_dim)]))


def _load_router(reader: _Reader, layer_idx: int) -> RouterWeights:
    """Return a router; the bias of its scores is fp32: rounded, it would choose other experts."""
    moe = reader.config.moe
    assert moe is not None
    own, count, names = moe.router, moe.num_experts, moe.names
    block = layer_name(layer_idx, moe_block(reader.matrices, reader.config, layer_idx))
    return RouterWeights(
        reader.read(f"{block}.{names.router}.weight", count, reader.config.hidden_size),
        reader.read(f"{block}.{names.router}.bias", count) if own.has_logit_bias else None,
        reader.read_fp32(f"{block}.{names.bias}", count) if own.has_bias else None,
    )


def _load_shared(reader: _Reader, layer_idx: int) -> SharedExpertWeights | None:
    moe = reader.config.moe
    assert moe is not None
    width = moe.shared_intermediate_size
    if width is None:
        return None
    hidden = reader.config.hidden_size
    block = moe_block(reader.matrices, reader.config, layer_idx)

    def name(suffix: str) -> str:
        return layer_name(layer_idx, f"{block}.{suffix}.weight")

    expert = moe.names.shared
    gate_up = [(name(f"{expert}.gate_proj"), width), (name(f"{expert}.up_proj"), width)]
    down = [(name(f"{expert}.down_proj"), hidden)]
    gate = reader.read(name(f"{expert}_gate"), 1, hidden) if moe.shared_is_gated else None
    return SharedExpertWeights(
        gate_up=reader.matrix_of("mlp", layer_idx, gate_up, hidden),
        down=reader.matrix_of("mlp", layer_idx, down, width),
        gate=gate,
    )


def _load_dense(reader: _Reader, layer_idx: int) -> DenseMlpWeights:
    hidden, width = reader.config.hidden_size, reader.config.intermediate_size
    has_bias = reader.config.mlp_bias

    def name(suffix: str) -> str:
        return layer_name(layer_idx, f"mlp.{suffix}")

    gate_and_up = (("gate_proj", width), ("up_proj", width))
    gate_up = [(name(f"{p}.weight"), w) for p, w in gate_and_up]
    return DenseMlpWeights(
        gate_up=reader.matrix_of("mlp", layer_idx, gate_up, hidden),
        down=reader.matrix_of("mlp", layer_idx, [(name("down_proj.weight"), hidden)], width),
        gate_up_bias=(
            reader.read_rows((name(f"{p}.bias"), w) for p, w in gate_and_up) if has_bias else None
        ),
        down_bias=reader.read(name("down_proj.bias"), hidden) if has_bias else None,
    )
