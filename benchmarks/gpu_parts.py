"""What `make gpu` consists of, how its time is divided, and what each part needs.

Owns the list of parts and the pure rules: how long a part may take, and which packages it
cannot do without. A part is a module run as `python -m MODULE` in a process of its own, so
that a kernel that faults or hangs takes nobody else with it; it writes records
(benchmarks.gpu_records). Knows no device and imports nothing that may be missing. Called by
benchmarks.gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

TOTAL_SECONDS: Final = 480.0
"""The whole command's time: under 8 minutes."""


@dataclass(frozen=True)
class Part:
    """One part of the command."""

    name: str
    module: str
    seconds: float
    """Its share of TOTAL_SECONDS; what earlier parts leave is divided in the same proportion."""
    packages: tuple[str, ...]
    """What it cannot do without, by the name that an import uses."""
    some_need: tuple[str, ...] = ()
    """What some of it needs, and the rest does without."""


KERNELS: Final = ("torch", "triton", "numpy")
ENGINE: Final = (*KERNELS, "msgspec")
SERVER: Final = (
    *("aiohttp", "fastapi", "httpx", "jinja2", "openai", "prometheus_client", "rich", "uvicorn"),
    "uvloop",
)

PARTS: Final = (
    Part(
        "tests",
        "benchmarks.gpu_tests",
        125.0,
        (*KERNELS, "pytest"),
        ("msgspec", "transformers", "numba", "zmq", *SERVER),
    ),
    Part("rooflines", "benchmarks.gpu_rooflines", 115.0, KERNELS),
    Part("decode", "benchmarks.gpu_decode", 135.0, ENGINE),
    Part("transformers", "benchmarks.gpu_transformers", 85.0, ("torch", "transformers")),
)

PURPOSES: Final[Mapping[str, str]] = {
    "torch": "tensors, cuBLAS and CUDA graphs",
    "triton": "every kernel",
    "numpy": "the keyed random numbers of sampling",
    "msgspec": "the configuration and the plans of a step",
    "pytest": "running the tests",
    "transformers": "the peer, and the oracle of some tests",
    "numba": "what transports do on the host, and with it nodes as they are served",
    "zmq": "nodes as they are served",
    **dict.fromkeys(SERVER, "the server in front of them"),
}
"""What each package is needed for."""

DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
}
"""The name by which a package is downloaded, where it is another than an import's."""


@dataclass(frozen=True)
class Missing:
    """A package that is not there, and the parts that cannot run without it."""

    package: str
    purpose: str
    parts: tuple[str, ...]
    partly: tuple[str, ...]
    """The parts of which some cannot run without it."""


def choose_parts(names: Sequence[str] | None) -> list[Part]:
    """Give the parts of those names in the order in which they run; all of them for None.

    Raises ValueError for a name that no part has.
    """
    known = [part.name for part in PARTS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; there are: {', '.join(known)}")
    return [part for part in PARTS if names is None or part.name in names]


def find_missing(parts: Sequence[Part], is_there: Callable[[str], bool]) -> list[Missing]:
    """Give the packages that these parts need and that are not there, in order of first need."""
    needed = dict.fromkeys(name for part in parts for name in (*part.packages, *part.some_need))
    return [
        Missing(
            package,
            PURPOSES[package],
            tuple(part.name for part in parts if package in part.packages),
            tuple(part.name for part in parts if package in part.some_need),
        )
        for package in needed
        if not is_there(package)
    ]


def advice(missing: Sequence[Missing], python_version: str) -> str:
    """Say what is missing, what waits for it, and how to bring it without a registry."""
    lines = []
    alike: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for m in missing:
        alike.setdefault((m.purpose, m.parts, m.partly), []).append(m.package)
    for (purpose, parts, partly), packages in alike.items():
        waiting = [f"{', '.join(parts)} will not run"] if parts else []
        waiting += [f"some of {', '.join(partly)} will not run"] if partly else []
        verb = "is" if len(packages) == 1 else "are"
        lines.append(f"{', '.join(packages)} {verb} missing (for {purpose}): {'; '.join(waiting)}")
    # Builds of torch and triton for a GPU's driver are whole installations, no wheel to carry.
    small = [
        DISTRIBUTIONS.get(m.package, m.package)
        for m in missing
        if m.package not in ("torch", "triton")
    ]
    if small:
        lines += [
            "where there is a registry:",
            f"  python3 -m pip download --only-binary=:all: --python-version {python_version} "
            f"--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d wheels "
            f"{' '.join(small)}",
            "then here:",
            "  python3 -m pip install --no-index --no-deps --target site wheels/*.whl "
            "&& export PYTHONPATH=$PWD/site",
        ]
    return "\n".join(lines)


def seconds_for(part: Part, after: Sequence[Part], seconds_left: float) -> float:
    """Give the time of `part` of what is left, by its share beside those of the parts after it."""
    shares = part.seconds + sum(later.seconds for later in after)
    return max(seconds_left, 0.0) * part.seconds / shares
