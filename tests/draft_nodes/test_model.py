"""A draft model's passes over trees against transformers' plain forward of each path."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_nodes.step.step_inputs import Slices
from draft_nodes.model import DraftModel, Settings
from kernels.runtime import DeviceMemory, HostRuntime
from spec_decode.draft import NO_DRAFT, ROOT, DraftRequest, DraftText
from spec_decode.forest import Growth, Kept, PassRows
from spec_decode.serial import SerialDrafter
from tests.attention_nodes.delayed_runtime import DelayedRuntime
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_model
from topspin.errors import ConfigError
from topspin.plan.precision import rules_of

VARIANTS = ("llama", "mixtral_sliding_window", "qwen2_moe", "qwen3_moe", "olmoe_clip_qkv")
NUM_SLOTS = 600
F32 = Settings(dtype=torch.float32, num_slots=NUM_SLOTS, block_size=4)
# Without a GPU the device is the CPU, where Triton's kernels are interpreted.
HAS_GPU = torch.cuda.is_available()
ON_DEVICE = F32._replace(kernels="triton", device="cuda:0" if HAS_GPU else "cpu")
on_device = [pytest.mark.gpu] if HAS_GPU else []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(variant: str, **overrides: int) -> Path:
        name = f"{variant}{overrides}"
        if name not in made:
            directory = tmp_path_factory.mktemp(variant)
            made[name] = make_checkpoint(directory, variant, **overrides)
        return made[name]

    return make


class Mirror:
    """A sequence as a test knows it: its prefix and, by place, the live tree's rows."""

    def __init__(self, seq_id: int, prefix: list[int]) -> None:
        self.seq_id = seq_id
        self.prefix = prefix
        self.tokens: list[int] = []
        self.parents: list[int] = []

    def path(self, place: int) -> list[int]:
        if place == ROOT:
            return []
        return [*self.path(self.parents[place]), self.tokens[place]]

    def grow(self, rng: random.Random, count: int) -> PassRows:
        begin = len(self.tokens)
        for _ in range(count):
            self.parents.append(rng.randrange(-1, len(self.tokens)))
            self.tokens.append(rng.randrange(VOCAB_SIZE))
        return PassRows(self.seq_id, tuple(self.tokens[begin:]), tuple(self.parents[begin:]), count)

    def reroot(self, rng: random.Random) -> Kept:
        """Verify a random path; keep a random part of what is below it, in another order."""
        at = rng.randrange(-1, len(self.tokens))
        verified: list[int] = []
        while at != ROOT:
            verified.insert(0, at)
            at = self.parents[at]
        root = verified[-1] if verified else ROOT
        kept: list[int] = []
        left = list(range(len(self.tokens)))
        while ready := [p for p in left if self.parents[p] in (root, *kept) and p not in verified]:
            kept.append(rng.choice(ready))
            left.remove(kept[-1])
            if rng.random() < 0.1:
                break
        self.prefix += [self.tokens[place] for place in verified]
        place_of = {place: idx for idx, place in enumerate(kept)} | {root: ROOT}
        self.tokens, self.parents = (
            [self.tokens[place] for place in kept],
            [place_of[self.parents[place]] for place in kept],
        )
        return Kept(self.seq_id, tuple(verified), tuple(kept))


def feed(model: DraftModel, mirrors: list[Mirror]) -> Tensor:
    """Compute the prefixes of new sequences; returns the log-probabilities after each."""
    rows = []
    for each in mirrors:
        tokens = np.array(each.prefix, dtype=np.int32)
        model.open(each.seq_id, num_prompt=len(tokens))
        assert model.reserve(each.seq_id, len(tokens))
        parents = tuple(range(-1, len(tokens) - 1))
        rows.append(PassRows(each.seq_id, tuple(each.prefix), parents, 1))
    logps = model.log_probs(rows)
    model.keep([Kept(each.seq_id, tuple(range(len(each.prefix))), ()) for each in mirrors])
    return logps


