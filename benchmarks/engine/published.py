"""Gains that MegaScale-Infer and FastAFD published, beside those of the planner's cost model.

Nothing is measured: both sides of each ratio are computed from data sheets, models' shapes and the
published settings, decode steps only, each engine at the largest load within memory and TPOT.
MegaScale-Infer (arXiv 2504.02263): micro-batches of 256 tokens per expert; against one engine with
tensor parallelism within hosts of eight, and pipeline stages over hosts. FastAFD (blog of
2026-07-06): its identity S = (B_a / B_v) M / (M + N) (T_v / T_a), B sequences per attention GPU, M
attention and N expert GPUs, T of a step, against data-parallel attention with the experts divided
over the same four GPUs. Run as `topspin bench published`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from benchmarks.experiment import Experiment, Result, TextTable, table
from deploy.placement.cluster import DeviceGroup, HostGroup, HostLink
from deploy.placement.cost import AttentionLayer, BatchRows, ExpertLayer, StepEnds
from deploy.placement.devices import DeviceProfile, Rates, load_profile
from deploy.placement.formats import stored
from deploy.placement.memory import attention_weight_bytes, expert_weight_bytes
from deploy.placement.routing import touched
from deploy.placement.search.layouts import Device, Host
from deploy.placement.search.nodes import USABLE, Binding, NodeContents
from deploy.placement.search.spans import spans_of
from deploy.placement.search.steps import Clock, EngineSetup, EngineSteps
from deploy.placement.shapes import LayerKind, ModelShape
from deploy.placement.workload import Lengths, Workload
from topspin.plan.precision import PrecisionRule, Rules
from topspin.plan.settings import MAX_MICRO_BATCHES

TPOT_S: Final = 0.15
TRACE: Final = (571, 159)
"""Medians of prompts and outputs of MegaScale-Infer's trace."""
PRICES: Final = {"h20": 1.85, "l40s": 1.08}
FP8: Final[Rules] = tuple(
    PrecisionRule(format="fp8", part=part) for part in ("attention", "experts")
)
MOST_ATTENTION: Final = 32
TP: Final = 8
ALPHA_S: Final = 12e-6
RING_ALPHA_S: Final = 15e-6
"""Of an all-reduce within a host."""


def shape(
    hidden: int, layers: int, heads: tuple[int, int], experts: tuple[int, int, int], vocab: int
) -> ModelShape:
    """Return a model: heads of queries and of keys; experts, chosen ones, and their width."""
    return ModelShape(
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        intermediate_size=0,
        num_experts=experts[0],
        top_k=experts[1],
        expert_width=experts[2],
        shared_width=0,
        shared_is_gated=False,
        num_router_biases=0,
        is_tied=False,
        qk_norm="none",
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        layers=(LayerKind(None, True),) * layers,
    )


MIXTRAL: Final = shape(6144, 56, (48, 8), (8, 2, 16384), 32768)
DBRX: Final = shape(6144, 40, (48, 8), (16, 4, 10752), 100352)
SCALED: Final = shape(8192, 48, (64, 8), (32, 4, 8192), 100352)
QWEN3: Final = shape(4096, 94, (64, 4), (128, 8, 1536), 151936)
GB200: Final = DeviceProfile(
    name="GB200",
    kind="cuda",
    source="literature",
    notes="data sheet: 186 GB, 8 TB/s, 2.5 PFLOP/s in bf16 and 5 in fp8; 75 % and 50 % of them",
    memory_bytes=186e9,
    formats=("none", "fp8"),
    rates=(Rates(read_bytes_per_s=6e12, flops={"none": 1.25e15, "fp8": 2.5e15}, launch_s=4e-6),),
)
NVLINK: Final = 0.75 * 900 * 8


class Split(NamedTuple):
    """An engine apart, one GPU for each node, each with a card of `gbps`."""

    attention: DeviceProfile
    num_attention: int
    experts: DeviceProfile
    num_experts: int
    gbps: float


class Together(NamedTuple):
    """GPUs that all have both roles, each a `shard` of the model with `held` of its experts.

    The rows of `peers` GPUs meet at the experts of each; `stages` share the layers, and each has a
    batch of its own. A layer sends `row_bytes` for each row twice.
    """

    gpu: DeviceProfile
    shard: ModelShape
    held: int
    peers: int
    stages: int
    alpha_s: float
    row_bytes: float
    bytes_per_s: float


class Decoding(NamedTuple):
    """Sequences that decode at once, and the seconds of their step."""

    sequences: float
    step_s: float

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.sequences / self.step_s


def most(limit: float, step_s: Callable[[float], float], tpot_s: float) -> Decoding:
    """Return the most sequences up to `limit` whose step takes `tpot_s` at most."""
    low, high = 1.0, max(1.0, limit)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) <= tpot_s else (low, middle)
    return Decoding(low, step_s(low))


