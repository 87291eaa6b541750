"""Codes of the keys of long sequences, and which of a step's sequences attend by them.

Owns the memory of the codes, one set per layer without a window, when keys are coded, and the
Retrieval of each micro-batch. The memory is a part of the cache's. Keys of a closed segment are
searched by its own codebooks, which are learnt once the segment is committed and come into use
together, LEARNING_TOKENS later; those behind it, up to the recent window, by the ones before, a few
at a time. So what is searched follows from the committed length alone, a replay searches the same,
and codebooks may be learnt when there is time (learning.py). Knows no scores: kernels search and
attend. Called by model_runner.py between steps, and while rows are with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.long_contexts.learning import Learning
from attention_nodes.long_contexts.recall import best_keys, share_found
from attention_nodes.long_contexts.segments import SegmentPool
from attention_nodes.step.decoder import Watch
from attention_nodes.step.kv_cache import KvCache, coded_layers
from attention_nodes.step.sequences import IntArray, SequenceTable
from attention_nodes.step.step_inputs import Slices
from kernels.contracts import (
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    AttentionMeta,
    HostKeys,
    KeyCodes,
    Retrieval,
    SearchBounds,
)
from kernels.dispatch import Ops
from kernels.retrieval import summarise
from kernels.runtime import Runtime
from models.description.config import ModelConfig
from topspin.errors import ConfigError
from topspin.messages import KvCounts
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.retrieval import RetrievalPolicy
from topspin.plan.spec import NodeConfig

OPEN_KEYS: Final = 64
"""Keys of an open segment are coded so many at a time."""
LEARNING_TOKENS: Final = 64
"""Its own codebooks search a segment once so many tokens behind it are committed, or as many as the
recent window has: until then no key behind it is searched, and it is in memory."""
RECALL_PERIOD: Final = 256
"""Of so many steps that retrieve one is looked at."""


def num_places(num_blocks: int, *, block_size: int, max_num_seqs: int) -> int:
    """Return the places for segments that belong to a cache of so many blocks.

    As many as it holds whole segments, and one for the open segment of each sequence, which has a
    whole one before. A sequence can lack a place only where others share blocks; it then attends to
    all keys from that segment on.
    """
    num_segments = max(1, num_blocks * block_size // SEGMENT_KEYS)
    return num_segments + min(num_segments, max_num_seqs)


def place_bytes(model: ModelConfig, kept: KvCacheSpec) -> int:
    """Return the bytes of a segment's codes, codebooks and summaries, of all layers with some."""
    numbers = (NUM_CENTROIDS + 2) * model.head_dim
    each = numbers * torch.bfloat16.itemsize + NUM_SUBSPACES * SEGMENT_KEYS
    return len(coded_layers(model, kept)) * model.num_kv_heads * each


def code_bytes_of(
    model: ModelConfig, config: NodeConfig, *, num_blocks: int | None = None
) -> Callable[[int], int] | None:
    """Return the bytes of all codes by the number of cache blocks; None: nothing is coded.

    `num_blocks` None: those of the cache are all that may have codes.
    """
    if config.kv_cache.retrieval is None:
        return None
    block_size, max_num_seqs = config.kv_cache.block_size, config.attention.max_num_seqs

    def code_bytes(num_cached: int) -> int:
        count = num_cached if num_blocks is None else num_blocks
        places = num_places(count, block_size=block_size, max_num_seqs=max_num_seqs)
        return places * place_bytes(model, config.kv_cache)

    return code_bytes


class _Coded(NamedTuple):
    """Which keys of a sequence may be searched: those before `end`.

    The first `num_closed` segments by their own codebooks, the one behind by others.
    """

    num_closed: int = 0
    end: int = 0


class _Search(NamedTuple):
    """What is searched of a sequence's keys; as in Retrieval, `places` are its segments."""

    places: list[int]
    end: int
    budget: int
    summarised: int
    kept: int


