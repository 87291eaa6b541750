"""What `make gpu` runs on, and whether it can: a part that comes before the others.

Records the device's name, memory and capability, or why there is none. In a process of its
own, because asking opens a context that takes the device's memory. Run by benchmarks.gpu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu_records import Recorder, parse_flags
from kernels.runtime import open_runtime
from topspin.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Record the device; returns the exit status."""
    flags = parse_flags("benchmarks.gpu_device", __doc__, argv)
    recorder = Recorder()
    try:
        runtime = open_runtime(flags.device)
    except ConfigError as error:
        recorder.problem("device", str(error))
        return 2
    if runtime.device.type == "cpu":
        recorder.write("device", name="CPU (interpreted)")
        return 0
    properties = torch.cuda.get_device_properties(runtime.device)
    recorder.write(
        "device",
        name=properties.name,
        memory_gib=round(properties.total_memory / 2**30, 1),
        free_gib=round(runtime.memory().free / 2**30, 1),
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        cuda=str(torch.version.cuda),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
