"""One recording out of messages: channels by name, times of their own or of arrival, and everything wrong with them is said."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.inputs import InputSpec
from edge_fl_maker.capture.streams import Block, number, seconds
from edge_fl_maker.capture.timeline import Piece, Timeline
from tests.maker.wrist import INPUT

RATE = INPUT.rate


def block(time: float | None, arrived: float | None = None, **values: float | list[float]) -> Block:
    arrays = {name.replace("_", "."): np.atleast_1d(np.array(value, float)) for name, value in values.items()}
    return arrays, time, arrived if arrived is not None else time or 0.0


def read(blocks: Iterable[Block], input: InputSpec | None = INPUT) -> tuple[list[Piece], dict[str, str]]:
    """The pieces, and the last remark of each kind."""
    said: dict[str, str] = {}
    timeline = Timeline(said.__setitem__, input)
    return [piece for each in blocks for piece in timeline.add(each)], said


def joined(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    times = np.concatenate([piece.times for piece in pieces])
    assert (np.diff(times) > 0).all()
    return times, np.concatenate([piece.values for piece in pieces], axis=1)


def test_channels_are_found_by_name_and_others_are_ignored() -> None:
    found, said = read(block(n / RATE, AX=n, gyro_z=-n, temperature=20) for n in range(40))
    times, values = joined(found)
    assert np.array_equal(values, [np.arange(40), -np.arange(40)]) and np.allclose(
        times, np.arange(40) / RATE
    )
    assert [piece.fresh for piece in found] == [True, *[False] * 39] and not said


def test_messages_of_single_channels_are_put_together() -> None:
    single = (each for n in range(20) for each in (block(n / RATE, ax=n), block(n / RATE + 0.001, gyro_z=-n)))
    _, values = joined(read(single)[0])
    assert np.array_equal(values, [np.arange(20), -np.arange(20)])


def test_a_channel_that_does_not_change_keeps_its_last_value_and_one_that_never_came_is_named() -> None:
    changed = [block(0.0, ax=1, gyro_z=7), *(block(n / RATE, ax=n) for n in range(1, 200))]
    found, said = read(changed)
    assert set(joined(found)[1][1]) == {7.0} and said == {
        "absent": "no value of gyro.z comes; the last one is used"
    }
    found, said = read(block(n / RATE, ax=n) for n in range(5))
    assert not found and said["absent"] == "no value of gyro.z comes; nothing is predicted"
    assert "no channel in ay; expected ax, gyro.z" in read([block(0.0, ay=1)])[1]["names"]


def test_values_that_are_no_numbers_are_replaced_by_the_last_one_and_named() -> None:
    found, said = read(
        [block(0, ax=1, gyro_z=1), block(0.1, ax=math.nan, gyro_z=2), block(0.2, ax=3, gyro_z=math.nan)]
    )
    assert np.array_equal(joined(found)[1], [[1, 1, 3], [1, 2, 2]])
    assert said == {
        f"number {name}": f"{name}: a value that is no number; the last one is used" for name in INPUT.names
    }


def test_lists_of_values_fill_the_time_between_two_messages() -> None:
    batches = (block(n, ax=[4 * n + i for i in range(4)], gyro_z=[0, 0, math.nan, 0]) for n in range(10))
    times, values = joined(read(batches)[0])
    assert np.array_equal(values[0], np.arange(40)) and np.allclose(np.diff(times[4:]), 0.25)


def test_a_lost_list_of_values_is_a_gap() -> None:
    found, said = read(block(n, ax=[n] * 16, gyro_z=[n] * 16) for n in [*range(5), *range(6, 9)])
    assert [piece.fresh for piece in found] == [True, *[False] * 4, True, False, False]
    assert said == {"gap": "no values in 2 s; a new recording begins"}


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_once_begins_a_new_recording(jump_s: float) -> None:
    found, said = read(block(n / RATE + jump_s * (n >= 20), n / RATE, ax=n, gyro_z=n) for n in range(40))
    assert [n for n, piece in enumerate(found) if piece.fresh] == [0, 20] and len(found) == 40
    assert said == {"gap": f"its clock went {jump_s + 0.0625:+.3g} s in 0.0625 s; a new recording begins"}


def test_times_that_do_not_rise_are_replaced_by_those_of_arrival() -> None:
    """Whole seconds at 16 Hz."""
    found, said = read(block(n // 16, n / RATE, ax=n, gyro_z=n) for n in range(200))
    rests = [piece for piece in found[5:] if piece.fresh]
    assert len(found) == 200 and not rests and "its clock went +0 s" in said["gap"]


def test_times_of_arrival_at_the_rate_of_the_input_are_smoothed() -> None:
    late_s = np.random.default_rng(0).uniform(0, 0.2, 400)
    arrivals = np.maximum.accumulate(np.arange(400) / RATE + late_s) + 1e-6 * np.arange(400)
    found, said = read(block(None, arrived, ax=n, gyro_z=n) for n, arrived in enumerate(arrivals))
    times = joined(found)[0]
    assert not said and sum(piece.fresh for piece in found) == 1
    assert np.diff(times[100:]).std() < 0.3 * np.diff(arrivals[100:]).std()
    assert np.abs(times[100:] - np.arange(100, 400) / RATE).max() < 0.25


def test_another_rate_is_named_once_it_is_known() -> None:
    times = [*np.arange(100) / RATE, *(100 / RATE + np.arange(100) / 8)]
    found, said = read(block(time, ax=0, gyro_z=0) for time in times)
    assert sum(piece.fresh for piece in found) == 1
    assert list(said) == ["rate"] and "values per second, not 1" in said["rate"]


def test_without_a_release_all_numbers_are_recorded_and_a_new_channel_begins_a_new_recording() -> None:
    blocks = [block(n, a=n, b=n, text=math.nan) for n in range(5)] + [
        block(n, a=n, b=n, c=n) for n in range(5, 9)
    ]
    found, said = read(blocks, None)
    assert [piece.names for piece in found] == [("a", "b")] * 5 + [("a", "b", "c")] * 4
    assert [n for n, piece in enumerate(found) if piece.fresh] == [0, 5] and not said


VALUES = st.floats(width=32) | st.just(1.0)
MESSAGES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(["ax", "gyro.z", "other"]), st.lists(VALUES, min_size=1, max_size=3)),
        st.none() | st.floats(allow_nan=False, min_value=-1e9, max_value=1e12),
        st.floats(0, 100),
    ),
    max_size=30,
)


@given(MESSAGES, st.sampled_from([INPUT, None]))
def test_whatever_comes_becomes_finite_values_at_rising_times(
    messages: list, input: InputSpec | None
) -> None:
    arrived, blocks = 0.0, []
    for values, time, passed_s in messages:
        arrived += passed_s
        usable = {name: np.array([number(value) for value in given]) for name, given in values.items()}
        blocks.append((usable, time, arrived))
    last = -math.inf
    for piece in read(blocks, input)[0]:
        assert np.isfinite(piece.values).all() and piece.values.shape == (len(piece.names), len(piece.times))
        assert (np.diff(piece.times) >= 0).all() and (piece.fresh or piece.times[0] > last)
        last = piece.times[-1]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("1.5", 1.5),
        (" ON ", 1.0),
        (False, 0.0),
        ("12,5", None),
        ("", None),
        (None, None),
        ({}, None),
        ("nan", None),
        (10**400, None),
    ],
)
def test_numbers_are_read_from_text_and_switches(value: object, found: float | None) -> None:
    assert number(value) == found or (found is None and math.isnan(number(value)))


@pytest.mark.parametrize(
    "value",
    [1.7e9, "1700000000", 1.7e12, "1.7e15", 1.7e18, "2023-11-14T22:13:20Z", "2023-11-14T23:13:20+01:00"],
)
def test_times_are_read_in_any_unit(value: object) -> None:
    assert seconds(value) == pytest.approx(1.7e9)
    assert seconds("yesterday") is seconds(None) is None
