"""Other tables: one prepared in pieces computes like one loaded at start; old ones are freed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_nodes import tables
from expert_nodes.experts import Experts
from expert_nodes.tables import TableChange
from expert_nodes.versions import Held
from expert_nodes.worker import ExpertWorker, InlineNet
from models.checkpoints import expert_reader
from models.checkpoints.checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint
from tests.expert_nodes.nodes import (
    batch_of,
    load,
    node_config,
    prepare,
    reader_of,
    table_of,
    taken,
)
from topspin.errors import ProtocolError
from topspin.messages import ExpertCounts, Message, TablePrepared, Topology, Welcome
from topspin.plan.precision import Format

FIRST = ((0, 1, 2), (5, 6, 7))
SECOND = ((0, 4, 2), (5, 6, 7))
THIRD = ((4, 0), (1, 2, 3, 6))
REST = ((1, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4))
"""Held by the other node."""
NUM_ROWS = 7


def outputs(
    experts: Experts, held: Held, version: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Compute rows that use every slot of each layer."""
    generator = torch.Generator().manual_seed(5)
    results = []
    for layer, ids in enumerate(held):
        hidden = torch.randn(NUM_ROWS, 64, generator=generator).to(dtype)
        slots = torch.stack([torch.arange(NUM_ROWS) % len(ids), torch.full((NUM_ROWS,), -1)], 1)
        weights = torch.rand(NUM_ROWS, 2, generator=generator)
        batch = batch_of(hidden, slots, weights, layer=layer, version=version)
        results.append(experts.compute(batch).clone())
    return results


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (torch.float32, "none"),
        *((torch.bfloat16, mode) for mode in ("none", "int4", "int8")),
    ],
)
# One weight per slot; joined in bfloat16; so with biases.
@pytest.mark.parametrize("variant", ["mixtral", "olmoe", "gpt_oss"])
def test_a_prepared_table_computes_as_if_loaded_at_start(
    tmp_path: Path,
    variant: str,
    dtype: torch.dtype,
    mode: Format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_reader, "PIECE_BYTES", 2000)
    path = make_checkpoint(tmp_path, variant, num_hidden_layers=2)
    experts, reader = load(path, FIRST, dtype=dtype, mode=mode), reader_of(path, dtype)
    before = outputs(experts, FIRST, 1, dtype)
    for version, held in ((2, SECOND), (3, THIRD)):
        pieces = 0
        for _ in experts.prepare(version, held, reader):
            pieces += 1
            if pieces == 3:  # in the middle, the table in use still works
                old_held = FIRST if version == 2 else SECOND
                old = outputs(experts, old_held, version - 1, dtype)
                if version == 2:
                    assert all(map(torch.equal, old, before))
        assert pieces > 5
        fresh = outputs(load(path, held, dtype=dtype, mode=mode), held, 1, dtype)
        assert all(map(torch.equal, outputs(experts, held, version, dtype), fresh))


