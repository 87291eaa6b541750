"""The data that kernels take and return, shared by every implementation.

Owns the shapes of attention metadata, packed weights, routing and permutation.
Knows no arithmetic and no device. Callers (attention and expert nodes) build
`AttentionMeta` once per micro-batch and treat the packed weights as opaque.

Dimensions: T tokens, H hidden, N query heads, G key/value heads, D head size,
S sequences, R rows, K experts per token, E local experts, F ffn size, V vocabulary,
B cache blocks. Of coded keys: M sub-spaces of W = D / M numbers, C centroids each, P segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import UNQUANTISED, Format
from topspin.plan.retrieval import NUM_SUBSPACES as NUM_SUBSPACES
from topspin.plan.retrieval import SEGMENT_TOKENS
from topspin.trace import Kind

SEGMENT_KEYS: Final = SEGMENT_TOKENS
"""The keys of a segment, which have a codebook of their own."""
NUM_CENTROIDS: Final = 64
"""Of each sub-space."""
MAX_FP8_DIM: Final = 576
"""The most numbers of a head whose keys and values are cached in fp8."""


@dataclass(frozen=True, eq=False)
class KeyCodes:
    """The coded segments of one layer, in any order."""

    centroids: Tensor
    """bf16[P, G, M, C, W]."""
    codes: Tensor
    """u8[P, G, M, SEGMENT_KEYS], below C: a sub-space's codes lie one behind the other."""
    summaries: Tensor
    """bf16[P, G, 2, D], of full segments: the mean of the keys, and their spread."""
    layer: int = 0
    """The layer's number among those that have codes."""


CHECK_SUM: Final = 0x5EED
CHECK_BYTES: Final = 8
"""Of a key and its value in a file."""


class HotKeys(NamedTuple):
    """Copies, in a few slots of the caches, of selected keys and values that are in a file.

    Of one sequence; kernels read what they select and do not find, and keep it: a head's copies
    are its own. L layers with codes, E entries, at least twice as many as keys are selected.
    """

    fd: int
    records: Tensor
    """i64[blocks], where each block of the sequence is in the file: by layer of the cache, head and
    token its key, its value, and the sum of CHECK_SUM and of both as i64 numbers."""
    cache_layers: Tensor
    """i64[L], the layer of the cache that each layer with codes is."""
    slots: Tensor
    """i64[E], cache slots; of each a head's part belongs to the head's entry."""
    entries: Tensor
    """i32[L, G, tokens], the entry that has a token; -1: none."""
    tokens: Tensor
    """i32[L, G, E], the token that an entry has; -1: none."""
    used: Tensor
    """i32[L, G, E], when an entry was used last, by `clocks`."""
    clocks: Tensor
    """i64[L, G, 2], the number of searches, and the entry that is looked at first."""
    counts: Tensor
    """i64[L, G, 3], keys that were found, that were read, and that could not be read."""


class HostKeys(NamedTuple):
    """Keys and values in memory of the host that kernels of a device read, of R sequences.

    Selected keys whose block is there are copied to slots of the caches before they are read.
    """

    memory: Tensor
    """[records, layers of the cache, G, block size, 2, D], in pinned memory: by token the key and
    the value."""
    cache_layers: tuple[int, ...]
    """By layer with codes, the layer of the cache that it is."""
    records: Tensor
    """i32[R, max_blocks], the record that each block of a sequence is."""
    slots: Tensor
    """i32[R, most budgets], cache slots for the selection of each sequence; a head's part of them
    is the head's."""


class SearchBounds(NamedTuple):
    """Upper bounds over the sequences of a Retrieval, for launches that cannot read its tensors."""

    rows: int
    """Query rows."""
    segments: int
    """Segments that a key/value head searches."""
    budget: int
    keys: int
    """Keys that a key/value head attends to: sinks, selected ones, and all from coded_end on."""


class Retrieval(NamedTuple):
    """The R sequences of a micro-batch whose rows attend to a selection of their keys.

    A sequence's keys num_sinks <= k < coded_end are searched for the `budgets` best ones of each
    key/value head, once for all of its rows; keys before and behind are attended to anyway, as
    far as each row sees them. Key k is in segment k // SEGMENT_KEYS of its sequence. Of the first
    `summarised` segments a head searches only the `kept` ones with the best summaries, of those
    behind all.
    """

    seqs: Tensor
    """i32[R], sequences of the AttentionMeta, ascending; their new rows are chains."""
    segments: Tensor
    """i32[R, max_segments], the coded segments of each sequence in KeyCodes; the last may not be
    full, entries behind it are not read."""
    coded_end: Tensor
    """i32[R], more than num_sinks and at most the committed length."""
    budgets: Tensor
    """i32[R], at least 1."""
    summarised: Tensor
    """i32[R], fewer than the segments that are searched; these are full."""
    kept: Tensor
    """i32[R], at most `summarised`; fewer only if they hold more keys than sinks and budget."""
    num_sinks: int
    hot: tuple[HotKeys | None, ...] = ()
    """Of each of the R sequences; None: all its keys are in the cache. (): of all. Keys to search
    whose entry in the block table is -1 are in the file."""
    bounds: SearchBounds | None = None
    """None: only kernels of the host take it."""
    host_keys: HostKeys | None = None
    """For kernels of a device. Keys to search whose entry in the block table is -1 are there."""
    ended: Callable[[Kind, int], None] | None = None
    """Called by kernels of the host when a part of attention has ended in a layer, by its number
    among those that have codes: Kind.SEARCHED, READ and ATTENDED, and ATTENTION before these."""