class KeyIndex:
    """The codes of one attention node."""

    def __init__(
        self,
        model: ModelConfig,
        ops: Ops,
        cache: KvCache,
        table: SequenceTable,
        policy: RetrievalPolicy,
        *,
        num_blocks: int,
        max_num_seqs: int,
        runtime: Runtime,
    ) -> None:
        """`num_blocks` are those that the scheduler assigns, which may be more than the cache's.

        Raises ConfigError for blocks that do not fill segments.
        """
        if SEGMENT_KEYS % cache.block_size:
            raise ConfigError(
                f"--kv-retrieval-tokens: blocks of {cache.block_size} tokens (block_size) do not "
                f"fill a segment of {SEGMENT_KEYS}"
            )
        coded = [idx for idx, layer in enumerate(cache.layers) if layer.has_codes]
        self._ops = ops
        self._runtime = runtime
        self._cache = cache
        self._table = table
        self._policy = policy
        count = num_places(num_blocks, block_size=cache.block_size, max_num_seqs=max_num_seqs)
        self._pool = SegmentPool(count)
        self._learning = Learning(coded)
        self._coded: dict[int, _Coded] = {}
        self._stepped: list[int] = []
        self._policies: dict[int, RetrievalPolicy | None] = {}
        self.codes: dict[int, KeyCodes] = {
            idx: _allocate(count, model, number, runtime.device) for number, idx in enumerate(coded)
        }
        self.frame_slots: Callable[[IntArray], IntArray] = lambda slots: slots
        """Where slots of blocks are in the cache; a spill sets it."""
        self.has_file = False
        """Whether keys may be in a file; a spill sets it."""
        self._counts = KvCounts()
        self._num_steps = 0

    def take_counts(self) -> KvCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, KvCounts()
        return counts

    @torch.inference_mode()
    def warm_up(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        *,
        num_seqs: int = 1,
        max_len: int = 0,
        host_keys: HostKeys | None = None,
    ) -> None:
        """Code keys and attend by them, so that the first long request finds compiled kernels.

        As in a step of `num_seqs` sequences of about `max_len` tokens; with the `host_keys` of one,
        as where keys are spilled. Uses block 0 and place 0, whose content is not in use yet.
        """
        num_sinks, block_size = self._policy.num_sinks, self._cache.block_size
        num_keys = max(2 * NUM_CENTROIDS, num_sinks + 2, max_len)
        num_segments = -(-(num_keys - 1) // SEGMENT_KEYS)
        kept = min(self._policy.num_segments, num_segments - 1)
        device = self._runtime.device
        slots = torch.arange(min(num_keys, SEGMENT_KEYS), device=device) % block_size
        layer, codes = next(iter(self.codes.items()))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for num_iterations in (1, None):
            self._ops.code_keys(
                keys, slots, codes.centroids[0], codes.codes[0], num_iterations=num_iterations
            )
        budget = min(self._policy.num_selected, num_keys - 1 - num_sinks)
        start = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        zero = torch.zeros_like(start[1:])
        retrieval = Retrieval(
            seqs=start[:-1],
            segments=zero[:, None].repeat(1, num_segments),
            coded_end=zero + num_keys - 1,
            budgets=zero + budget,
            summarised=zero + num_segments - 1,
            kept=zero + kept,
            num_sinks=num_sinks,
            hot=(None,) * num_seqs if self.has_file else (),
            bounds=SearchBounds(
                rows=1, segments=kept + 1, budget=budget, keys=num_sinks + budget + 1
            ),
            host_keys=host_keys,
        )
        meta = AttentionMeta(
            query_start=start,
            context_lens=zero + num_keys,
            block_tables=zero[:, None].repeat(1, -(-num_keys // block_size)),
            max_query_len=1,
            max_context_len=num_keys,
            retrieval=retrieval,
        )
        query = torch.zeros(num_seqs, model.num_heads, keys.shape[3], dtype=dtype, device=device)
        sinks = torch.zeros(model.num_heads, device=device) if model.has_sinks else None
        self._ops.paged_attention(query, keys, values, meta, scale=1.0, sinks=sinks, codes=codes)

    def watch(self, micro_batches: Iterable[Slices]) -> Watch | None:
        """Return what compares a step's selections with the best keys; None, mostly: nothing.

        One step in RECALL_PERIOD of those that retrieve is looked at, in one layer, which are taken
        in turn, and there one sequence of each micro-batch. It costs what attention to all keys of
        that sequence would in that layer, and the step is not replayed.
        """
        if all(each.retrieval is None for each in micro_batches):
            return None
        turn, since = divmod(self._num_steps, RECALL_PERIOD)
        self._num_steps += 1
        if since:
            return None
        watched = list(self.codes)[turn % len(self.codes)]

        def look(layer: int, q: Tensor, meta: AttentionMeta) -> None:
            if layer != watched or meta.retrieval is None:
                return
            idx, retrieval = turn % len(meta.retrieval.seqs), meta.retrieval
            has_copies = retrieval.hot and retrieval.hot[idx] is not None
            if has_copies or retrieval.host_keys is not None:
                return  # some keys are not in memory
            selected = self._ops.selected_keys(q, self.codes[layer], meta, idx)
            keys, count = self._cache.keys[layer], selected.shape[1]
            best = best_keys(q, keys, meta, idx, count=count)
            self._counts += KvCounts(recall_sum=share_found(selected, best), num_recalls=1)

        return look

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Learn that the content of these cache blocks changes with the next step."""
        self._pool.overwrite(blocks)

    def end(self, rows: IntArray) -> None:
        """Forget the sequences in `rows` of the table."""
        self._stepped = [row for row in self._stepped if row not in rows]
        for row in rows.tolist():
            self._pool.end(row)
            self._learning.end(row)
            self._coded.pop(row, None)
            self._policies.pop(row, None)

    def follow(self, rows: IntArray) -> None:
        """Learn that the sequences in `rows` of the table have taken a step."""
        self._stepped += rows.tolist()

    @torch.inference_mode()
    def code(self, *, may_wait: bool) -> None:
        """Code what the sequences of the last step have committed; before the next one is placed.

        `may_wait`: what prompts need is learnt while rows are with experts. On a device behind the
        last step, whose keys are then there.
        """
        for row in self._stepped:
            policy, committed = self.policy_of(row), int(self._table.num_committed[row])
            if policy is None or committed <= policy.num_tokens:
                continue
            self._close(row, committed)
            count = self._learning.num_lacking(row)
            if committed < self._table.num_prompt[row]:
                self._learn(row, 0 if may_wait else count)
                continue
            num_tokens = _delay(policy) - committed % SEGMENT_KEYS
            if num_tokens > 0:  # the last segment is not in use yet
                begin = (committed // SEGMENT_KEYS - 1) * SEGMENT_KEYS
                later = self._learning.num_lacking(row, begin=begin)
                count += -(-later // num_tokens) - later
            self._learn(row, count)
            self._use(row, policy, committed)
        self._stepped = []

    def learning(self, rows: Collection[int], num_waits: int) -> Callable[[], bool] | None:
        """Return what learns something for sequences of a step, and says whether it did.

        To be called `num_waits` times during the step. None: nothing is to be learnt.
        """
        waiting = {row: count for row in rows if (count := self._learning.num_lacking(row))}
        if not waiting:
            return None
        each = -(-sum(waiting.values()) // num_waits)

        def learn() -> bool:
            left = each
            for row in waiting:
                left -= self._learn(row, left)
            return left < each

        return learn

    def policy_of(self, row: int) -> RetrievalPolicy | None:
        """Return what a sequence's request has asked for; None: attention to all keys."""
        if row not in self._policies:
            policy: RetrievalPolicy | None = self._policy
            asked = self._table.sampling(row).kv_retrieval_tokens
            if asked is not None:
                policy = self._policy.with_tokens(asked) if asked else None
            self._policies[row] = policy
        return self._policies[row]

    def _close(self, row: int, committed: int) -> None:
        """Give places to segments that are committed."""
        for number in range(len(self._pool.closed(row)), committed // SEGMENT_KEYS):
            begin, end = number * SEGMENT_KEYS, (number + 1) * SEGMENT_KEYS
            last_block = int(self._table.block_tables[row, 0, end // self._cache.block_size - 1])
            if not self._pool.share(row, last_block):
                place = self._pool.close(row, last_block)
                if place is None:
                    return
                self._learning.begin(place)
            self._learning.want(row, begin, self._pool.closed(row)[-1])

    def _use(self, row: int, policy: RetrievalPolicy, committed: int) -> None:
        """Let a decoded sequence search its segments, and code keys behind them."""
        coded = self._coded.get(row, _Coded())
        in_use = max(0, committed - _delay(policy)) // SEGMENT_KEYS
        num_closed = min(in_use, len(self._pool.closed(row)))
        if num_closed > coded.num_closed:
            self._pool.end_open(row)
            coded = _Coded(num_closed, num_closed * SEGMENT_KEYS)
        end = (committed - policy.num_recent) // OPEN_KEYS * OPEN_KEYS
        end = min(end, (num_closed + 1) * SEGMENT_KEYS)
        if num_closed and end > coded.end and self._code_open(row, coded, end):
            coded = coded._replace(end=end)
        if coded.end:
            self._coded[row] = coded

    @torch.inference_mode()
    def _learn(self, row: int, count: int) -> int:
        """Learn up to `count` codebooks of a sequence, and code by them; returns how many."""
        num_learnt = 0
        for job in self._learning.take(row, count):
            num_learnt += 1
            codes = self.codes[job.layer]
            slots = self._slots(row, job.begin, job.begin + SEGMENT_KEYS)
            self._ops.code_keys(
                self._cache.keys[job.layer],
                slots,
                codes.centroids[job.place],
                codes.codes[job.place],
                num_iterations=self._policy.num_iterations,
            )
            summarise(self._cache.keys[job.layer], slots, codes.summaries[job.place])
            self._counts += KvCounts(num_coded_segments=int(job.is_last))
        return num_learnt

    def _code_open(self, row: int, coded: _Coded, end: int) -> bool:
        """Code keys behind the segments in use by the last one's codebooks; False: no place."""
        place = self._pool.open_place(row)
        last = self._pool.closed(row)[coded.num_closed - 1]
        is_new = place is None
        if place is None:
            place = self._pool.begin(row)
        if place is None:
            return False
        slots = self._slots(row, coded.end, end)
        first = coded.end % SEGMENT_KEYS
        for idx, codes in self.codes.items():
            if is_new:
                codes.centroids[place] = codes.centroids[last]
            self._ops.code_keys(
                self._cache.keys[idx],
                slots,
                codes.centroids[place],
                codes.codes[place, :, :, first:],
                num_iterations=None,
            )
        return True

    def _slots(self, row: int, begin: int, end: int) -> Tensor:
        slots = self.frame_slots(self._table.slots(row, np.arange(begin, end))[0])
        return self._runtime.upload(torch.from_numpy(slots))

    def retrieval_of(self, slices: Slices) -> Retrieval | None:
        """Return which sequences of a micro-batch attend to a selection of their keys.

        Those that decode, one token and perhaps a draft that is a chain, and have more coded keys
        than they select. None: there are none. Before the step.
        """
        if slices.tree_mask is not None or not self._coded:
            return None
        chosen = [
            (idx, found)
            for idx, row in enumerate(slices.rows.tolist())
            if slices.certain[idx] == 1 and (found := self._searched(row)) is not None
        ]
        if not chosen:
            return None
        seqs, searches = [idx for idx, _ in chosen], [found for _, found in chosen]
        segments = np.zeros((len(chosen), max(len(each.places) for each in searches)), np.int32)
        for at, each in enumerate(searches):
            segments[at, : len(each.places)] = each.places
        num_rows = int(slices.counts[seqs].sum())
        self._counts += KvCounts(num_selected_rows=num_rows * len(self.codes))
        return Retrieval(
            seqs=torch.tensor(seqs, dtype=torch.int32),
            segments=torch.from_numpy(segments),
            coded_end=torch.tensor([each.end for each in searches], dtype=torch.int32),
            budgets=torch.tensor([each.budget for each in searches], dtype=torch.int32),
            summarised=torch.tensor([each.summarised for each in searches], dtype=torch.int32),
            kept=torch.tensor([each.kept for each in searches], dtype=torch.int32),
            num_sinks=self._policy.num_sinks,
        )

    def _searched(self, row: int) -> _Search | None:
        """Return what is searched of a sequence's keys.

        None: it has a prompt to compute, or no more coded keys than it would select.
        """
        policy, coded = self._policies.get(row), self._coded.get(row)
        committed = int(self._table.num_committed[row])
        if policy is None or coded is None or committed < self._table.num_prompt[row]:
            return None
        end = min(coded.end, committed - policy.num_recent)
        if end - policy.num_sinks <= policy.num_selected:
            return None
        places = self._pool.closed(row)[: coded.num_closed]
        open_place = self._pool.open_place(row)
        if open_place is not None:
            places.append(open_place)
        num_segments = -(-end // SEGMENT_KEYS)
        summarised = min(coded.num_closed, num_segments - 1)
        kept = min(summarised, policy.num_segments)
        return _Search(places[:num_segments], end, policy.num_selected, summarised, kept)


def _delay(policy: RetrievalPolicy) -> int:
    """Return how many tokens behind a segment are committed when its own codebooks search it."""
    return min(LEARNING_TOKENS, policy.num_recent)


def _allocate(count: int, model: ModelConfig, layer: int, device: torch.device) -> KeyCodes:
    shape = (count, model.num_kv_heads, NUM_SUBSPACES)
    width = model.head_dim // NUM_SUBSPACES
    return KeyCodes(
        centroids=torch.zeros(*shape, NUM_CENTROIDS, width, dtype=torch.bfloat16, device=device),
        codes=torch.zeros(*shape, SEGMENT_KEYS, dtype=torch.uint8, device=device),
        summaries=torch.zeros(*shape[:2], 2, model.head_dim, dtype=torch.bfloat16, device=device),
        layer=layer,
    )
