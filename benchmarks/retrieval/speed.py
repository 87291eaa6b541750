"""The time of a decode step by the length of its context, dense and with retrieval.

Owns nodes of one model in this process, one dense and one for each budget, that share weights and
cache and take their steps in turn. The cache is filled with keys and values of a real text; behind
its end they are repeated, rotated as they were, since the model cannot read that far: good for
times, not for text. Also the time until a long prompt's first token, in which codebooks are learnt.
Called by benchmarks.retrieval.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from benchmarks.experiment import rounds_in_turn
from benchmarks.kernels.step import per_op
from benchmarks.local_model import BLOCK_SIZE, LocalModel, Node
from benchmarks.retrieval.flags import DENSE, NothingSelected, RetrievalFlags
from kernels.cpu.compiled.program import Program
from kernels.cpu.recorder import CpuRuntime
from topspin.errors import ConfigError
from topspin.messages import KvCounts, StepResult

# The first attends to everything; one is run, one recorded, one replayed; caches fill.
NUM_WARM_UP: Final = 5
_ATTENTION: Final = ("attend", "search", "read", "attend_lists")
_SEARCH: Final = "attend_lists"


def measure(flags: RetrievalFlags) -> dict[str, Any]:
    """Return times of steps and of attention by context, and of prompts of all tokens."""
    tokens, num_steps = flags.tokens, flags.args.steps
    longest = max(*flags.contexts, len(tokens))
    own_blocks = -(-(NUM_WARM_UP + num_steps + 1) // BLOCK_SIZE)
    num_shared = longest // BLOCK_SIZE
    names = [DENSE, *map(str, flags.budgets)]
    model = LocalModel(
        flags.path,
        num_blocks=num_shared + own_blocks * len(names),
        max_len=longest + own_blocks * BLOCK_SIZE,
    )
    nodes = {name: model.node(None if name == DENSE else int(name)) for name in names}
    ends = {
        name: range(num_shared + idx * own_blocks, num_shared + (idx + 1) * own_blocks)
        for idx, name in enumerate(names)
    }
    prompts = _prompts(nodes, flags)
    _repeat(model, len(tokens), longest)
    rows = []
    for context in flags.contexts:
        flags.say(f"steps at {context} tokens")
        begins = {
            name: node.admit(
                [17] * (context + 1),
                [*range(context // BLOCK_SIZE), *ends[name]],
                num_computed=context,
            )
            for name, node in nodes.items()
        }
        rows.append({"context": context, "servers": _steps(model, nodes, begins, num_steps)})
    return {"threads": torch.get_num_threads(), "prompts": prompts, "rows": rows}


def _prompts(nodes: Mapping[str, Node], flags: RetrievalFlags) -> dict[str, Any]:
    """Return the seconds of whole prompts, by node; all write the same to the first blocks."""
    tokens = flags.tokens
    num_segments: dict[str, int] = dict.fromkeys(nodes, 0)

    def prompt_s(name: str, turn: int) -> float:
        node, total = nodes[name], 0.0
        seq_id = node.admit(tokens, range(len(tokens) // BLOCK_SIZE))
        for begin in range(0, len(tokens), node.chunk):
            count = min(node.chunk, len(tokens) - begin)
            took, result = node.step({seq_id: count}, sample=begin + count == len(tokens))
            total += took
            num_segments[name] += _counts(result).num_coded_segments
        node.end(seq_id)
        return total

    flags.say(f"prompts of {len(tokens)} tokens")
    # What the first round compiles is not measured.
    rounds = rounds_in_turn({name: name for name in nodes}, prompt_s, rounds=flags.args.rounds)
    seconds = {name: [each[name] for each in rounds] for name in nodes}
    for name, count in num_segments.items():
        if name != DENSE and not count:
            raise NothingSelected(f"no codebook was learnt with {name} tokens")
    ratios = {
        name: statistics.median(
            mine / dense for mine, dense in zip(each, seconds[DENSE], strict=True)
        )
        for name, each in seconds.items()
    }
    return {
        "tokens": len(tokens),
        "rounds": {name: [round(each, 4) for each in took] for name, took in seconds.items()},
        "median_ratio": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }


def _counts(result: StepResult) -> KvCounts:
    return result.kv or KvCounts()


def _repeat(model: LocalModel, num_tokens: int, length: int) -> None:
    """Copy the first keys and values of the cache behind them, again and again."""
    places = torch.arange(num_tokens, length)
    model.decoder.kv.move(places % num_tokens, places)


def _steps(
    model: LocalModel, nodes: Mapping[str, Node], seq_ids: Mapping[str, int], num_steps: int
) -> dict[str, Any]:
    """Return the figures of each node's steps, which take turns; sequences are ended."""
    for name, node in nodes.items():
        for _ in range(NUM_WARM_UP):
            node.step({seq_ids[name]: 1})
    programs = {name: _program(node, retrieves=name != DENSE) for name, node in nodes.items()}
    clocks = {name: program.take_times() for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in nodes}
    times: dict[str, list[np.ndarray]] = {name: [] for name in nodes}
    for _ in range(num_steps):
        for name, node in nodes.items():
            took, result = node.step({seq_ids[name]: 1})
            seconds[name].append(took)
            times[name].append(clocks[name].copy())
            expected = 0 if name == DENSE else model.config.num_layers
            num_selected = _counts(result).num_selected_rows
            if num_selected != expected:
                raise NothingSelected(
                    f"with {name} tokens {num_selected} layers of a step selected "
                    f"keys, where {expected} should"
                )
    found = {}
    for name, node in nodes.items():
        node.end(seq_ids[name])
        ops = per_op(programs[name], times[name])
        attention = {op: ops[op]["us"] / model.config.num_layers for op in _ATTENTION if op in ops}
        found[name] = {
            "step_ms": round(statistics.median(seconds[name]) * 1e3, 3),
            "mean_step_ms": round(statistics.fmean(seconds[name]) * 1e3, 3),
            "attention_us": round(sum(attention.values()), 1),
            "attention_ops_us": {op: round(each, 1) for op, each in attention.items()},
        }
    return found


def _program(node: Node, *, retrieves: bool) -> Program:
    """Return the recorded step of a node that does or does not select keys."""
    assert isinstance(node.runtime, CpuRuntime), "the kernels of the CPU"
    found = [
        program
        for program in node.runtime.programs
        if retrieves == any(kernel.name.strip("_") == _SEARCH for kernel in program.kernels)
    ]
    if len(found) != 1:
        raise ConfigError("steps of this model are not recorded on this machine: no op is timed")
    return found[0]