def test_what_stays_is_shared_and_the_old_table_goes_with_the_first_use(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    experts = load(path, FIRST)
    old = experts._versions.newest
    prepare(experts, 2, SECOND, reader_of(path))
    new = experts._versions.newest
    assert new.layers[1] is old.layers[1]
    assert new.layers[0].down[2] is old.layers[0].down[2]
    assert new.layers[0].down[1] is not old.layers[0].down[1]
    assert experts.versions == [1, 2]
    gone = weakref.ref(old.layers[0].down[1].data)
    del old
    outputs(experts, FIRST, 1)
    assert experts.versions == [1, 2]
    outputs(experts, SECOND, 2)
    assert experts.versions == [2]
    assert gone() is None
    with pytest.raises(ProtocolError, match=r"expert table 1: this node has \[2\]"):
        outputs(experts, FIRST, 1)


def test_counts_carry_the_version_under_which_they_were_served(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    experts = load(path, FIRST)
    outputs(experts, FIRST, 1)
    prepare(experts, 2, THIRD, reader_of(path))
    outputs(experts, THIRD, 2)
    assert taken(experts) == {1: [[3, 2, 2], [3, 2, 2]], 2: [[4, 3], [2, 2, 2, 1]]}
    assert taken(experts) == {}


def test_a_table_that_begins_anew_must_be_loaded_already(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    experts = load(path, FIRST)
    want = outputs(experts, FIRST, 1)
    prepare(experts, 2, SECOND, reader_of(path))
    experts.rename(2, FIRST)  # a recovery gave the number to another table
    assert experts.versions == [2]
    assert all(map(torch.equal, outputs(experts, FIRST, 2), want))
    assert sum(taken(experts)[1][0]) == NUM_ROWS
    with pytest.raises(ProtocolError, match="expert table 3 gives this node other experts"):
        experts.rename(3, SECOND)


def test_a_change_does_a_little_at_a_time_and_answers_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    monkeypatch.setattr(tables, "WORK_S", 0.0)  # one piece per call
    experts = load(path, FIRST)
    change = TableChange(experts, model_path=path, config=node_config(path), index=1)
    assert not change.is_busy
    change.start(table_of(2, REST, THIRD))
    assert change.is_busy
    assert change.work() is None
    change.start(table_of(3, REST, SECOND))  # a newer one replaces it
    answers = []
    while change.is_busy:
        answers.append(change.work())
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert len(answers) > 4
    assert answers[-1] == TablePrepared(role="expert", index=1, version=3)
    assert experts.versions == [1, 3]
    # Another node refused the table that this one prepared.
    change.start(table_of(3, REST, THIRD))
    assert experts.versions == [1]
    while change.is_busy:
        change.work()
    assert experts.versions == [1, 3]
    assert experts._versions.newest.held == THIRD
    change.start(table_of(4, REST, FIRST))
    change.work()
    change.cancel()
    assert not change.is_busy
    assert experts.versions == [1, 3]


def test_a_table_whose_experts_another_checkpoint_has_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    experts, checkpoint = load(path, FIRST), Checkpoint(path)
    assert checkpoint.fingerprint()
    check = checkpoint.check_unchanged
    change = TableChange(experts, model_path=path, config=node_config(path), index=0, check=check)

    def answer(version: int, held: Held) -> TablePrepared:
        change.start(table_of(version, held, REST))
        while (found := change.work()) is None:
            pass
        return found

    assert answer(2, SECOND).refusal == ""
    make_checkpoint(tmp_path, "mixtral", seed=1)
    assert "model.safetensors: replaced" in answer(3, THIRD).refusal
    assert experts.versions == [1, 2]
    (tmp_path / "model.safetensors").unlink()
    assert "missing" in answer(4, THIRD).refusal or "cannot be read" in answer(4, THIRD).refusal
    assert experts.versions == [1, 2]


def test_nothing_of_the_original_matrices_stays(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral", hidden_size=256, intermediate_size=128)
    held = (tuple(range(8)),) * 2
    layers = load(path, held, dtype=torch.bfloat16, mode="int4")._versions.newest.layers
    kept = sum(w.data.nbytes for layer in layers for w in (*layer.gate_up, *layer.down))
    assert kept == 2 * 8 * 3 * 256 * 128 * 5 // 8


def test_another_schedulers_table_is_read_where_this_node_has_other_experts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    experts = load(path, FIRST)
    kept = weakref.ref(experts._versions.newest.layers[1])
    control: Any = Silent()
    worker = ExpertWorker(
        control,
        index=0,
        model_path=path,
        open_net=lambda welcome, experts, life: InlineNet(lambda table: None),
        load=lambda welcome: experts,
    )

    def welcome(version: int, held: Held) -> Welcome:
        table = table_of(version, held, REST)
        topology = Topology(table=table, experts=(), attention_incarnations=(1,))
        return Welcome(config=node_config(path), topology=topology)

    worker.load(welcome(1, FIRST))
    for version, held in ((1, FIRST), (1, SECOND), (1, FIRST), (7, SECOND), (3, FIRST)):
        worker.form(welcome(version, held))
        assert experts.versions == [version]
        assert experts._versions.newest.layers[1] is kept()  # of its second layer nothing was read
        fresh = outputs(load(path, held), held, 1)
        assert all(map(torch.equal, outputs(experts, held, version), fresh))
        worker.disband()
        assert not experts.has_counts, "the next scheduler would not know their table"
    counted = [each.table_version for each in control.sent if isinstance(each, ExpertCounts)]
    assert counted == [1, 1, 1, 7, 3]


class Silent:
    """A control connection on which nothing comes."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def recv(self, timeout_s: float | None = None) -> None:
        return None

    def send(self, message: Message) -> None:
        self.sent.append(message)
