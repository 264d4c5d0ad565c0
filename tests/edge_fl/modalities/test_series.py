"""Recordings become windows at the input's rate, whatever their clock; what is wrong with one is a remark or a reason."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl import modalities
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import UnusableFileError, series
from edge_fl.modalities.limits import FileLimits

RATE, WINDOW = 50, 100
INPUT = InputSpec(
    (2, WINDOW), (0.0,), (1.0,), "CT", "float32", rate=RATE, hop=WINDOW // 2, names=("ax", "ay")
)
Times = NDArray[np.floating]


def signal(t: Times) -> Times:
    """Slow sines, which linear interpolation changes little."""
    return np.stack([np.sin(2 * np.pi * 0.5 * t), 5 * np.cos(2 * np.pi * 0.3 * t)])


def recorded(
    path: Path,
    t: Times,
    x: Times | None = None,
    clock: str = "time",
    written: Callable[[float], str] = lambda seconds: f"{seconds:.6f}",
) -> Path:
    """Write a CSV file of the signal at times t; without a `clock` it has no times."""
    x = signal(t) if x is None else x
    rows = [
        [*([written(seconds)] if clock else []), *("" if np.isnan(v) else f"{v:.9f}" for v in values)]
        for seconds, values in zip(t, x.T, strict=True)
    ]
    header = [*([clock] if clock else []), "ax", "ay"]
    path.write_text("\n".join(map(",".join, [header, *rows])) + "\n")
    return path


def expected(length: int, start: float = 0.0) -> Times:
    """Windows of the signal of so many rows at the input's rate."""
    return np.asarray(series.windows(signal(start + np.arange(length) / RATE), INPUT))


EVEN = np.arange(400) / RATE
ISO = datetime(2024, 3, 31, 1, 59, 58, tzinfo=UTC)  # clocks of summer time jump here

