"""Runs modules of benchmarks on a GPU that is none; run as a program.

python -m tests.benchmarks.gpu.on_fake_gpu [--compile] "MODULE FLAG.." ..: what the modules print,
and after each a line of JSON with what has happened on the device since the start.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

from tests.fake_gpu import FakeGpu, fake_gpu


def report(module: str, status: int, gpu: FakeGpu) -> None:
    """Print the line."""
    compiled = {name: [len(times), sum(times)] for name, times in gpu.compiled.items()}
    print(json.dumps({
        "module": module, "status": status, "recorded": gpu.recorded, "replayed": gpu.replayed,
        "launches": gpu.launches, "compiled": compiled, "waits": gpu.waits,
    }))  # fmt: skip


def main(argv: list[str]) -> None:
    is_compiling = argv[:1] == ["--compile"]
    with fake_gpu(is_compiling=is_compiling) as gpu, tempfile.TemporaryDirectory() as folder:
        from benchmarks import gpu_compile, gpu_models
        from kernels.triton import tiles

        # Tiny models are in fp32, for oracles; nobody runs a GPU so.
        gpu_models.QUICK.fields["torch_dtype"] = "bfloat16"
        # Processes that compile would not have this GPU.
        gpu_compile.compile_beside = lambda *args: None
        tiles.FOLDER = Path(folder)
        for command in argv[is_compiling:]:
            module, *flags = command.split()
            report(module, importlib.import_module(module).main(flags), gpu)


if __name__ == "__main__":
    main(sys.argv[1:])
