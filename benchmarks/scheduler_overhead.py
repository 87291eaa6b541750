"""The cost of the scheduler's policy per step.

Times schedule() and update() of decode steps with 1, 16, 256 and 4,096 running sequences on one
attention node; no sockets, no nodes: results are generated from the plans. Writes
results/scheduler_overhead.json. Run as `python -m benchmarks.scheduler_overhead`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.experiment import Experiment, rows_of, say
from server.scheduler.command import relax_garbage_collection
from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.nodes.formation import Formation
from server.scheduler.planning.plans import StepMessages
from server.scheduler.planning.policy import Policy
from topspin.expert_table import uniform_table
from topspin.messages import (
    AddRequest,
    SamplingParams,
    StepResult,
    StepTimings,
    encode,
    pack_ints,
)
from topspin.plan.from_flags import resolve
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.speculation import OFF

NUM_RUNNING = (1, 16, 256, 4096)
NUM_MICRO_BATCHES = (1, 2)
PROMPT_TOKENS = 100
BLOCK_SIZE = 16
VOCAB_SIZE = 32000
TIMINGS = StepTimings(total_s=0.0, attention_s=0.0, wait_s=0.0, sample_s=0.0)


def make_policy(num_running: int, num_micro_batches: int, num_steps: int) -> Policy:
    """Return a policy with `num_running` requests queued that outlast `num_steps` steps."""
    max_tokens = num_steps + 50
    blocks = -(-(PROMPT_TOKENS + max_tokens) // BLOCK_SIZE)
    plan = resolve(
        ModelFacts("bfloat16", PROMPT_TOKENS + max_tokens, 1, (), 0),
        path="unused",
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(4 * num_running, 64),
        micro_batches=num_micro_batches,
        speculation=OFF,
    )
    policy = Policy(
        plan,
        formation=Formation(uniform_table(num_layers=0, num_experts=0, num_nodes=1)),
        num_blocks=[num_running * blocks],
        vocab_size=VOCAB_SIZE,
        shares_cores=False,
        cost=CostModel(),
    )
    for number in range(num_running):
        prompt = pack_ints((number * 31 + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens, seed=number, eos_token_ids=(2,))
        request = AddRequest(request_id=f"r{number}", prompt=prompt, sampling=sampling)
        refusal = policy.add(request, peer=b"gateway", now=0.0)
        assert refusal is None, refusal
    return policy


def answer(step: StepMessages) -> StepResult:
    """Return the result of node 0: a token (never a stop) for every sampled slice."""
    plan = step.plans[0]
    seq_ids = [
        mb.seq_ids[4 * idx : 4 * idx + 4]
        for mb in plan.micro_batches
        for idx, wanted in enumerate(mb.wanted)
        if wanted
    ]
    return StepResult(
        step=step.ticket.step,
        generation=step.ticket.generation,
        index=0,
        seq_ids=b"".join(seq_ids),
        tokens=pack_ints([7] * len(seq_ids)),
        timings=TIMINGS,
    )


def measure(num_running: int, num_micro_batches: int, num_steps: int) -> dict[str, Any]:
    """Return the times of pure decode steps, in milliseconds."""
    policy = make_policy(num_running, num_micro_batches, num_steps)
    schedule_s: list[float] = []
    update_s: list[float] = []
    encode_s: list[float] = []
    while len(schedule_s) < num_steps:
        started = time.perf_counter()
        step = policy.schedule(started)
        scheduled = time.perf_counter()
        assert step is not None
        result = answer(step)
        answered = time.perf_counter()
        outbox = policy.update(result, answered)
        updated = time.perf_counter()
        for message in [*step.plans.values(), *(message for _, message in outbox)]:
            encode(message)
        encoded = time.perf_counter()
        if len(result.seq_ids) == 4 * num_running and not step.plans[0].new:
            schedule_s.append(scheduled - started)
            update_s.append(updated - answered)
            encode_s.append(encoded - updated)
    total_s = [a + b for a, b in zip(schedule_s, update_s, strict=True)]
    return {
        "num_running": num_running,
        "micro_batches": num_micro_batches,
        "steps": num_steps,
        "schedule_ms_p50": _ms(schedule_s),
        "update_ms_p50": _ms(update_s),
        "total_ms_p50": _ms(total_s),
        "total_ms_p99": round(sorted(total_s)[int(0.99 * len(total_s))] * 1e3, 4),
        "encode_ms_p50": _ms(encode_s),
    }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4)


COLUMNS: Final = {
    "running sequences": "{num_running}",
    "micro-batches": "{micro_batches}",
    "schedule ms": "{schedule_ms_p50}",
    "update ms": "{update_ms_p50}",
    "p50 ms": "{total_ms_p50}",
    "p99 ms": "{total_ms_p99}",
}
EXPERIMENT = Experiment(
    "scheduler_overhead",
    __doc__,
    rows_of(COLUMNS),
    command="python -m benchmarks.scheduler_overhead",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes, print a table, write the result."""
    parser = EXPERIMENT.parser()
    parser.add_argument("--steps", type=int, default=200, help="measured steps (%(default)s)")
    args = parser.parse_args(argv)
    relax_garbage_collection()  # as the scheduler process does
    rows = []
    for num_running in NUM_RUNNING:
        for num_micro_batches in NUM_MICRO_BATCHES:
            say(f"{num_running} running, {num_micro_batches} micro-batches")
            rows.append(measure(num_running, num_micro_batches, args.steps))
    return EXPERIMENT.finish(args, {"rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())