@dataclass(frozen=True, eq=False)
class AttentionMeta:
    """The positions of a micro-batch's query tokens; the same for all layers.

    Sequence s owns query rows `query_start[s] : query_start[s + 1]`, n of them (n may
    be 0); its row i sits at position `context_lens[s] - n + i`. Keys of positions
    `0 .. context_lens[s] - 1` are in the cache blocks that `block_tables[s]` names.
    Rows from `query_start[S]` on are padding: attention gives 0 for them.

    `tree_mask[t, j]` says whether query row t sees the j-th of its sequence's last
    `tree_lens[s]` positions: itself and its ancestors in a draft tree, each behind its own
    ancestors. The positions before those are committed and always visible. Without
    `tree_lens` the tree is the new rows; with it, a tree whose other rows are in the cache
    grows by the new rows. A token's distance for a sliding window is then counted along its
    branch: its position is the committed length plus the number of its ancestors.

    `memo` is for kernels only: they keep data derived from this object in one layer
    (gather indices, masks) there for the other layers.
    """

    query_start: Tensor
    """i32[S + 1], cumulative numbers of query rows."""
    context_lens: Tensor
    """i32[S], positions visible to the last query row: committed + new."""
    block_tables: Tensor
    """i32[S, max_blocks]; entries past a sequence's last block are never read."""
    max_query_len: int
    """Upper bound of the query rows of one sequence."""
    max_context_len: int
    """Upper bound of context_lens."""
    tree_mask: Tensor | None = None
    """bool[T, max_query_len or the most of tree_lens], or None: causal."""
    tree_lens: Tensor | None = None
    """i32[S], at least the query rows of a sequence."""
    retrieval: Retrieval | None = None
    """The sequences that attend to a selection of their keys, in layers that have codes."""
    memo: dict[tuple[object, ...], object] = field(default_factory=dict, repr=False)


class HeadRows(NamedTuple):
    """The heads of T rows before attention, and the cache slots of their keys and values.

    q [T, N, D], k and v [T, G, D]; cos and sin [T, D / 2] or [T, D]; the caches
    [B, block size, G, D]; slots i64[T]. `q_norm` and `k_norm` [D] norm each head first. Values may
    have another size than keys; both caches may be parts of the heads of one tensor (latents).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether values are the first numbers of keys, in the same memory.

    Raises ValueError if they have fewer numbers and lie elsewhere.
    """
    if k_cache.shape[3] == v_cache.shape[3]:
        return False
    if k_cache.shape[3] < v_cache.shape[3] or k_cache.data_ptr() != v_cache.data_ptr():
        raise ValueError(
            f"values {tuple(v_cache.shape)} are not the first numbers of keys "
            f"{tuple(k_cache.shape)}"
        )
    return True


class CodedMatrix(Protocol):
    """A matrix [O, I] as a quantised checkpoint has it, to be packed without choosing new codes.

    Number [o, i] is (codes[o, i] - zeros[o, g]) * scales[o, g], g being i // group, or with lows
    codes[o, i] * scales[o, g] + lows[o, g].
    """

    @property
    def codes(self) -> Tensor:
        """u8[O, I], below 2 ** bits, or e4m3[O, I]."""

    @property
    def scales(self) -> Tensor:
        """f32[O, G], G being I / group, rounded up."""

    @property
    def zeros(self) -> Tensor | None:
        """f32[O, G]; None: 0."""

    @property
    def lows(self) -> Tensor | None:
        """f32[O, G], without zeros; None: zeros say it."""

    @property
    def group(self) -> int:
        """The inputs that share a scale."""

    @property
    def bits(self) -> int:
        """The bits of a code; MXFP4_BITS: the codes are E2M1_INTEGERS, the scales powers of two."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's, of the dequantised matrix."""

    @property
    def shape(self) -> torch.Size:
        """(O, I)."""

    def dequantised(self) -> Tensor:
        """Return the numbers in `dtype`."""