class Decoder:
    """A model that decodes sequences of one length, with weights in one precision."""

    def __init__(self, model: ModelShape, prompt: int, output: int, rules: Rules = ()) -> None:
        self.model, self.formats = model, stored(model, rules)
        workload = Workload(
            prompt=Lengths(mean=prompt, p95=prompt),
            output=Lengths(mean=output, p95=output),
            arrival_rate=1,
        )
        self.clock = Clock(model, workload)
        self._contents = NodeContents(self.clock, prompt + output)

    def apart(self, split: Split, m: int) -> tuple[EngineSteps, float]:
        """Return the steps of an engine, and the sequences for whose keys it has room."""
        hosts = [
            _host("attention", split.attention, split.num_attention),
            _host("experts", split.experts, split.num_experts),
        ]
        link = HostLink(transport="nixl", alpha_us=ALPHA_S * 1e6, gbps=split.gbps)
        layout = next(
            each
            for each in spans_of(hosts, link, num_experts=self.model.num_experts)
            if each.used == split[1::2] and each.spans[0].host is hosts[0]
        )
        held = (-(-self.model.num_experts // split.num_experts),)
        weights = (1 / split.num_attention,)
        engine = EngineSetup(layout, self.formats, held, weights, m, 4096)
        room = self._contents.room(engine)
        tokens = 0 if isinstance(room, Binding) else room[0]
        return EngineSteps(engine, self.clock), split.num_attention * tokens / self.clock.context

    def best_apart(self, split: Split, tpot_s: float) -> Decoding:
        """Return the engine at its largest load, with the best number of micro-batches."""
        found = []
        for m in range(1, MAX_MICRO_BATCHES + 1):
            steps, limit = self.apart(split, m)
            found.append(most(limit, partial(steps.step_s, chunks=None), tpot_s))
        return max(found, key=lambda each: each.rate)

    def together(self, of: Together, tpot_s: float) -> Decoding:
        """Return GPUs that all have both roles, in turns; nothing overlaps."""
        model, gpu, clock = of.shard, of.gpu, self.clock
        half = AttentionLayer(gpu, model, 0, self.formats.of, threads=1)
        experts = ExpertLayer(gpu, model, 0, self.formats.of("experts", 0), threads=1)
        ends = StepEnds(gpu, model, self.formats.head, threads=1)
        chosen = (model.top_k / model.num_experts,) * of.held

        def step_s(own: float) -> float:
            rows = own * of.peers
            t_a = half.seconds(BatchRows(own, clock.context))
            t_e = experts.seconds(
                rows=clock.reached(chosen, rows),
                pairs=rows * sum(chosen),
                touched=touched(chosen, rows),
            )
            hop_s = of.alpha_s + own * of.row_bytes / of.bytes_per_s
            return model.num_layers * (t_a + t_e + 2 * hop_s) + ends.seconds(own)

        weights = attention_weight_bytes(model, self.formats.of, kernels="triton")
        weights += expert_weight_bytes(model, self.formats.of, held=of.held, kernels="triton")
        room = gpu.memory_bytes * USABLE - gpu.process.attention - weights / of.stages
        found = most(room / (model.kv_bytes_per_token() * clock.context), step_s, tpot_s)
        return found._replace(sequences=found.sequences * of.peers * of.stages)

    def divided(self, gpu: DeviceProfile, num_gpus: int, gbps: float) -> Together:
        """Return GPUs that attend to sequences of their own and share out the experts."""
        model = self.model
        row_bytes = model.top_k * (1 - 1 / num_gpus) * self.clock.row_bytes()
        held = model.num_experts // num_gpus
        return Together(gpu, model, held, num_gpus, 1, ALPHA_S, row_bytes, gbps * 1e9 / 8)

    def parallel(self, gpu: DeviceProfile, stages: int) -> Together:
        """Return hosts of TP GPUs that have a part of every matrix, each with some of the layers.

        Two all-reduces for a layer.
        """
        model = self.model
        shard = dataclasses.replace(
            model,
            num_heads=model.num_heads // TP,
            num_kv_heads=model.num_kv_heads // TP,
            expert_width=model.expert_width // TP,
            vocab_size=model.vocab_size // TP,
        )
        link = next(each for each in gpu.links if each.name == "cuda_ipc")
        row_bytes = 2 * (1 - 1 / TP) * model.hidden_size * model.itemsize
        return Together(
            gpu, shard, model.num_experts, 1, stages, RING_ALPHA_S, row_bytes, link.bytes_per_s
        )


def _host(name: str, profile: DeviceProfile, count: int) -> Host:
    """Return `count` hosts of one GPU."""
    link = HostLink(transport="cuda_ipc", alpha_us=5, gbps=1000)
    groups = (DeviceGroup(device=profile.name),)
    spec = HostGroup(name=name, count=count, devices=groups, links=(link,))
    return Host(spec, (Device(0, profile, 1, int(profile.memory_bytes), 0.0, 0, 1.0),))


def gain_of_micro_batches(model: ModelShape) -> Iterator[float]:
    """Yield the gain of two micro-batches over one, and of three over two.

    With as many attention nodes as make both sides' times most alike.
    """
    decoder, gpu = Decoder(model, *TRACE), load_profile("a100")
    rows = 256.0 * model.num_experts / model.top_k

    def split(num_attention: int, m: int) -> EngineSteps:
        return decoder.apart(Split(gpu, num_attention, gpu, model.num_experts, 200), m)[0]

    def unlike(num_attention: int) -> float:
        hop = split(num_attention, 1).step(rows, None).hop
        return abs(hop.t_a - hop.t_e)

    balanced = min(range(1, MOST_ATTENTION + 1), key=unlike)
    rates = [m * rows / split(balanced, m).step_s(m * rows, None) for m in (1, 2, 3)]
    yield from (after / before for before, after in itertools.pairwise(rates))


def per_price(
    decoder: Decoder,
    attention: DeviceProfile,
    experts: DeviceProfile,
    prices: tuple[float, float],
) -> float:
    """Return tokens per second for a unit of price, of the best engine with an expert per GPU."""
    num_experts = decoder.model.num_experts
    return max(
        decoder.best_apart(Split(attention, count, experts, num_experts, 200), TPOT_S).rate
        / (count * prices[0] + num_experts * prices[1])
        for count in range(1, MOST_ATTENTION + 1)
    )


def together_per_price(decoder: Decoder, gpu: DeviceProfile, price: float) -> float:
    """Return tokens per second for a unit of price, of the best number of pipeline stages."""
    return max(
        decoder.together(decoder.parallel(gpu, stages), TPOT_S).rate / (TP * stages * price)
        for stages in (1, 2, 3, 4)
    )


def megascale() -> Iterator[Result]:
    """Yield MegaScale-Infer's ablations."""
    published = {"Mixtral-8x22B": "1.10", "DBRX": "1.28", "Scaled-MoE": "1.38"}
    for (name, told), model in zip(published.items(), (MIXTRAL, DBRX, SCALED), strict=True):
        gains = gain_of_micro_batches(model)
        for m, said in ((2, "1.9"), (3, told)):
            yield {
                "what": f"{name}: {m} micro-batches over {m - 1}",
                "published": said,
                "ours": next(gains),
            }
    decoder, gpu = Decoder(SCALED, *TRACE), load_profile("a100")
    ours = per_price(decoder, gpu, gpu, (1, 1)) / together_per_price(decoder, gpu, 1)
    yield {"what": "Scaled-MoE, per GPU", "published": "1.90", "ours": ours}
    h20, l40s = (load_profile(each) for each in PRICES)
    apart = per_price(decoder, h20, l40s, (PRICES["h20"], PRICES["l40s"]))
    for name, price in PRICES.items():
        ours = apart / together_per_price(decoder, load_profile(name), price)
        yield {
            "what": f"Scaled-MoE on H20 and L40S, per price, over {name.upper()}",
            "published": "1.86",
            "ours": ours,
        }


def fastafd() -> Iterator[Result]:
    """Yield the terms of FastAFD's identity, and both speed-ups per GPU."""
    for context, num_attention, told in ((8192, 28, 1.41), (16384, 44, 1.44)):
        decoder = Decoder(QWEN3, context, 2, FP8)
        split = Split(GB200, num_attention, GB200, 4, NVLINK)
        steps, room = decoder.apart(split, 2)
        apart = Decoding(room, steps.step_s(room, None))
        both = decoder.together(decoder.divided(GB200, 4, NVLINK), math.inf)
        capacity = apart.sequences / num_attention / (both.sequences / 4)
        share = num_attention / (num_attention + 4)
        yield {
            "context": context,
            "ratio": f"{num_attention}:4",
            "capacity": capacity,
            "share": share,
            "steps": both.step_s / apart.step_s,
            "ours": capacity * share * both.step_s / apart.step_s,
            "published": told,
        }


GAINS: Final = {"": "{what}", "published": "{published}x", "ours": "{ours:.2f}x"}
IDENTITY: Final = {
    "context": "{context}",
    "M:N": "{ratio}",
    "B_a / B_v": "{capacity:.2f}",
    "M / (M + N)": "{share:.3f}",
    "T_v / T_a": "{steps:.2f}",
    "S": "{ours:.2f}x",
    "S published": "{published:.2f}x",
}


def layout(result: Result) -> Iterator[TextTable]:
    """Yield both comparisons."""
    yield table(GAINS, result["megascale_infer"])
    yield table(IDENTITY, result["fastafd"])


EXPERIMENT = Experiment("published", __doc__, layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print the tables, and write the result."""
    args = EXPERIMENT.parser().parse_args(argv)
    found = {"megascale_infer": list(megascale()), "fastafd": list(fastafd())}
    return EXPERIMENT.finish(args, found)


if __name__ == "__main__":
    raise SystemExit(main())
