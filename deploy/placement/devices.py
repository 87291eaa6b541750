"""A device's profile: the JSON file that `topspin profile` writes and the planner reads.

Owns the file's structure, its checks, and the roofline and tables in it. Measured tables hold
seconds by (operation, shape, format, threads); the roofline's rates serve shapes that nobody
measured, and devices known from literature only. Knows no model and no clock. Written by
deploy.profiling, read by cost.py and the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from topspin.errors import ConfigError
from topspin.plan.precision import Format

VERSION: Final = 1
LITERATURE: Final = Path(__file__).parent / "literature"

Positive = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Operation = Literal["attention", "prefill", "mlp", "experts", "head"]
AXES: Final[dict[Operation, tuple[str, ...]]] = {
    "attention": ("sequences that decode", "keys they attend to, of all"),
    "prefill": ("tokens of a chunk", "position of its first"),
    "mlp": ("rows",),
    "experts": ("touched experts", "pairs per touched expert"),
    "head": ("rows",),
}
"""What a table's axes count. All times are of one layer (head: of one step), in seconds."""
MAX_RALLY: Final = 4


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the file: fields that are not known are refused."""


class LinkProfile(_Part, frozen=True, kw_only=True):
    """A way to move rows: a message of n bytes takes alpha_s + n / bytes_per_s, one way.

    `name` is a transport ("shm", "tcp", "cuda_ipc", "nixl") or a class of links ("nvlink4").
    `shares_cores`: measured while both ends took turns on the same cores; None: it does not matter.
    """

    name: str
    alpha_s: Amount
    bytes_per_s: Positive
    shares_cores: bool | None = None


class Rates(_Part, frozen=True, kw_only=True):
    """The roofline with so many threads: what kernels reach, not what is printed on the box.

    `read_bytes_per_s`: weights and keys from memory. `flops`: multiplications and additions per
    second by format of the weights. `launch_s`: the least time of one operation.
    """

    threads: Count = 1
    read_bytes_per_s: Positive
    flops: dict[Format, Positive]
    launch_s: Amount


class Table(_Part, frozen=True, kw_only=True):
    """Measured seconds on a grid: `seconds[i * len(axes[1]) + j]` at (axes[0][i], axes[1][j])."""

    operation: Operation
    shape: tuple[int, ...]
    format: Format
    threads: Count = 1
    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[Positive, ...]


class Rally(_Part, frozen=True, kw_only=True):
    """How much longer a step with M2N takes than its parts alone, by micro-batches.

    In a rally another side's weights go through the caches between two halves, and the second
    micro-batch of a layer finds its weights in them: `attention` and `experts` are the factors of
    both sides' own times. `step`: that of the whole step over what both sides, in the rally, add up
    to in the pipeline. `shares_cores`: they took turns on the same cores. `rows` of a micro-batch
    ascend; there is a factor for each. `shape`: the experts' (ModelShape.experts_key()), () where
    the file does not say.
    """

    shape: tuple[int, ...] = ()
    shares_cores: bool
    micro_batches: Annotated[int, Meta(ge=1, le=MAX_RALLY)]
    rows: tuple[float, ...]
    attention: tuple[Positive, ...]
    experts: tuple[Positive, ...]
    step: tuple[Positive, ...]


class ProcessMemory(_Part, frozen=True, kw_only=True):
    """Bytes of a node's process beside weights, keys and rows.

    `private` by role; `shared`: libraries' pages, which all nodes of a host share.
    """

    attention: Amount
    expert: Amount
    shared: Amount = 0.0


class DeviceProfile(_Part, frozen=True, kw_only=True):
    """A device. `memory_bytes` is all of it; `price_per_hour` is in the cluster's unit.

    `formats`: what its kernels compute with; the first is "none". `notes`: where the figures are
    from.
    """

    version: Literal[1] = VERSION
    name: str
    kind: Literal["cpu", "cuda"]
    source: Literal["measured", "literature"]
    notes: str = ""
    memory_bytes: Positive
    price_per_hour: Amount = 0.0
    cores: Count = 1
    formats: tuple[Format, ...]
    rates: tuple[Rates, ...]
    tables: tuple[Table, ...] = ()
    rallies: tuple[Rally, ...] = ()
    links: tuple[LinkProfile, ...] = ()
    process: ProcessMemory = ProcessMemory(attention=0.0, expert=0.0)

    def rates_of(self, threads: int) -> Rates:
        """Return the rates with `threads`: the nearest measured number that is not above it."""
        below = [each for each in self.rates if each.threads <= threads]
        return max(below or self.rates, key=lambda each: each.threads if below else -each.threads)

    def check(self) -> None:
        """Raise ConfigError, naming the part, for figures that mean nothing."""
        if not self.rates:
            raise ConfigError("rates: a device needs at least those of one thread")
        if "none" not in self.formats:
            raise ConfigError("formats: every device computes with unquantised weights (none)")
        for rates in self.rates:
            if missing := sorted(set(self.formats) - set(rates.flops)):
                raise ConfigError(f"rates of {rates.threads} threads: no flops of {missing}")
        for idx, table in enumerate(self.tables):
            _check_table(f"tables[{idx}] ({table.operation})", table)
        for idx, rally in enumerate(self.rallies):
            _check_rally(f"rallies[{idx}]", rally)


def _check_table(where: str, table: Table) -> None:
    names = AXES[table.operation]
    if len(table.axes) != len(names):
        raise ConfigError(f"{where}: {len(table.axes)} axes; it has {', '.join(names)}")
    for name, axis in zip(names, table.axes, strict=True):
        _check_ascending(f"{where}: {name}", axis)
    if len(table.seconds) != math.prod(map(len, table.axes)):
        raise ConfigError(f"{where}: {len(table.seconds)} times for axes of {table.axes}")


def _check_rally(where: str, rally: Rally) -> None:
    _check_ascending(f"{where}: rows", rally.rows)
    factors = (rally.attention, rally.experts, rally.step)
    if any(len(each) != len(rally.rows) for each in factors):
        raise ConfigError(f"{where}: attention, experts and step need a factor for each of rows")


def _check_ascending(where: str, axis: Sequence[float]) -> None:
    if not axis or list(axis) != sorted(set(axis)) or not math.isfinite(axis[-1]) or axis[0] < 0:
        raise ConfigError(f"{where}: {list(axis)} must be finite, 0 or more, and ascend")


def load_profile(path: str | Path) -> DeviceProfile:
    """Read a device's file; raises ConfigError with the reason.

    A name of deploy/placement/literature, without .json, is one of those.
    """
    place = Path(path)
    known = LITERATURE / f"{place}.json"
    if not place.exists() and place.name == str(place) and known.exists():
        place = known
    try:
        found = msgspec.json.decode(place.read_bytes(), type=DeviceProfile)
        found.check()
    except OSError as error:
        names = ", ".join(sorted(each.stem for each in LITERATURE.glob("*.json")))
        raise ConfigError(
            f"device {path}: {error.strerror}; `topspin profile -o {path}` writes one, and known "
            f"from literature are {names}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"device {place}: {error}") from error
    return found


def save_profile(profile: DeviceProfile, path: str | Path) -> None:
    """Write a device's file, readable."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    Path(path).write_bytes(text + b"\n")
