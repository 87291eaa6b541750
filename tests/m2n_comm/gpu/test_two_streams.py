"""A whole node over two streams: no race within a step or between consecutive steps.

Every operation of attention, experts and sampling is recorded with its stream; the kernels are
plain torch, whose reads and writes can be seen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.engine import GpuEngine, node_config
from benchmarks.gpu.workload import QUICK, Variant
from deploy.rig import nodes
from deploy.rig.nodes import model_of
from kernels import reference
from tests.m2n_comm.gpu.stream_graph import StreamGraph


def play(monkeypatch: pytest.MonkeyPatch, *, ignores_waits: int | None = None) -> StreamGraph:
    """Prefill a prompt and decode three sequences in two micro-batches, two steps at a time."""
    monkeypatch.setattr(nodes, "select_ops", lambda *args, **kwargs: reference)
    graph = StreamGraph()
    workload = replace(QUICK, fields={**QUICK.fields, "num_hidden_layers": 3})
    model = model_of(workload.fields)
    # Without CUDA graphs: plain torch reads values on the host, which no recording allows.
    config = node_config(model, workload, "cpu", Variant(cuda_graphs=False, gpu_streams=2))
    engine = GpuEngine(model, config, graph, num_micro_batches=2)
    if ignores_waits is not None:
        graph.streams[ignores_waits].ignores_waits = True
    with torch.inference_mode(), graph.recording():
        engine.prefill(7)
        engine.start_decode(3, 9)
        for _ in range(4):
            engine.decode_step()
        engine.finish()
    assert engine.last_result is not None
    assert engine.last_result.step == 5
    return graph


def test_a_node_on_two_streams_races_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = play(monkeypatch)
    assert graph.problems == []
    by_stream = [sum(op.stream == stream for op in graph.ops) for stream in (0, 1)]
    assert min(by_stream) > 100
    # The streams overlap: some operations do not wait for the other stream's last one.
    last = {0: graph.ops[0], 1: graph.ops[0]}
    overlaps = 0
    for op in graph.ops:
        overlaps += not op.follows(last[1 - op.stream])
        last[op.stream] = op
    assert overlaps > 0


@pytest.mark.parametrize("stream", [0, 1])
def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    assert play(monkeypatch, ignores_waits=stream).problems
