"""From samples to the figures of a device's file: rates, links, and a rally's factors.

Pure. Called by command.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from deploy.placement.cost import AttentionLayer, BatchRows, ExpertLayer, step_s
from deploy.placement.devices import DeviceProfile, LinkProfile, Rally, Rates, Table
from deploy.placement.shapes import Kernels, ModelShape
from deploy.profiling.hops import lower_quartile
from deploy.profiling.rally import RallyReport, Sample
from topspin.errors import EngineError
from topspin.pipeline import HopTimes
from topspin.plan.precision import UNQUANTISED, Format

# Of a link over which no time could be told apart from waiting.
_LEAST_ALPHA_S = 1e-6
_MOST_BYTES_PER_S = 1e12


def rates_from(
    tables: Sequence[Table],
    shape: ModelShape,
    kernels: str,
    threads: Sequence[int],
    known: DeviceProfile | None,
) -> tuple[Rates, ...]:
    """Return the roofline that the tables reach, by number of threads; `known` ones are kept."""
    found = {each.threads: each for each in (known.rates if known else ())}
    packed: Kernels = "cpu" if kernels == "cpu" else "triton"
    for count in threads:
        own = [each for each in tables if each.threads == count]
        reads, launches = [1e6], []
        flops: dict[Format, float] = dict(found[count].flops) if count in found else {}
        for table in own:
            if table.operation == "experts" and table.shape == shape.experts_key():
                layer = shape.moe_layers[0]
                each = shape.weight_bytes("experts", layer, table.format, kernels=packed)
                numbers = shape.numbers("experts", layer)
                pairs = table.axes[1]
                for idx, seconds in enumerate(table.seconds):
                    touched, per = table.axes[0][idx // len(pairs)], pairs[idx % len(pairs)]
                    if per == pairs[0] and table.format == UNQUANTISED:
                        reads.append(touched * each / seconds)
                    rate = 2 * touched * per * numbers / seconds
                    flops[table.format] = max(flops.get(table.format, 0.0), rate)
                launches.append(min(table.seconds) / 8)
            elif table.operation == "attention" and table.shape == shape.attention_key():
                numbers = shape.numbers("attention", 0)
                weights = shape.weight_bytes("attention", 0, table.format, kernels=packed)
                reads.append(weights / min(table.seconds))
                rate = 2 * numbers * table.axes[0][-1] / table.seconds[-len(table.axes[1])]
                flops[table.format] = max(flops.get(table.format, 0.0), rate)
                launches.append(min(table.seconds) / 16)
        found[count] = Rates(
            threads=count,
            read_bytes_per_s=max(reads),
            flops=flops,
            launch_s=min(launches, default=1e-6),
        )
    return tuple(found[count] for count in sorted(found))


def message_bytes(sample: Sample, shape: ModelShape) -> float:
    """Return the bytes of a micro-batch's message, the mean of both ways."""
    rows = sample.load.rows / sample.load.micro_batches
    return rows * (shape.hidden_size * shape.itemsize + 4 * shape.top_k)


def links_of(reports: Sequence[RallyReport], shape: ModelShape) -> tuple[LinkProfile, ...]:
    """Return alpha and beta of each transport and condition, from one micro-batch's trips.

    The line is Theil and Sen's (the median of all slopes): a few disturbed trips do not move it.
    """
    found = []
    for report in reports:
        points = [
            (message_bytes(sample, shape), sample.link_s)
            for sample in report.samples
            if sample.link_s is not None and sample.load.micro_batches == 1
        ]
        if not points:
            continue
        slopes = [
            (b[1] - a[1]) / (b[0] - a[0])
            for i, a in enumerate(points)
            for b in points[i + 1 :]
            if a[0] != b[0]
        ]
        slope = max(1 / _MOST_BYTES_PER_S, median(slopes)) if slopes else 1 / _MOST_BYTES_PER_S
        alpha = max(_LEAST_ALPHA_S, median(each - slope * size for size, each in points))
        found.append(
            LinkProfile(
                name=report.transport,
                alpha_s=alpha,
                bytes_per_s=1 / slope,
                shares_cores=report.shares_cores,
            )
        )
    return tuple(found)


def fastest(links: Iterable[LinkProfile]) -> tuple[LinkProfile, ...]:
    """Return the link of the least alpha of each transport and condition.

    A trip is only ever lengthened: behind a long layer it has to wake its receiver too.
    """
    found: dict[tuple[str, bool | None], LinkProfile] = {}
    for each in links:
        known = found.setdefault((each.name, each.shares_cores), each)
        if each.alpha_s < known.alpha_s:
            found[each.name, each.shares_cores] = each
    return tuple(found.values())


def rallies_of(
    reports: Sequence[RallyReport], device: DeviceProfile, shape: ModelShape
) -> tuple[Rally, ...]:
    """Return how both sides and the step differ from what they take alone and what that adds to.

    Raises EngineError if the trips of messages could not be measured.
    """
    found = []
    for report in reports:
        if report.transport != "shm":
            continue
        links = links_of([report], shape)
        if not links:
            raise EngineError(
                f"{report.transport}: in no step did both sides wait for a message, so that the "
                "time of its trip is unknown: other processes use these cores; measure again"
            )
        for m in sorted({sample.load.micro_batches for sample in report.samples}):
            mine = sorted(
                (each for each in report.samples if each.load.micro_batches == m),
                key=lambda each: each.load.rows,
            )
            compared = [
                _factors(sample, device, shape, report.shares_cores, links[0]) for sample in mine
            ]
            found.append(
                Rally(
                    shape=shape.experts_key(),
                    shares_cores=report.shares_cores,
                    micro_batches=m,
                    rows=tuple(each.load.rows / m for each in mine),
                    attention=tuple(each[0] for each in compared),
                    experts=tuple(each[1] for each in compared),
                    step=tuple(each[2] for each in compared),
                )
            )
    return tuple(found)


def threads_of(device: DeviceProfile, shares_cores: bool) -> int:
    """Return the threads of either side in a rally."""
    return device.cores if shares_cores else device.cores // 2


def _factors(
    sample: Sample, device: DeviceProfile, shape: ModelShape, shares_cores: bool, link: LinkProfile
) -> tuple[float, float, float]:
    m = sample.load.micro_batches
    rows = sample.load.rows / m
    threads = threads_of(device, shares_cores)
    layer = shape.moe_layers[0]
    attention = AttentionLayer(device, shape, layer, lambda *_: UNQUANTISED, threads=threads)
    attention_s = attention.seconds(BatchRows(decode=rows, context=sample.load.context))
    experts_s = ExpertLayer(device, shape, layer, UNQUANTISED, threads=threads).seconds(
        rows=rows, pairs=rows * shape.top_k, touched=sample.touched
    )
    t_c = link.alpha_s + message_bytes(sample, shape) / link.bytes_per_s
    hops = [HopTimes(sample.attention_s, sample.experts_s, t_c)] * sample.num_layers
    added_s = step_s(hops, fixed_s=sample.fixed_s, micro_batches=m, shares_cores=shares_cores)
    return (
        sample.attention_s / attention_s,
        sample.experts_s / experts_s,
        lower_quartile(sample.steps_s) / added_s,
    )
