"""Batches of sampling: neutral but for what is set, or of settings of all kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling import AllowedTokens, BannedTokens, LogitBias, SamplingBatch


def batch(num_rows: int, **settings: object) -> SamplingBatch:
    """A batch of `num_rows` with neutral values except for `settings`: numbers or tensors."""

    def column(name: str, neutral: float, dtype: torch.dtype = torch.float32) -> Tensor:
        value = settings.pop(name, neutral)
        return torch.as_tensor(value).to(dtype).expand(num_rows).clone()

    columns = {
        "temperature": column("temperature", 1.0),
        "top_k": column("top_k", 0, torch.int64),
        "top_p": column("top_p", 1.0),
        "min_p": column("min_p", 0.0),
        "presence_penalty": column("presence_penalty", 0.0),
        "frequency_penalty": column("frequency_penalty", 0.0),
        "repetition_penalty": column("repetition_penalty", 1.0),
        "seeds": column("seeds", 0, torch.int64),
        "choices": column("choices", 0, torch.int64),
        "positions": column("positions", 0, torch.int64)
        if "positions" in settings
        else torch.arange(num_rows),
    }
    return SamplingBatch(**columns, **settings)  # type: ignore[arg-type]


def some(chance: float, values: Tensor, neutral: float) -> Tensor:
    """Values in so many of the rows, and else the neutral one."""
    return torch.where(torch.rand(len(values)) < chance, values, torch.full_like(values, neutral))


def any_batch(vocab: int, *, processed: bool, num_rows: int = 24) -> SamplingBatch:
    """Random settings of all kinds, together."""
    tokens = torch.randint(0, vocab, (num_rows, 2, 40))
    lengths = torch.randint(0, 40, (num_rows, 2)).tolist()
    edits = {
        "presence_penalty": some(0.5, torch.randn(num_rows), 0),
        "frequency_penalty": some(0.5, torch.randn(num_rows), 0),
        "repetition_penalty": some(0.5, torch.rand(num_rows) + 0.5, 1),
        "prompts": [own[0, : size[0]].int() for own, size in zip(tokens, lengths, strict=True)],
        "outputs": [own[1, : size[1]].tolist() for own, size in zip(tokens, lengths, strict=True)],
        "logit_bias": LogitBias(
            torch.arange(num_rows), torch.randint(0, vocab, (num_rows,)), torch.randn(num_rows) * 4
        ),
        "banned": BannedTokens(torch.arange(num_rows), torch.randint(0, vocab, (num_rows,))),
        "allowed": AllowedTokens(
            torch.randperm(num_rows)[: num_rows // 2],
            torch.randint(-(1 << 31), 1 << 31, (num_rows // 2, -(-vocab // 32)), dtype=torch.int32),
        ),
    }
    return batch(
        num_rows,
        temperature=some(0.9, torch.rand(num_rows) * 2, 0),
        top_k=some(0.5, torch.randint(0, vocab + 3, (num_rows,)), 0),
        top_p=some(0.7, torch.rand(num_rows) ** 0.3, 1),
        min_p=some(0.4, torch.rand(num_rows) ** 4, 0),
        seeds=torch.randint(-(1 << 62), 1 << 62, (num_rows,)),
        choices=torch.randint(0, 5, (num_rows,)),
        positions=torch.randint(0, 1 << 40, (num_rows,)),
        **(edits if processed else {}),
    )


def any_logits(num_rows: int, vocab: int, *, spread: float, step: float) -> Tensor:
    """Draw scores; with a `step` many are equal."""
    logits = torch.randn(num_rows, vocab) * spread
    return (logits / step).round() * step if step else logits


def mixed_batch(rows: Sequence[int]) -> SamplingBatch:
    """The given rows of a batch of 24 rows that use all features in turn."""
    rng = torch.Generator().manual_seed(8)
    num_rows = 24
    row = torch.arange(num_rows)
    tokens = torch.randint(0, 500, (num_rows, 9), generator=rng)
    kept = torch.tensor(rows)
    place = {old: new for new, old in enumerate(rows)}
    ruled = [r for r in rows if r % 5 == 0]
    return batch(
        len(rows),
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.8])[row % 4][kept],
        top_k=torch.tensor([0, 10, 0, 0, 300])[row % 5][kept],
        top_p=torch.tensor([1.0, 1.0, 0.9])[row % 3][kept],
        min_p=torch.tensor([0.0] * 6 + [0.1])[row % 7][kept],
        presence_penalty=torch.tensor([0.0, 0.0, 0.5])[row % 3][kept],
        repetition_penalty=torch.tensor([1.0, 1.0, 1.0, 1.2])[row % 4][kept],
        seeds=torch.tensor([-1 - 3 * r for r in rows]),
        choices=(row % 2)[kept],
        positions=(row * 7)[kept],
        prompts=[tokens[r, :5].tolist() for r in rows],
        outputs=[tokens[r, 5:].tolist() for r in rows],
        logit_bias=LogitBias(
            integers([place[r] for r in ruled]),
            integers([r * 3 for r in ruled]),
            torch.full((len(ruled),), 2.0),
        ),
        banned=BannedTokens(integers([place[r] for r in ruled]), integers(ruled)),
    )


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
