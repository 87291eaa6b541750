"""What the compiler made of each kernel for Hopper: python -m benchmarks.gpu_kernels.inspect.

Makes the entries of the catalogue with tensors that have no memory, so that launches have the
sizes, strides, tiles and alignment of real ones, and has them compiled instead of run: it takes
no GPU. Of each kernel it prints registers, spilled bytes, shared memory, and how many programs
a processor of an H100 or H200 holds; of its innermost loops, products, how wide global memory
is read, and how many groups of asynchronous copies are still under way when the loop waits for
one (0: memory and arithmetic take turns, unless other programs are there to overlap).

What is beside every tuning: a spill, a load of 4 bytes or a wait for everything in a loop costs
more than tiles can bring. Tiles are the defaults, as no device is asked. M2N's kernels are not
here, because their windows are memory. Knows no clock.

    python -m benchmarks.gpu_kernels.inspect attention grouped_mlp --match plain --code code
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import triton

from benchmarks.gpu_kernels.catalogue import CATALOGUE

MODULES: Final = tuple(name for name in CATALOGUE if name != "m2n")
# One processor of compute capability 9.0; a program's shared memory has 1 KB of the system's.
REGISTERS: Final = 65536
WARPS: Final = 64
PROGRAMS: Final = 32
SHARED_BYTES: Final = 228 * 1024
RESERVED_BYTES: Final = 1024

LABEL: Final = re.compile(r"^\s*(\.L_x_\d+):")
INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
RESOURCES: Final = re.compile(r"REG:(\d+) STACK:(\d+)")
PRODUCTS: Final = ("HGMMA", "QGMMA", "HMMA", "QMMA")
WIDTHS: Final = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
"""Bytes of a thread's access by the instruction's suffix; 4 without one."""


class Instruction(NamedTuple):
    """An instruction's name with its suffixes, and its operands."""

    name: str
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def num_bytes(self) -> int:
        """The bytes that a thread reads or writes."""
        suffixes = self.name.split(".")
        return next((WIDTHS[suffix] for suffix in suffixes if suffix in WIDTHS), 4)


class Launch(NamedTuple):
    """A kernel as it was launched, and what it was compiled to."""

    name: str
    grid: tuple[int, ...]
    compiled: Any


class Resources(NamedTuple):
    """What a program takes."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    shared_bytes: int
    num_warps: int

    @property
    def programs(self) -> int:
        """The programs that one processor holds."""
        per_warp = -(-self.registers // 8) * 8 * 32
        return min(
            REGISTERS // (per_warp * self.num_warps),
            WARPS // self.num_warps,
            SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES),
            PROGRAMS,
        )


class CompilerOnly:
    """Stands for Triton's driver: a Hopper device on which nothing can be launched."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_launches() -> Iterator[list[Launch]]:
    """Compile what is launched, and yield a list that gets it."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def compile_(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(self.fn.__name__, grid, compiled))
        return compiled

    JITFunction.run = compile_
    try:
        yield launches
    finally:
        JITFunction.run = run


def read_code(text: str) -> tuple[list[Instruction], list[range]]:
    """Give the instructions of a disassembly, and the places of its innermost loops."""
    code: list[Instruction] = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            places[label[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            code.append(Instruction(found[1], found[2]))
    loops = []
    for place, instruction in enumerate(code):
        target = re.search(r"\.L_x_\d+", instruction.operands)
        if instruction.kind == "BRA" and target and places.get(target[0], place) < place:
            loops.append(range(places[target[0]], place + 1))
    inner = [
        loop
        for loop in loops
        if not any(other != loop and set(other) <= set(loop) for other in loops)
    ]
    return code, inner


def by_width(code: Sequence[Instruction], kind: str) -> str:
    """Say how many accesses of a kind there are, by bytes: "8 x 16 B, 1 x 4 B"."""
    counts = Counter(each.num_bytes for each in code if each.kind == kind)
    return ", ".join(f"{counts[size]} x {size} B" for size in sorted(counts, reverse=True)) or "no"


def describe(code: Sequence[Instruction]) -> str:
    """Say what some instructions do that takes time."""
    kinds = Counter(each.kind for each in code)
    products = [f"{kinds[kind]} {kind}" for kind in PRODUCTS if kinds[kind]]
    waits = [each.operands for each in code if each.kind == "DEPBAR" and "SB0" in each.operands]
    behind = [int(number, 16) for wait in waits for number in re.findall(r"0x[0-9a-f]+", wait)]
    parts = [f"{len(code)} instructions", *products, f"{by_width(code, 'LDG')} loaded"]
    if kinds["LDGSTS"]:
        parts.append(f"{by_width(code, 'LDGSTS')} copied")
    if behind:
        parts.append(f"waits with {min(behind)} groups under way")
    parts += [f"{by_width(code, 'STG')} stored", f"{kinds['BAR']} barriers"]
    if kinds["LDL"] or kinds["STL"]:
        parts.append(f"SPILLS {kinds['LDL']} loads, {kinds['STL']} stores")
    return ", ".join(parts)


def disassemble(compiled: Any) -> tuple[Resources, str]:
    """Give what a compiled kernel's program takes, and its machine code as text."""
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        commands = [[tools.cuobjdump.path, "-res-usage"], [tools.nvdisasm.path, "-c"]]
        usage, text = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in commands
        )
    found = RESOURCES.search(usage)
    assert found is not None, usage
    metadata = compiled.metadata
    return Resources(int(found[1]), int(found[2]), metadata.shared, metadata.num_warps), text


