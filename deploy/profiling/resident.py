"""The memory of a node's process beside its weights, keys and rows.

Owns the reading of the kernel's accounts and a node of next to no size: the process that imports,
compiles and runs as a real node does. Called by worker.py in a process of its own, and by
benchmarks.engine.cost_model for real nodes.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from attention_nodes.grammars.processes import Grammars
from deploy.profiling.slices import Measured, rig_of
from deploy.profiling.solo import Attention
from topspin.process import release_freed_memory

MeasuredRole = Literal["attention", "expert"]


class Resident(msgspec.Struct, frozen=True):
    """Bytes of a process in memory: its own, and of files (libraries), which others map too.

    `proportional` is the kernel's PSS: a page that n processes map counts 1 / n.
    """

    own: int
    files: int
    proportional: int


def resident_bytes(pid: int | Literal["self"]) -> Resident:
    """Return what a process of this machine and those that it has started have in memory.

    As the kernel says in /proc/PID/smaps_rollup.
    """
    kilobytes: Counter[str] = Counter()
    for each in (str(pid), *_children(pid)):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            kilobytes[name] += int(rest.split()[0])
    own = kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"]
    files = kilobytes["Rss"] - kilobytes["Anonymous"]
    return Resident(1024 * own, 1024 * max(0, files), 1024 * kilobytes["Pss"])


def _children(pid: int | Literal["self"]) -> list[str]:
    """Return the processes that a process's threads have started: an attention node has one."""
    return [
        child
        for children in Path(f"/proc/{pid}/task").glob("*/children")
        for child in children.read_text().split()
    ]


def resident(measured: Measured, role: MeasuredRole, path: Path) -> Resident:
    """Return the memory of this process after it has been a node of a tiny model.

    It imports what nodes of the role import, and has compiled and recorded a step: what is left
    beside the data of a real one. `path` is the real model's directory: attention nodes read its
    tokenizer for grammars.
    """
    importlib.import_module(f"{role}_nodes.command")
    tiny = measured.model
    small = measured._replace(
        model=replace(
            tiny,
            vocab_size=64,
            hidden_size=tiny.num_heads * tiny.head_dim if tiny.qk_norm == "full" else 64,
            layers=tiny.layers[:1],
        ),
        max_rows=4,
        max_tokens=16,
        num_keys=64,
    )
    rig = rig_of(small)
    rig.runtime.prepare_capture()
    if role == "expert":
        rig.experts().warm_up()
    else:
        decoder = rig.decoder(small.num_blocks)
        visited = Attention(rig, decoder, rig.runner(decoder), steps=3)
        visited.decode(1, 16)
        visited.prompt(16, 0)
        grammars = Grammars(path, vocab_size=tiny.vocab_size, eos_token_ids=tiny.eos_token_ids)
        # Its process goes on until this one ends.
        assert grammars.num_words >= 0
    release_freed_memory()
    return resident_bytes("self")
