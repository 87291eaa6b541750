"""Times made-up decode steps of a model's shapes on one layout: the child of calibrate.

Owns a small engine without scheduler: an attention half of plain matmuls and experts with
random weights, a few layers of them, joined by the real data plane. The expert node is
forked, so that both have their own cores and threads. Prints one JSON object. Run as
`python -m topspin.launch.calibration_node`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Literal

import torch

from kernels.contracts import ExpertWeights
from kernels.dispatch import Ops, select_ops
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.local import LocalHub
from m2n_comm.net import ExpertBatch, NetShape
from m2n_comm.open import ExpertListener, connect_attention, listen_expert
from models.config import ModelConfig, load_model_config
from topspin.cores import CORES_VARIABLE, take_cores
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertPeer, StepTicket
from topspin.process import follow_parent

NUM_LAYERS = 2
NUM_ROWS = 16
NUM_STEPS = 50
WARM_UP = 10
TIMEOUT_S = 20.0


class _Trial:
    """The made-up model: shapes of `model`, random weights, NUM_LAYERS layers."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, kernels: str, quantization: str
    ) -> None:
        assert model.moe is not None
        self._model = model
        self._moe = model.moe
        self._dtype = dtype
        self._ops: Ops = select_ops(kernels, dtype, quantization)
        self.table: ExpertTable = uniform_table(
            num_layers=NUM_LAYERS, num_experts=model.moe.num_experts, num_nodes=1
        )

    def shape(self) -> NetShape:
        """Return the shape of the one pair."""
        return NetShape(
            hidden_size=self._model.hidden_size,
            top_k=self._moe.top_k,
            num_layers=NUM_LAYERS,
            payload=self._dtype,
            window_rows=NUM_ROWS,
            num_micro_batches=1,
            deadline_s=TIMEOUT_S,
        )

    def experts(self) -> list[ExpertWeights]:
        """Make every layer's experts."""
        wide, hidden, num = self._moe.intermediate_size, self._model.hidden_size, self._moe
        return [
            self._ops.pack_experts(
                [torch.randn(2 * wide, hidden).to(self._dtype) for _ in range(num.num_experts)],
                [torch.randn(hidden, wide).to(self._dtype) for _ in range(num.num_experts)],
                share_per_row=num.top_k / num.num_experts,
            )
            for _ in range(NUM_LAYERS)
        ]

    def compute(self, experts: list[ExpertWeights], batch: ExpertBatch) -> torch.Tensor:
        """Do what an expert node does with a batch."""
        weights = experts[batch.layer]
        return self._ops.grouped_mlp(batch.hidden, batch.slots, batch.weights, weights).out

    def serve(self, listener: ExpertListener) -> None:
        """Be the expert node."""
        experts = self.experts()
        net = listener.accept(
            self.shape(),
            index=0,
            incarnation=2,
            attention_incarnations=(1,),
            timeout_s=TIMEOUT_S,
            table=self.table,
            wait=_wait(),
        )
        for step in range(1, NUM_STEPS + WARM_UP + 1):
            net.begin(_ticket(step))
            for layer in range(NUM_LAYERS):
                for batch in net.gather(0, layer):
                    net.reply(batch, self.compute(experts, batch))
        net.close()

    def steps_s(self, net: AttentionSide) -> list[float]:
        """Be the attention node; return the seconds of each step."""
        model = self._model
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        inner = model.num_heads * model.head_dim
        pack = self._ops.pack_projection
        layers = [
            (
                pack(torch.randn(heads, model.hidden_size).to(self._dtype)),
                pack(torch.randn(model.hidden_size, inner).to(self._dtype)),
            )
            for _ in range(NUM_LAYERS)
        ]
        hidden = torch.randn(NUM_ROWS, model.hidden_size).to(self._dtype)
        experts = torch.rand(NUM_ROWS, self._moe.num_experts).argsort(dim=1)
        experts = experts[:, : self._moe.top_k].contiguous()
        weights = torch.rand(NUM_ROWS, self._moe.top_k)
        out = torch.empty(NUM_ROWS, model.hidden_size)
        found = []
        for step in range(1, NUM_STEPS + WARM_UP + 1):
            started = time.perf_counter()
            net.begin(_ticket(step))
            for layer, (qkv, o) in enumerate(layers):
                mixed = self._ops.linear(hidden, qkv)[:, :inner]
                self._ops.linear(mixed.contiguous(), o)
                net.dispatch(0, layer, hidden, experts, weights)
                net.combine(0, layer, out)
            found.append(time.perf_counter() - started)
        return found[WARM_UP:]


def _ticket(step: int) -> StepTicket:
    return StepTicket(
        step=step,
        previous=step - 1,
        generation=1,
        table_version=1,
        num_micro_batches=1,
        participants=(0,),
        row_buckets=(NUM_ROWS,),
    )


def _wait() -> Literal["block", "spin"]:
    return "spin" if os.environ.get(CORES_VARIABLE) else "block"


def _run(trial: _Trial, transport: str, expert_cores: str | None) -> list[float]:
    if transport == "local":
        experts = trial.experts()
        hub = LocalHub(trial.shape(), 1, 1)
        hub.attach_expert(0, lambda batch: trial.compute(experts, batch), table=trial.table)
        return trial.steps_s(hub.attention_net(0, trial.table))
    listener = listen_expert("tcp" if transport == "tcp" else "shm")
    # Forked before any thread exists: OpenMP starts its own at the first parallel region.
    child = os.fork()
    if child == 0:
        try:
            if expert_cores:
                os.environ[CORES_VARIABLE] = expert_cores
            take_cores()
            trial.serve(listener)
        finally:
            os._exit(0)
    take_cores()
    net = connect_attention(
        trial.shape(),
        index=0,
        incarnation=1,
        experts=[ExpertPeer(address=listener.address, incarnation=2)],
        table=trial.table,
        timeout_s=TIMEOUT_S,
        wait=_wait(),
    )
    found = trial.steps_s(net)
    net.close()
    os.waitpid(child, 0)
    return found


def main() -> int:
    """Time the steps and print {"step_ms": median}."""
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m topspin.launch.calibration_node")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--transport", choices=["local", "shm", "tcp"], required=True)
    parser.add_argument("--expert-cores", help="cores of the expert node, with commas")
    args = parser.parse_args()
    with torch.inference_mode():
        trial = _Trial(
            load_model_config(args.model),
            getattr(torch, args.dtype),
            args.kernels,
            args.quantization,
        )
        found = _run(trial, args.transport, args.expert_cores)
    print(json.dumps({"step_ms": round(statistics.median(found) * 1e3, 3)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