Matrix = Tensor | CodedMatrix
"""What weights are packed from."""


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight [O, I] in the layout of the implementation that packed it.

    Only the `linear` and `dense_mlp` of that implementation accept it.
    """

    data: Tensor
    out_features: int
    in_features: int
    packed: bool
    """True if `data` is in a private layout, False if it is the plain matrix."""
    address: int = field(default=0, kw_only=True)
    """The address of `data`, for kernels that know its layout; 0: no kernel knows it."""
    weight_format: Format = field(default=UNQUANTISED, kw_only=True)


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """A matrix [O, I] for each of N heads, in the layout of the implementation that packed them.

    Only the `multiply_heads` of that implementation accepts it.
    """

    data: Tensor
    num_heads: int
    out_features: int
    in_features: int
    address: int = field(default=0, kw_only=True)
    """The address of `data`, for kernels that know its layout; 0: it is [N, O, I]."""


Biases = tuple[Tensor, Tensor]
"""Of gate_up and down: [E, 2F] (the gate's first) and [E, H] of E experts, [2F] and [H] of one."""


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The gated MLPs of E local experts, in the layout of the implementation that packed them.

    Its `rebuild_experts` makes changed copies; the lists are never written.
    """

    gate_up: list[LinearWeight]
    """By slot, weights [2F, H]: rows 0..F-1 are the gate, F..2F-1 the up projection.
    If joined, one weight [2EF, H]: the gates of all slots, then their up projections."""
    down: list[LinearWeight]
    """By slot, weights [H, F]. If joined, one weight [H, EF]."""
    num_experts: int
    hidden_size: int
    ffn_size: int
    dtype: torch.dtype
    joined: bool = False
    addresses: Tensor | None = field(default=None, kw_only=True)
    """i64[E, 3], by slot the addresses of gate, up and down, for kernels that know the layout."""
    biases: Biases | None = field(default=None, kw_only=True)
    """By slot, in fp32 and contiguous; None: the experts have none."""
    activation: ExpertActivation = field(default=SWIGLU, kw_only=True)

    def completed(self, biases: Biases | None, activation: ExpertActivation) -> Self:
        """Return these experts with biases, of any dtype, and an activation."""
        if biases is not None:
            gate_up, down = (each.float().contiguous() for each in biases)
            assert gate_up.shape == (self.num_experts, 2 * self.ffn_size), tuple(gate_up.shape)
            assert down.shape == (self.num_experts, self.hidden_size), tuple(down.shape)
            biases = gate_up, down
        return replace(self, biases=biases, activation=activation)

    def biases_of(self, slot: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the biases [2F] and [H] of a slot in the experts' dtype."""
        if self.biases is None:
            return None, None
        gate_up, down = self.biases
        return gate_up[slot].to(self.dtype), down[slot].to(self.dtype)


class ExpertMatrices(NamedTuple):
    """One expert in a checkpoint's layout, and the format to pack it in; coded only with one."""

    gate_up: Matrix
    """[2F, H], gate rows above up rows."""
    down: Matrix
    """[H, F]."""
    weight_format: Format = UNQUANTISED
    biases: Biases | None = None


class RoutingRule(NamedTuple):
    """The choice of `top_k` of E experts from a token's logits, and their weights; all in fp32.

    Experts are chosen by descending score, of equal ones the lowest id first.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    """"softmax": of all logits. "sigmoid": each logit's own. "logits": themselves; the weights are
    a softmax over the chosen ones."""
    bias: Tensor | None = None
    """f32[E], added to the scores for the choice only; weights come from the scores without."""
    num_groups: int = 1
    """Experts stand in groups of E / num_groups; only those of the best `top_groups` are chosen."""
    top_groups: int = 1
    best_of_group: Literal[1, 2] = 2
    """A group's score is the sum of so many best scores with bias."""
    renormalise: bool = False
    """Weights are divided by their sum."""
    epsilon: float = 0.0
    """Added to that sum."""
    least_sum: float = 0.0
    """Weights are divided by no less."""
    scale: float = 1.0
    """Multiplies the weights, last."""
    weights_dtype: torch.dtype = torch.float32
    """The dtype to which weights are rounded before they are used."""


class Routing(NamedTuple):
    """The experts of each token, by descending score."""

    experts: Tensor
    """i64[T, K], logical expert ids."""
    weights: Tensor
    """f32[T, K]."""


class Permutation(NamedTuple):
    """(row, choice) pairs grouped by local expert, in ascending order inside a group."""

    order: Tensor
    """i64[R * K], flat indices row * K + k; pairs whose expert is not here come last."""
    row_of: Tensor
    """i64[R * K], the row of each entry of `order`."""
    counts: Tensor
    """i64[E], pairs per expert."""
    offsets: Tensor
    """i64[E + 1]; expert e owns order[offsets[e] : offsets[e + 1]]."""


class ExpertOutput(NamedTuple):
    """The contribution of a node's experts to each row, and the load of each expert."""

    out: Tensor
    """[R, H], the weighted partial sums."""
    counts: Tensor
    """i64[E], rows computed per expert."""
