"""Sampling entries: greedy, plain draws, and draws with filters, over a large vocabulary.

Logits are what the LM head has just written, so they are not made cold. The work counts one
reading of the logits; filters read them several times, and their fraction shows it.
"""

from __future__ import annotations

from typing import Final

import torch

from benchmarks import roofline
from benchmarks.gpu_kernels import Entry
from kernels.sampling import SamplingBatch
from kernels.triton.sampling.launches import draw, plan_sampling

VOCAB: Final = 151_936
"""Qwen3's."""
ROWS: Final = (1, 32, 128)
SETTINGS: Final[dict[str, dict[str, float]]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "top_k and top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def sampling_batch(
    num_rows: int, *, temperature: float, top_k: float = 0, top_p: float = 1.0
) -> SamplingBatch:
    """Give rows of the same settings and of different names."""
    zeros, ones = torch.zeros(num_rows), torch.ones(num_rows)
    return SamplingBatch(
        temperature=ones * temperature,
        top_k=torch.full((num_rows,), int(top_k)),
        top_p=ones * top_p,
        min_p=zeros,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=ones,
        seeds=torch.arange(num_rows),
        choices=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.arange(num_rows),
    )


def sampling_entry(name: str, num_rows: int, vocab: int, device: torch.device) -> Entry:
    """Give the entry of logits f32[R, V] with the settings of that name."""
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_rows, vocab, generator=rng) * 3).to(device)
    settings = SETTINGS[name]
    plan = plan_sampling(sampling_batch(num_rows, **settings), vocab, device)
    work = roofline.sample(num_rows, vocab, draws=settings["temperature"] > 0)
    return Entry(f"sample {name}", f"{num_rows} x {vocab}", work, lambda _: draw(logits, plan))
