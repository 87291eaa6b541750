"""The engine of `make gpu` at a tiny shape, its kernels interpreted, and the plans it is given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.engine import Touched, fitting, open_engine
from benchmarks.gpu.plans import Plans
from benchmarks.gpu.workload import FULL, QUICK, Variant
from benchmarks.kernels.byte_floor import expert_numbers
from kernels.runtime import DeviceMemory
from m2n_comm.net import ExpertBatch
from topspin.errors import ConfigError
from topspin.messages import StepPlan

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


def make_plans(**changes: int) -> Plans:
    values = {"block_size": 4, "num_blocks": 12, "vocab_size": 50, "max_tokens": 16}
    return Plans(**(values | changes))


def replay(plans: Iterator[StepPlan]) -> dict[int, list[int]]:
    """Run plans as a node does; return the blocks of each unfinished sequence."""
    blocks: dict[int, list[int]] = {}
    for plan in plans:
        for seq_id in ints(plan.finished):
            del blocks[seq_id]
        for new in plan.new:
            assert new.seq_id not in blocks
            blocks[new.seq_id] = ints(new.blocks)
        for micro_batch in plan.micro_batches:
            ids = iter(ints(micro_batch.block_ids))
            seq_ids, counts = ints(micro_batch.seq_ids), ints(micro_batch.block_counts)
            for seq_id, count in zip(seq_ids, counts, strict=True):
                blocks[seq_id] += [next(ids) for _ in range(count)]
            assert not list(ids)
        held = [block for each in blocks.values() for block in each]
        assert len(held) == len(set(held))
    return blocks


def test_plans_give_every_position_a_block() -> None:
    plans = make_plans(num_micro_batches=2)

    def steps() -> Iterator[StepPlan]:
        plans.start_decode(3, 7)
        for step in range(1, 3):
            plan = plans.decode()
            assert [len(ints(each.seq_ids)) for each in plan.micro_batches] == [1, 2]
            assert (plan.ticket.step, plan.ticket.previous) == (step, step - 1)
            assert plans.contexts == [7 + step] * 3
            yield plan
        plans.start_decode(1, 3)
        plans.start_decode(2, 4)  # a sequence that was never sent is not finished either
        assert plans.rows == (1, 1)
        yield plans.decode()

    blocks = replay(steps())
    assert sorted(len(each) for each in blocks.values()) == [2, 2]


def test_a_long_prompt_is_prefilled_within_the_budget() -> None:
    plans = make_plans()
    parts = [each.micro_batches[0] for each in plans.prefill(39)]
    assert [ints(part.num_tokens) for part in parts] == [[16], [16], [7]]
    assert [part.wanted for part in parts] == [b"\0", b"\0", b"\1"]
    assert plans.contexts == [39]


def test_a_cache_that_is_too_small_is_said_so() -> None:
    plans = make_plans()
    with pytest.raises(ConfigError, match=r"need 3 more blocks of 4 .* has 0 of 12 left"):
        plans.start_decode(5, 8)
    plans.start_decode(4, 10)
    plans.decode()
    plans.decode()
    with pytest.raises(ConfigError, match="need 1 more blocks"):
        plans.decode()


def drive(variant: Variant) -> tuple[list[list[int]], dict[str, float]]:
    """Prefill, decode one sequence, then two; return the tokens and the last step's byte floor."""
    engine = open_engine(TINY, DEVICE, variant)
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
def test_all_variants_compute_the_same() -> None:
    plain = drive(Variant(cuda_graphs=False, gpu_streams=1))
    assert [len(each) for each in plain[0]] == [1, 1, 2]
    assert drive(Variant(cuda_graphs=True, gpu_streams=2)) == plain


@pytest.mark.slow
def test_recordings_on_one_stream_compute_the_same() -> None:
    plain = drive(Variant(cuda_graphs=False, gpu_streams=1))
    assert drive(Variant(cuda_graphs=True, gpu_streams=1)) == plain


def test_it_needs_no_package_of_servers_or_of_cpu_kernels() -> None:
    # Machines with GPUs have torch, and perhaps no way to install anything else.
    absent = "numba llvmlite zmq rich aiohttp starlette httpx tokenizers huggingface_hub gguf"
    absent += " jinja2 llguidance"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent.split()})); "
        "import benchmarks.gpu.engine"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def make_batch(layer: int, micro_batch: int, slots: list[list[int]]) -> ExpertBatch:
    empty = torch.empty(len(slots), 0)
    return ExpertBatch(
        micro_batch, layer, 0, empty, torch.tensor(slots, dtype=torch.int32), empty, (len(slots),)
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
            for mb in (0, 1):
                recorded[size, layer, mb] = make_batch(layer, mb, [[-1, -1]] * size)
                serve(recorded[size, layer, mb])
    is_recording = False
    touched.begin_step()
    for layer in (0, 1):
        serve(make_batch(layer, 0, [[0, 1], [1, 2], [-1, -1]]))
    assert touched.counts((2,)) == [3, 3]
    # A replay: the recorded tensors change without the host.
    touched.begin_step()
    recorded[4, 0, 0].slots[:3] = torch.tensor([[5, 6], [6, 7], [8, 5]])
    recorded[4, 0, 1].slots[:2] = torch.tensor([[9, 6], [6, 7]])
    assert touched.counts((3, 2)) == [5, 0]
    assert touched.counts((2, 2)) == [0, 0]


def test_the_context_is_what_fits_beside_the_weights() -> None:
    """On 80 GB, of which 79.6 GiB are free, the full context needs 84.8 GiB; 141 GB are enough."""
    gib = 2**30
    fitted = fitting(FULL, DeviceMemory(80 * gib, int(79.6 * gib)))
    assert 1024 <= fitted.context < FULL.context
    assert replace(fitted, context=FULL.context) == FULL
    assert fitting(FULL, DeviceMemory(140 * gib, 139 * gib)) == FULL
    with pytest.raises(ConfigError, match=r"Qwen3-30B-A3B: 48.0 GiB .* --batch"):
        fitting(FULL, DeviceMemory(48 * gib, 48 * gib))