def report(launch: Launch, folder: Path | None) -> Iterator[str]:
    """Describe a kernel; with a folder, leave its code and intermediate forms there."""
    takes, text = disassemble(launch.compiled)
    metadata = launch.compiled.metadata
    yield (
        f"  {launch.name} {launch.grid}: {metadata.num_warps} warps, {metadata.num_stages} stages, "
        f"{takes.registers} registers, {takes.spilled_bytes} B spilled, {takes.shared_bytes} B "
        f"shared, {takes.programs} programs on a processor"
    )
    code, loops = read_code(text)
    yield f"    all: {describe(code)}"
    for loop in loops:
        yield f"    loop: {describe([code[place] for place in loop])}"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{launch.name}-{launch.compiled.hash[:8]}"
        stem.with_suffix(".sass").write_text(text, encoding="utf-8")
        for stage in ("ttgir", "ptx"):
            stem.with_suffix(f".{stage}").write_text(launch.compiled.asm[stage], encoding="utf-8")
        yield f"    {stem}.*"


def inspect(modules: Sequence[str], match: str, folder: Path | None) -> Iterator[str]:
    """Describe the kernels of entries whose op and shape contain `match`; each kernel once."""
    device, seen = torch.device("meta"), dict[str, str]()
    for job in (job for module in modules for job in CATALOGUE[module](device, False)):
        # Some entries launch a kernel when they are made.
        with compiled_launches() as launches:
            for entry in job.make():
                title = f"{entry.op}, {entry.shape}"
                if match not in title:
                    continue
                yield title
                launches.clear()
                entry.call(0)
                for launch in launches:
                    before = seen.setdefault(launch.compiled.hash, title)
                    if before is title:
                        yield from report(launch, folder)
                    else:
                        yield f"  {launch.name} {launch.grid}: as of {before}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the flags name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kernels.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(MODULES)}; default: all")
    parser.add_argument("--match", default="", help="part of an entry's op and shape")
    parser.add_argument("--code", type=Path, help="folder for machine code, PTX and Triton's IR")
    args = parser.parse_args(argv)
    if unknown := set(args.modules) - set(MODULES):
        parser.error(f"no module {', '.join(sorted(unknown))}; choose of {', '.join(MODULES)}")
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    triton.runtime.driver.set_active(CompilerOnly())
    for line in inspect(args.modules or MODULES, args.match, args.code):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