def oracle_log_probs(oracle: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("variant", "settings", "num_turns"),
    [
        ("llama", F32, 8),
        ("qwen3_moe", F32, 8),
        *(
            pytest.param(each, F32, 8, marks=pytest.mark.slow)
            for each in VARIANTS
            if each not in ("llama", "qwen3_moe")
        ),
        *(
            pytest.param(
                each, ON_DEVICE, 3, marks=[*on_device, pytest.mark.slow], id=f"{each}-triton"
            )
            for each in ("mixtral_sliding_window", "qwen3_moe")
        ),
    ],
)
def test_nodes_of_random_trees_have_the_log_probabilities_of_their_paths(
    checkpoint: Callable[..., Path], variant: str, settings: Settings, num_turns: int
) -> None:
    rng = random.Random(variant)
    # An interpreted layer takes seconds.
    path = checkpoint(variant, **({} if settings is F32 else {"num_hidden_layers": 1}))
    model, oracle = DraftModel.load(path, settings), oracle_model(path)
    mirrors = [Mirror(idx, rng.choices(range(VOCAB_SIZE), k=n)) for idx, n in enumerate((1, 9, 22))]
    found = feed(model, mirrors)
    for logps, each in zip(found.cpu(), mirrors, strict=True):
        torch.testing.assert_close(
            logps, oracle_log_probs(oracle, each.prefix), rtol=1e-4, atol=1e-4
        )
    for turn in range(num_turns):
        growing = rng.sample(mirrors, rng.randint(1, 3))
        sizes = [rng.randint(1, 5) for _ in growing]
        firsts = [len(each.tokens) for each in growing]
        rows = []
        for each, size in zip(growing, sizes, strict=True):
            assert model.reserve(each.seq_id, size)
            rows.append(each.grow(rng, size))
        answers = iter(model.log_probs(rows).cpu())
        for each, first in zip(growing, firsts, strict=True):
            for place in range(first, len(each.tokens)):
                wanted = oracle_log_probs(oracle, each.prefix + each.path(place))
                torch.testing.assert_close(next(answers), wanted, rtol=1e-4, atol=1e-4)
        if turn % 3 == 2:
            model.keep([each.reroot(rng) for each in mirrors])
    # What random re-roots have moved is what a fresh prefill gives.
    fresh = DraftModel.load(path, settings)
    feed(fresh, mirrors)
    for each in mirrors:
        for mine, theirs in zip(model.cached(each.seq_id), fresh.cached(each.seq_id), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_draft_is_near_the_model_that_it_was_made_of(
    tmp_path: Path, variant: str, quantization: Any
) -> None:
    # Groups of 4-bit weights need rows of some length.
    path = make_checkpoint(
        tmp_path, variant, hidden_size=128, intermediate_size=128, moe_intermediate_size=128
    )
    settings = F32._replace(precision=rules_of(quantization))
    model, oracle = DraftModel.load(path, settings), oracle_model(path)
    rng = random.Random(5)
    mirrors = [Mirror(idx, rng.choices(range(VOCAB_SIZE), k=12)) for idx in range(8)]
    found = feed(model, mirrors)
    wanted = torch.stack([oracle_log_probs(oracle, each.prefix) for each in mirrors])
    assert not torch.allclose(found, wanted, atol=1e-3), "nothing was quantised"
    shared = torch.minimum(found.exp(), wanted.exp()).sum(-1)
    assert shared.mean() > (0.9 if quantization == "int8" else 0.4)


def test_bf16(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("qwen3_moe")
    model, oracle = DraftModel.load(path, F32._replace(dtype=torch.bfloat16)), oracle_model(path)
    mirror = Mirror(0, [7, 100, 31, 5])
    found = feed(model, [mirror])
    shared = torch.minimum(found[0].exp(), oracle_log_probs(oracle, mirror.prefix).exp()).sum()
    assert shared > 0.95


def test_blocks_are_reserved_and_come_back(checkpoint: Callable[[str], Path]) -> None:
    settings = F32._replace(num_slots=16)
    model = DraftModel.load(checkpoint("llama"), settings)
    text = DraftText(1, np.arange(5, dtype=np.int32), num_prompt=5)
    model.open(text.seq_id, num_prompt=text.num_prompt)
    assert model.reserve(1, 5)
    assert model.num_free_blocks == 2
    model.open(2, num_prompt=text.num_prompt)
    assert not model.reserve(2, 9)
    assert model.reserve(2, 8)
    assert model.num_free_blocks == 0
    model.drop(1)
    assert model.num_free_blocks == 2


def test_a_rehearsal_makes_passes_of_all_kinds_and_leaves_nothing(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First and later rows of a text, trees, and trees whose first rows are in the cache."""
    model = DraftModel.load(checkpoint("llama"), F32._replace(num_slots=32, max_length=20))
    free, kinds = model.num_free_blocks, set()

    def logits(self: DraftModel, placed: Slices) -> Tensor:
        is_deeper = placed.tree_lens is not None and placed.tree_lens[0] > placed.counts[0]
        kinds.add((int(placed.counts[0]), placed.tree_mask is not None, bool(is_deeper)))
        return compute(self, placed)

    compute = DraftModel._logits
    monkeypatch.setattr(DraftModel, "_logits", logits)
    model.rehearse()
    # There is room for 3 * 8 rows, not for 3 * 16.
    assert {size for size, _, _ in kinds} == {1, 2, 4, 8}
    assert {(8, False, False), (8, True, False), (8, True, True)} < kinds
    assert model.num_free_blocks == free
    # Nor are there positions for more than the longest text.
    kinds.clear()
    model.max_length = 5
    model.rehearse()
    assert {size for size, _, _ in kinds} == {1, 2}


def test_a_model_on_a_gpu_rehearses_before_it_serves(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse(self: DraftModel) -> None:
        rehearsed.append(self)

    rehearsed: list[DraftModel] = []
    monkeypatch.setattr(DraftModel, "rehearse", rehearse)
    DraftModel.load(checkpoint("llama"), F32)
    assert rehearsed == []
    monkeypatch.setattr("draft_nodes.model.open_runtime", lambda *_: DelayedRuntime())
    assert rehearsed == [DraftModel.load(checkpoint("llama"), F32)]


def test_a_model_that_does_not_fit_on_a_gpu_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(HostRuntime):
        def memory(self) -> DeviceMemory:
            return DeviceMemory(total=2**30, free=2**20)

    def allocate(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("draft_nodes.model.open_runtime", lambda *_: Full())
    monkeypatch.setattr("attention_nodes.step.kv_cache.of_blocks", allocate)
    with pytest.raises(ConfigError, match=r"the draft model does not fit: 1\.\d.*of 1"):
        DraftModel.load(checkpoint("llama"), F32)


def test_a_model_without_numbers_drafts_nothing(checkpoint: Callable[[str], Path]) -> None:
    model = DraftModel.load(checkpoint("llama"), F32)
    text = DraftText(1, np.arange(5, dtype=np.int32), num_prompt=5)
    drafter = SerialDrafter(model, Growth(4, 1, 1), max_length=model.max_length)
    (draft,) = drafter.draft([DraftRequest(text, 4)])
    assert len(draft.tokens) == 4
    drafter.end(text)
    model._decoder.layers[0].post_norm.fill_(float("nan"))
    assert drafter.draft([DraftRequest(text, 4)]) == [NO_DRAFT]


def test_formats_that_kernels_lack_are_refused(checkpoint: Callable[[str], Path]) -> None:
    settings = F32._replace(kernels="reference", precision=rules_of("int4"))
    with pytest.raises(ConfigError, match="the kernels reference have no weights in int"):
        DraftModel.load(checkpoint("llama"), settings)