CLOCKS: dict[str, tuple[str, Callable[[float], str]]] = {
    "none": ("", str),
    "seconds": ("t", lambda s: f"{s:.3f}"),
    "milliseconds": ("time [ms]", lambda s: f"{1000 * s:.0f}"),
    "milliseconds without a unit": ("Timestamp", lambda s: f"{1000 * s:.0f}"),
    "milliseconds since 1970": ("unix_time", lambda s: f"{1.7e12 + 1000 * s:.0f}"),
    "nanoseconds since boot": ("timestampNs", lambda s: f"{3e14 + 1e9 * s:.0f}"),
    "microseconds by the rate": ("elapsed", lambda s: f"{1e6 * s:.0f}"),
    "ISO 8601": ("datetime", lambda s: (ISO + timedelta(seconds=s)).isoformat()),
    "ISO 8601 with Z": ("date", lambda s: f"{ISO + timedelta(seconds=s):%Y-%m-%d %H:%M:%S.%fZ}"),
    "time of day": ("Zeit", lambda s: f"{ISO + timedelta(seconds=s):%H:%M:%S.%f}"),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_recording_at_the_rate_is_cut_as_it_is(tmp_path: Path, clock: str) -> None:
    reading = series.read(recorded(tmp_path / "x.csv", EVEN, None, *CLOCKS[clock]), INPUT)
    assert reading.samples.dtype == np.float32
    assert reading.remarks == ()
    np.testing.assert_allclose(reading.samples, expected(400), atol=1e-6)


def test_times_without_a_zone_have_no_summer_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    start = datetime(2024, 3, 31, 1, 59, 56)
    path = recorded(
        tmp_path / "x.csv", EVEN, None, "date", lambda s: (start + timedelta(seconds=s)).isoformat()
    )
    assert series.read(path, INPUT).remarks == ()
    monkeypatch.undo()
    time.tzset()


def test_a_channel_may_have_the_name_of_a_clock(tmp_path: Path) -> None:
    path = recorded(tmp_path / "x.csv", EVEN)
    path.write_text(path.read_text().replace("time,ax,ay", "ax,s,ay"))
    input = InputSpec((2, 100), (0.0,), (1.0,), "CT", "float32", rate=RATE, hop=50, names=("S", "ay"))
    np.testing.assert_allclose(series.read(path, input).samples, expected(400), atol=1e-6)


def test_a_clock_that_is_written_in_seconds_is_spread_evenly(tmp_path: Path) -> None:
    for rate, remarks in ((RATE, 1), (RATE // 2, 2)):
        t = 0.01 + np.arange(8 * rate) / rate
        path = recorded(
            tmp_path / "x.csv", t, None, "time", lambda s: f"{ISO + timedelta(seconds=s):%H:%M:%S}"
        )
        reading = series.read(path, INPUT)
        assert "evenly spaced" in reading.remarks[0]
        assert reading.remarks[1:] == ("25 Hz, resampled to 50 Hz",)[: remarks - 1]
        whole = expected(int((t[-1] - t[0]) * RATE + 1e-6) + 1, 0.01)
        np.testing.assert_allclose(reading.samples, whole, atol=0.01)


@pytest.mark.parametrize("rate", [20, 49, 104, 200])
def test_another_rate_is_resampled(tmp_path: Path, rate: int) -> None:
    t = np.arange(8 * rate) / rate
    reading = series.read(recorded(tmp_path / "x.csv", t), INPUT)
    assert reading.remarks == (f"{rate} Hz, resampled to 50 Hz",)
    length = int(t[-1] * RATE + 1e-6) + 1
    np.testing.assert_allclose(reading.samples, expected(length), atol=0.02)


def test_what_the_rate_cannot_hold_is_averaged_not_folded(tmp_path: Path) -> None:
    t = np.arange(4000) / 500
    noise = np.tile([1.0, -1.0], 2000)
    reading = series.read(recorded(tmp_path / "x.csv", t, signal(t) + 3 * noise), INPUT)
    np.testing.assert_allclose(reading.samples, expected(400)[: len(reading.samples)], atol=0.7)
    assert np.abs(reading.samples[:, :, 5:-5] - expected(400)[: len(reading.samples), :, 5:-5]).max() < 0.4


def test_jitter_of_a_phone_is_evened_out(tmp_path: Path) -> None:
    late = np.random.default_rng(0).uniform(0, 0.015, 400)
    reading = series.read(recorded(tmp_path / "x.csv", EVEN + late - late[0]), INPUT)
    assert reading.remarks == ()
    np.testing.assert_allclose(reading.samples, expected(400)[: len(reading.samples)], atol=0.05)


def test_a_short_gap_is_interpolated_and_no_window_spans_a_long_one(tmp_path: Path) -> None:
    kept = np.delete(np.arange(400), [50, 51, *range(150, 160)])
    reading = series.read(recorded(tmp_path / "x.csv", EVEN[kept]), INPUT)
    assert reading.remarks == ("gaps: cut at the long ones",)
    pieces = [expected(150), expected(240, EVEN[160])]
    np.testing.assert_allclose(reading.samples, np.concatenate(pieces), atol=0.02)


def test_missing_values_are_a_gap_with_and_without_times(tmp_path: Path) -> None:
    x = signal(EVEN)
    x[0, 50], x[1, 150:160] = np.nan, np.nan
    for clock in ("time", ""):
        reading = series.read(recorded(tmp_path / "x.csv", EVEN, x, clock), INPUT)
        assert reading.remarks == ("values are missing", "gaps: cut at the long ones")
        pieces = [expected(150), expected(240, EVEN[160])]
        np.testing.assert_allclose(reading.samples, np.concatenate(pieces), atol=0.02)


def test_a_clock_that_jumps_back_cuts_the_recording(tmp_path: Path) -> None:
    t = np.concatenate([EVEN[:200], EVEN[:200]])
    x = np.concatenate([signal(EVEN[:200]), signal(EVEN[200:])], axis=1)
    reading = series.read(recorded(tmp_path / "x.csv", t, x), INPUT)
    assert reading.remarks == ("the clock jumps back: cut there",)
    pieces = [expected(200), expected(200, EVEN[200])]
    np.testing.assert_allclose(reading.samples, np.concatenate(pieces), atol=1e-6)


def test_a_clock_that_is_set_after_the_start_needs_no_memory_for_the_years_between(tmp_path: Path) -> None:
    t = np.concatenate([EVEN[:200], 1.7e9 + EVEN[200:]])
    reading = series.read(recorded(tmp_path / "x.csv", t, signal(EVEN), "time [s]"), INPUT)
    assert len(reading.samples) == 6


def test_a_row_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    t = np.insert(EVEN, 100, EVEN[99])
    reading = series.read(recorded(tmp_path / "x.csv", t), INPUT)
    assert reading.remarks == ("rows with the time of the row before are left out",)
    np.testing.assert_allclose(reading.samples, expected(400), atol=1e-6)


@pytest.mark.parametrize(
    ("t", "detail"),
    [
        (EVEN[:99], "1.98 s without a gap, a window takes 2 s"),
        (EVEN[:1], "0.02 s"),
        (EVEN[:0], "0 s"),
        (np.delete(EVEN, np.arange(60, 340, 60)), "gaps"),
        (np.arange(99) / 51, "51 Hz, resampled to 50 Hz"),
    ],
)
def test_a_recording_shorter_than_a_window_is_named(tmp_path: Path, t: Times, detail: str) -> None:
    if detail == "gaps":
        t = t[(t * RATE).round() % 60 > 6]
    with pytest.raises(UnusableFileError) as raised:
        series.read(recorded(tmp_path / "x.csv", t), INPUT)
    assert raised.value.reason == "shorter than a window"
    assert detail in raised.value.detail


def test_times_of_another_form_are_named(tmp_path: Path) -> None:
    path = recorded(tmp_path / "x.csv", EVEN, None, "time", lambda s: "31.03.2024 10:00")
    with pytest.raises(UnusableFileError, match=r"times of another form: column time: '31\.03\.2024 10:00'"):
        series.read(path, INPUT)


def test_channels_that_are_constant_clipped_or_dead_are_remarked(tmp_path: Path) -> None:
    x = np.stack([np.full(400, 3.0), np.clip(signal(EVEN)[1], -4, 2)])
    remarks = series.read(recorded(tmp_path / "x.csv", EVEN, x), INPUT).remarks
    assert remarks == (
        "channel ax is constant",
        "channel ay seems to be clipped at -4",
        "channel ay seems to be clipped at 2",
    )
    resting = np.stack([np.maximum(0, x[1]), np.round(x[1])])  # a device that is off, and a counter
    assert "clipped at 0" not in str(series.read(recorded(tmp_path / "x.csv", EVEN, resting), INPUT).remarks)
    spiked = signal(EVEN[:50]) + 9 * (EVEN[:50] == 0.5)
    with pytest.raises(UnusableFileError) as short:
        series.read(recorded(tmp_path / "x.csv", EVEN[:50], spiked), INPUT)
    assert "clipped" not in str(short.value)
    dead = np.stack([np.full(400, np.nan), x[1]])
    with pytest.raises(UnusableFileError, match=r"shorter than a window.*channel ax has no values"):
        series.read(recorded(tmp_path / "x.csv", EVEN, dead), INPUT)


def test_windows_above_the_limit_are_not_made(tmp_path: Path) -> None:
    dense = InputSpec((2, 100), (0.0,), (1.0,), "CT", "float32", rate=RATE, hop=1, names=("ax", "ay"))
    path = recorded(tmp_path / "x.csv", EVEN)
    assert len(series.read(path, dense).samples) == 301
    with pytest.raises(UnusableFileError, match="too large for this board"):
        series.read(path, dense, FileLimits(max_bytes=301 * 2 * 100 * 4 - 1))


def test_a_recipes_input_is_proposed_from_recordings(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.csv" for number in range(3)]
    for path, start in zip(paths, (0, 0.004, 0), strict=True):
        recorded(path, np.arange(500) * (0.02 + start / 500), clock="time [s]")
    proposed = series.propose(paths)
    assert proposed == InputSpec(
        (2, 200), (0.0,), (1.0,), "CT", "float32", rate=50, hop=100, names=("ax", "ay"), units=("", "")
    )
    assert series.propose(paths, window_s=1.5, rate=20).shape == (2, 30)
    assert series.describe(paths[0]).length == 500
    whole = series.read(paths[0], None).samples
    assert whole.shape == (1, 2, 500)

    paths[1].write_text(paths[1].read_text().replace("ay", "az"))
    with pytest.raises(DataError, match=r"1\.csv: no column of numbers ay, as other files have"):
        series.propose(paths)
    recorded(paths[1], EVEN, clock="")
    with pytest.raises(DataError, match=r"1\.csv: no column of times"):
        series.propose(paths)
    assert series.propose(paths, rate=50).rate == 50


def test_units_and_a_second_clock_are_no_channels(tmp_path: Path) -> None:
    path = tmp_path / "phone.csv"
    rows = "\n".join(
        f"{1_700_000_000_000_000_000 + 20_000_000 * n},{n / 50},{n % 7},{n % 5},21" for n in range(300)
    )
    path.write_text(f"time,seconds_elapsed,z (m/s²),X (m/s²),T [°C]\n{rows}\n")
    found = series.describe(path)
    assert found[:2] == (("z", "X", "T"), ("m/s²", "m/s²", "°C"))
    assert found.rate == pytest.approx(50, rel=1e-3)


def test_arrays_are_checked_and_a_transposed_one_is_explained() -> None:
    x = np.random.default_rng(0).normal(3, 2, (5, 2, WINDOW))
    assert series.fit(series.arrays(x, "data"), INPUT, "data").dtype == np.float32
    assert series.arrays(x[:, 0], "data").shape == (5, 1, WINDOW)
    with pytest.raises(DataError, match=r"data: .*pass x.transpose\(0, 2, 1\)"):
        series.fit(x.transpose(0, 2, 1), INPUT, "data")
    with pytest.raises(DataError, match=r"data: .*\[2, 80\], the extractor takes \[2, 100\] \[C, T\]"):
        series.fit(x[:, :, :80], INPUT, "data")
    x[3, 1, 7] = np.nan
    with pytest.raises(DataError, match=r"data: nan at \[3, 1, 7\]"):
        series.arrays(x, "data")
    x[3, 1, 7] = 1e39  # above a float32
    with pytest.raises(DataError, match=r"data: 1e\+39 at \[3, 1, 7\]"):
        series.arrays(x, "data")
    with pytest.raises(DataError, match=r"data: .*expected"):
        series.arrays(x.astype(str), "data")
    with pytest.raises(DataError, match=r"data: windows \[2\]"):
        series.arrays(np.zeros(2), "data")


def test_the_input_has_mean_and_std_of_its_rows_also_of_tiny_large_and_constant_channels() -> None:
    rng = np.random.default_rng(1)
    x = np.stack(
        [rng.normal(1e-6, 3e-7, (40, 50)), rng.normal(101_325, 1, (40, 50)), np.full((40, 50), 9.81)], 1
    )
    x = x.astype(np.float32)
    x[0, 2, 0] = np.nextafter(x[0, 2, 0], np.float32(10))
    given = InputSpec((3, 50), (0.0,), (1.0,), "CT", "float32", rate=10, hop=5)
    found = series.input_of(x, np.arange(30), given)
    exact = x[:30].astype(np.float64)
    np.testing.assert_allclose(found.mean, exact.mean((0, 2)), rtol=1e-8)
    np.testing.assert_allclose(found.std[:2], exact.std((0, 2))[:2], rtol=1e-6)
    assert found.std[2] == 1
    assert (found.rate, found.hop) == (10, 5)


def test_synthetic_windows_have_the_inputs_mean_and_spread() -> None:
    input = InputSpec((2, 128), (5.0, -1.0), (2.0, 0.1), "CT", "float32", rate=50, hop=64)
    found = series.synthetic(input, 200, 0)
    assert found.shape == (200, 2, 128)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.mean((0, 2)), input.mean, atol=0.2)
    np.testing.assert_allclose(found.std((0, 2)), input.std, rtol=0.1)
    assert np.array_equal(found, series.synthetic(input, 200, 0))


def test_series_are_a_modality() -> None:
    found = modalities.of("series")
    assert all(hasattr(found, name) for name in modalities.Modality.__dict__ if not name.startswith("_"))
    with pytest.raises(DataError, match=r"recording: windows, but the extractor takes rows \(table\)"):
        found.read(Path("none"), InputSpec((2,), axes="F", dtype="float32"))
