"""Interpolation in measured tables, and the device's file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.placement.devices import (
    LITERATURE,
    DeviceProfile,
    Rally,
    Rates,
    Table,
    load_profile,
    save_profile,
)
from deploy.placement.tables import find_table, rally_factors, seconds_at
from topspin.errors import ConfigError

axes = st.lists(st.integers(0, 10_000), min_size=1, max_size=6, unique=True).map(sorted)
times = st.floats(1e-7, 10.0)
TABLE: dict[str, object] = {
    "operation": "mlp",
    "shape": [1],
    "format": "none",
    "axes": [[1, 2]],
    "seconds": [1, 1],
}


@st.composite
def tables(draw: st.DrawFn, *, rising: bool = False) -> Table:
    first, second = draw(axes), draw(axes)
    seconds = draw(
        st.lists(times, min_size=len(first) * len(second), max_size=len(first) * len(second))
    )
    if rising:
        width = len(second)
        for idx in range(len(seconds)):
            before = [seconds[idx - 1]] if idx % width else []
            before += [seconds[idx - width]] if idx >= width else []
            seconds[idx] = max([seconds[idx], *before])
    return Table(
        operation="attention",
        shape=(1,),
        format="none",
        axes=(tuple(map(float, first)), tuple(map(float, second))),
        seconds=tuple(seconds),
    )


def profile(**changes: object) -> DeviceProfile:
    found = DeviceProfile(
        name="box",
        kind="cpu",
        source="measured",
        memory_bytes=1e9,
        formats=("none",),
        rates=(Rates(threads=1, read_bytes_per_s=1e10, flops={"none": 1e11}, launch_s=1e-6),),
    )
    return msgspec.structs.replace(found, **changes)


@settings(max_examples=50)
@given(table=tables())
def test_it_is_exact_on_the_points_of_the_grid(table: Table) -> None:
    width = len(table.axes[1])
    for i, first in enumerate(table.axes[0]):
        for j, second in enumerate(table.axes[1]):
            found = seconds_at(table, (first, second))
            assert found == pytest.approx(table.seconds[i * width + j])


@settings(max_examples=50)
@given(table=tables(rising=True), data=st.data())
def test_it_rises_where_the_table_does(table: Table, data: st.DataObject) -> None:
    place = st.floats(0, 20_000)
    low = data.draw(place), data.draw(place)
    high = tuple(each + data.draw(st.floats(0, 5_000)) for each in low)
    # Beyond the last points slopes may fall, since those of neighbouring rows differ.
    ends = [axis[-1] for axis in table.axes]
    low, high = (
        tuple(min(value, end) for value, end in zip(point, ends, strict=True))
        for point in (low, high)
    )
    assert seconds_at(table, low) <= seconds_at(table, high) * (1 + 1e-9) + 1e-12


@settings(max_examples=50)
@given(table=tables(), point=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)))
def test_it_is_never_negative_nor_less_than_at_the_tables_end(
    table: Table, point: tuple[float, float]
) -> None:
    ends = [min(value, axis[-1]) for value, axis in zip(point, table.axes, strict=True)]
    assert seconds_at(table, point) >= seconds_at(table, ends) > 0.0


def test_between_two_points_it_is_linear_in_each_axis() -> None:
    table = Table(
        operation="attention",
        shape=(1,),
        format="none",
        axes=((1.0, 3.0), (10.0, 20.0)),
        seconds=(1.0, 2.0, 3.0, 8.0),
    )
    assert seconds_at(table, (2.0, 10.0)) == pytest.approx(2.0)
    assert seconds_at(table, (2.0, 15.0)) == pytest.approx(3.5)
    assert seconds_at(table, (5.0, 10.0)) == pytest.approx(5.0)
    assert seconds_at(table, (0.0, 0.0)) == pytest.approx(1.0)


def test_the_nearest_number_of_threads_answers() -> None:
    one = Table(operation="mlp", shape=(1,), format="none", axes=((1.0,),), seconds=(1.0,))
    device = profile(tables=(one, msgspec.structs.replace(one, threads=4)))
    for threads, found in {1: 1, 2: 1, 3: 4, 4: 4, 64: 4}.items():
        table = find_table(device, "mlp", (1,), "none", threads)
        assert table is not None
        # Fewer threads come first: more would promise what is not there.
        assert table.threads == (1 if threads < 4 else found)
    assert find_table(device, "mlp", (2,), "none", 1) is None
    assert find_table(device, "mlp", (1,), "int8", 1) is None


def test_factors_of_a_rally_hold_beyond_their_rows() -> None:
    rally = Rally(
        shares_cores=True,
        micro_batches=2,
        rows=(1.0, 5.0),
        attention=(0.5, 0.9),
        experts=(1.0, 2.0),
        step=(1.1, 1.1),
    )
    other = msgspec.structs.replace(rally, shape=(8, 4), step=(1.5, 1.5))
    device = profile(rallies=(rally, other))

    def found(
        rows: float, micro_batches: int = 2, shape: tuple[int, ...] = (1, 1)
    ) -> tuple[float, ...]:
        return rally_factors(
            device, shape, shares_cores=True, micro_batches=micro_batches, rows=rows
        )

    assert found(3.0) == pytest.approx((0.7, 1.5, 1.1))
    assert found(100.0) == pytest.approx((0.9, 2.0, 1.1))
    assert found(3.0, 1) == (1.0, 1.0, 1.0)
    assert found(3.0, shape=(8, 4)) == pytest.approx((0.7, 1.5, 1.5))


@settings(max_examples=50)
@given(table=tables())
def test_a_file_is_read_as_it_was_written(
    table: Table, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("device") / "box.json"
    device = profile(tables=(table,), price_per_hour=2.5, notes="ä")
    save_profile(device, path)
    assert load_profile(path) == device


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wings": 2}, "wings"),
        ({"formats": ["int8"]}, "formats"),
        ({"formats": ["none", "int8"]}, "no flops of"),
        ({"rates": []}, "rates"),
        ({"tables": [TABLE | {"axes": [[2, 1]], "seconds": [1, 1]}]}, "ascend"),
        ({"tables": [TABLE | {"operation": "experts"}]}, "axes"),
        ({"tables": [TABLE | {"seconds": [1]}]}, "1 times"),
    ],
)
def test_a_bad_file_is_refused(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    raw = msgspec.to_builtins(profile()) | change
    path.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(ConfigError, match=reason) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_told_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topspin profile.*h200"):
        load_profile(tmp_path / "none.json")


@pytest.mark.parametrize("path", sorted(LITERATURE.glob("*.json")), ids=lambda path: path.stem)
def test_devices_of_literature_are_sound_and_say_so(path: Path) -> None:
    device = load_profile(path.stem)
    assert device.source == "literature"
    assert "Not measured" in device.notes
    assert not device.tables
    for rates in device.rates:
        assert rates.read_bytes_per_s < 1e13
        assert set(rates.flops) == set(device.formats)
