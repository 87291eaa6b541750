"""The engine of `make gpu` at a tiny shape, its kernels interpreted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.engine import Touched, fitting, open_engine
from benchmarks.gpu.workload import FULL, QUICK
from benchmarks.kernels.byte_floor import expert_numbers
from kernels.runtime import DeviceMemory
from m2n_comm.net import ExpertBatch
from topspin.errors import ConfigError

# Where there is a GPU, the engine runs on it.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = replace(
    QUICK,
    fields={**QUICK.fields, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64},
    batches=(1, 2),
    prefill_tokens=6,
)


def ints(packed: bytes) -> list[int]:
    return np.frombuffer(packed, dtype="<i4").tolist()


def drive(*, cuda_graphs: bool) -> tuple[list[list[int]], dict[str, float]]:
    """Prefill, decode one sequence, then two; return the tokens and the last step's byte floor."""
    engine = open_engine(TINY, DEVICE, cuda_graphs=cuda_graphs)
    model = engine.model
    assert model.moe is not None
    one_expert = expert_numbers(model) * 4
    tokens = []
    engine.prefill(6)
    engine.finish()
    assert engine.last_result is not None
    tokens.append(ints(engine.last_result.tokens))
    engine.start_decode(1, 5)
    engine.decode_step()
    floor = engine.decode_floor()
    tokens.append(ints(engine.last_result.tokens))
    # One token: top_k experts in each layer, and 6 positions.
    assert floor["experts"] == model.moe.top_k * model.num_layers * one_expert
    assert floor["kv"] == 2 * model.kv_size * 4 * model.num_layers * (6 + 1)
    engine.start_decode(2, 5)
    engine.decode_step()
    engine.decode_step()
    floor = dict(engine.decode_floor())
    tokens.append(ints(engine.last_result.tokens))
    touched = floor["experts"] / one_expert
    assert model.moe.top_k * model.num_layers <= touched
    assert touched <= model.moe.num_experts * model.num_layers
    assert engine.last_result.step == 4
    assert not engine.last_result.errors
    engine.close()
    return tokens, floor


@pytest.mark.slow
def test_recordings_compute_the_same() -> None:
    plain = drive(cuda_graphs=False)
    assert [len(each) for each in plain[0]] == [1, 1, 2]
    assert drive(cuda_graphs=True) == plain


@pytest.mark.slow
def test_it_needs_no_package_of_servers_or_of_cpu_kernels() -> None:
    # Machines with GPUs have torch, and perhaps no way to install anything else.
    absent = "numba llvmlite zmq rich aiohttp fastapi httpx tokenizers huggingface_hub gguf jinja2"
    absent += " llguidance"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent.split()})); "
        "import benchmarks.gpu.engine"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def make_batch(layer: int, slots: list[list[int]]) -> ExpertBatch:
    empty = torch.empty(len(slots), 0)
    return ExpertBatch(
        0, layer, 0, empty, torch.tensor(slots, dtype=torch.int32), empty, (len(slots),)
    )


def test_touched_reads_what_a_replay_has_written() -> None:
    is_recording = False
    touched = Touched(lambda: is_recording)
    serve = touched.watch(lambda batch: batch.hidden)
    recorded = {}
    is_recording = True
    for size in (4, 2):
        touched.begin_step()
        for layer in (0, 1):
            recorded[size, layer] = make_batch(layer, [[-1, -1]] * size)
            serve(recorded[size, layer])
    is_recording = False
    touched.begin_step()
    for layer in (0, 1):
        serve(make_batch(layer, [[0, 1], [1, 2], [-1, -1]]))
    assert touched.counts(2) == [3, 3]
    # A replay: the recorded tensors change without the host.
    touched.begin_step()
    recorded[4, 0].slots[:3] = torch.tensor([[5, 6], [6, 7], [8, 5]])
    assert touched.counts(3) == [4, 0]
    assert touched.counts(2) == [0, 0]


def test_the_context_is_what_fits_beside_the_weights() -> None:
    """On 80 GB, of which 79.6 GiB are free, the full context needs 84.8 GiB; 141 GB are enough."""
    gib = 2**30
    fitted = fitting(FULL, DeviceMemory(80 * gib, int(79.6 * gib)))
    assert 1024 <= fitted.context < FULL.context
    assert replace(fitted, context=FULL.context) == FULL
    assert fitting(FULL, DeviceMemory(140 * gib, 139 * gib)) == FULL
    with pytest.raises(ConfigError, match=r"Qwen3-30B-A3B: 48.0 GiB .* --batch"):
        fitting(FULL, DeviceMemory(48 * gib, 48 * gib))
