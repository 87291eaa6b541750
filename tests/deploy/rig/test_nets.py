"""A rig's tokens are transformers', over every net; a measuring process that fails says why."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.rig.forks import ForkError, fork
from deploy.rig.nets import ProcessPair, local_net
from deploy.rig.nodes import Rig
from expert_nodes.worker import run_ticket
from m2n_comm.gpu.local import DeviceNet
from models.description.config import load_model_config
from models.description.facts import facts_of
from tests.checkpoints import make_checkpoint, oracle_generate
from topspin.messages import StepPlan
from topspin.plan.from_flags import resolve
from topspin.plan.settings import Transport

PROMPT, DECODED = 7, 4
NUM_BLOCKS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rig"), "mixtral")


def make_rig(path: Path, transport: Transport, kernels: str) -> Rig:
    model = load_model_config(path)
    config = resolve(
        facts_of(model),
        path=str(path),
        dtype="float32",
        transport=transport,
        layout="shared",
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        kernels=kernels,
        deterministic=kernels == "deterministic",
    ).for_node()
    return Rig(model, config, path)


def make_plans(rig: Rig) -> list[StepPlan]:
    """Return the steps of a prompt in two parts, and of tokens behind it."""
    batch = rig.batch(range(NUM_BLOCKS))
    prompt = batch.prefill(PROMPT, most=4, growth=DECODED + 1)
    return [*prompt, *(batch.decode() for _ in range(DECODED))]


@torch.inference_mode()
@pytest.mark.parametrize("net", ["device", "local", "shm", "tcp"])
def test_tokens_do_not_depend_on_the_net(net: str, checkpoint: Path) -> None:
    transport: Transport = "shm" if net == "shm" else "tcp" if net == "tcp" else "local"
    # Answers of each expert are what DeviceNet does not have.
    rig = make_rig(checkpoint, transport, "deterministic" if net == "local" else "reference")
    runner, experts = rig.runner(rig.decoder(NUM_BLOCKS)), rig.experts()
    plans = make_plans(rig)

    def serve(pair: ProcessPair) -> None:
        with torch.inference_mode(), closing(pair.accept(experts)) as end:
            for plan in plans:
                run_ticket(end, experts, plan.ticket)

    server = None
    if transport == "local":
        opened = local_net(rig, runner, experts)
        assert isinstance(opened, DeviceNet) == (net == "device")
    else:
        pair = ProcessPair(rig)
        server = threading.Thread(target=serve, args=(pair,))
        server.start()
        opened = pair.connect(runner)
    with closing(opened):
        results = [runner.execute(plan, opened, index=0) for plan in plans]
        if server is not None:
            server.join()
    tokens = [np.frombuffer(each.tokens, dtype="<i4").tolist() for each in results]
    prompt = np.frombuffer(plans[0].new[0].tokens, dtype="<i4").tolist()
    expected = oracle_generate(checkpoint, [prompt], 1 + DECODED)
    assert [token for each in tokens for token in each] == expected.tokens[0]


def test_a_fork_has_a_result_or_a_reason() -> None:
    def fail() -> int:
        raise ValueError("no such core")

    assert fork(lambda: {"a": 1.5}, dict[str, float])() == {"a": 1.5}
    with pytest.raises(ForkError, match=r"^ValueError: no such core$"):
        fork(fail, int)()
