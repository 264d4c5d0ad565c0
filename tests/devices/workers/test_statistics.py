"""Every labelled picture of a device is in at most one sum per extractor; the device uses the sum without its own part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError, StatisticsError
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import sums as class_statistics
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.class_statistics.sums import ADDED, MOST_PER_CLASS, key_of
from edge_fl.heads.head import Array
from edge_fl.secure import fixed_point
from edge_fl_devices.workers.class_statistics import NEXT, SENT, StatisticsOffers
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, fit_here

CLASSES, DIM = 3, 20
LENGTH = class_statistics.shape_of(CLASSES, DIM).length
ONE, OTHER = "1" * 64, "2" * 64


def pictures(n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The first n of always the same pictures."""
    return np.random.default_rng(0).normal(size=(500, DIM)).astype(np.float32)[:n], np.arange(500)[
        :n
    ] % CLASSES


def prepared(folder: Path, n: int, release: int = 1, extractor: str = ONE) -> StatisticsOffers:
    """A device's offers after a fit on n pictures, in a new process."""
    offers = StatisticsOffers(folder)
    offers.prepare(release, extractor, *pictures(n), CLASSES)
    return offers


def counts(offers: StatisticsOffers, release: int = 1) -> list[float] | None:
    """Pictures of each class in the vector given out; None without a vector."""
    vector = offers.give("s", release, LENGTH)
    return None if vector is None else vector[:CLASSES].tolist()


def test_a_device_offers_once_and_again_with_the_new_pictures_when_its_labels_have_grown(
    tmp_path: Path,
) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first) == [4, 4, 4]
    first.commit("s")
    assert counts(first) is None
    for n in (12, 17):
        assert counts(prepared(tmp_path, n)) is None
    grown = prepared(tmp_path, 18, release=2)
    assert counts(grown) is None and counts(grown, 2) == [2, 2, 2]


def test_a_vector_that_reached_no_sum_is_given_again_also_after_a_restart(tmp_path: Path) -> None:
    before = prepared(tmp_path, 12).give("s", 1, LENGTH)
    again = StatisticsOffers(tmp_path).give("s", 1, LENGTH)
    assert before is not None and again is not None and np.array_equal(before, again)


def test_a_vector_is_in_one_sum(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    assert offers.give("a", 1, LENGTH) is not None and offers.give("b", 1, LENGTH) is not None
    with pytest.raises(StatisticsError, match="the vector is not that of the sum a; nothing was sent"):
        offers.commit("a")
    assert offers.give("b", 1, LENGTH) is not None
    offers.commit("b")
    with pytest.raises(StatisticsError, match="not that of the sum b"):
        offers.commit("b")
    for again in (offers, StatisticsOffers(tmp_path), prepared(tmp_path, 12)):
        assert again.give("b", 1, LENGTH) is None and again.give("c", 1, LENGTH) is None


def test_what_may_have_left_before_is_not_offered_and_is_no_part_of_a_prior(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    own = offers.give("a", 1, LENGTH)
    offers.commit("a", leaves=False)
    assert counts(prepared(tmp_path, 12)) is None
    extras = prior_of(others_vector(), own, ids=["a"])
    np.testing.assert_array_equal(flat(offers.without_own(extras, ONE)), flat(extras))


def test_a_vector_of_a_sum_that_failed_is_not_offered_again_and_is_no_part_of_a_prior(tmp_path: Path) -> None:
    for id, n, release in (("a", 12, 1), ("b", 24, 2)):
        offers = prepared(tmp_path, n, release)
        assert offers.give(id, release, LENGTH) is not None
        offers.commit(id)
        offers.settle("of another sum", added=False)
        offers.settle(id, added=id == "a")
    assert counts(prepared(tmp_path, 24)) is None
    extras = prior_of(others_vector(), ids=["b"])
    np.testing.assert_array_equal(flat(StatisticsOffers(tmp_path).without_own(extras, ONE)), flat(extras))
    kept = StatisticsOffers(tmp_path).without_own(prior_of(others_vector(), ids=["a"]), ONE)
    assert not np.array_equal(flat(kept), flat(extras))  # that of the other sum stays


def test_an_offer_is_withdrawn(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    offers.withdraw()
    assert counts(offers) is None


def test_of_successive_sums_only_whole_vectors_of_one_sum_each_are_known(tmp_path: Path) -> None:
    """The bound of docs/secure-aggregation.md: no two sums have a picture in common, whoever leaves between them.

    So a combination of sums has either all vectors of a sum in it or none, and none isolates fewer devices than the minimum.
    """
    minimum, names = 5, [f"pi-{number}" for number in range(7)]
    z, y = np.random.default_rng(1).normal(size=(7, 200, DIM)).astype(np.float32), np.arange(200) % CLASSES
    sums: list[dict[str, set[str]]] = []  # of each: the pictures of its devices
    totals, alone = [], np.zeros(LENGTH)
    for number, n in enumerate((12, 12, 30, 31, 60, 120)):
        offers, given = {name: StatisticsOffers(tmp_path / name) for name in names}, {}
        for index, name in enumerate(names):
            offers[name].prepare(1, ONE, z[index, :n], y[:n], CLASSES)
            vector = offers[name].give(f"s-{number}", 1, LENGTH)
            if index != number and vector is not None:  # another device leaves each time
                given[name] = vector
        if len(given) < minimum:
            continue
        before = {name: set(offers[name]._sent(ONE).counted) for name in given}
        for name in given:
            offers[name].commit(f"s-{number}")
        sums.append({name: set(offers[name]._sent(ONE).counted) - before[name] for name in given})
        totals.append(np.sum([*given.values()], axis=0))
        assert [sum(given[name][:CLASSES]) for name in given] == [len(new) for new in sums[-1].values()]
        alone = given["pi-1"] if number == 0 else alone
    assert [len(devices) for devices in sums] == [6, 6, 6, 6]
    for first, one in enumerate(sums):
        for other in sums[first + 1 :]:
            assert not any(one[name] & other[name] for name in one.keys() & other.keys())
    for other in totals[1:]:  # pi-1 is in the first sum and leaves: its vector is not what is missing
        missing = totals[0] - other
        assert np.linalg.norm(missing - alone) > 0.5 * np.linalg.norm(alone)


def test_a_vector_of_data_that_have_changed_is_not_given_because_a_deleted_picture_may_be_in_it(
    tmp_path: Path,
) -> None:
    offers = StatisticsOffers(tmp_path)
    offers.prepare(1, ONE, *pictures(12), CLASSES, "monday")
    assert offers.give("s", 1, LENGTH, "tuesday") is None
    assert offers.give("s", 1, LENGTH, "monday") is not None
    assert StatisticsOffers(tmp_path).give("s", 1, LENGTH, "tuesday") is None


def test_all_sums_together_hold_every_picture_once_and_no_more_than_the_limit_per_class(
    tmp_path: Path,
) -> None:
    total, n = np.zeros(LENGTH), 9
    while n < 500:
        offers = prepared(tmp_path, n)
        if (vector := offers.give("s", 1, LENGTH)) is not None:
            total += vector
            offers.commit("s")
        n *= 2
    found = class_statistics.from_flat(total, class_statistics.shape_of(CLASSES, DIM))
    assert found.counts.tolist() == [MOST_PER_CLASS] * CLASSES


def test_equal_pictures_and_those_with_another_label_now_count_once(tmp_path: Path) -> None:
    z, y = pictures(12)
    offers = StatisticsOffers(tmp_path)
    offers.prepare(1, ONE, np.concatenate([z, z]), np.concatenate([y, y]), CLASSES)
    assert counts(offers) == [4, 4, 4]
    offers.commit("s")
    more, labels = pictures(36)
    labels = labels.copy()
    labels[:12] = 0
    offers.prepare(1, ONE, more, labels, CLASSES)
    assert counts(offers) == [8, 8, 8]


def test_another_extractor_starts_anew(tmp_path: Path) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first) == [4, 4, 4]
    first.commit("s")
    assert counts(prepared(tmp_path, 12, release=2, extractor=OTHER), 2) == [4, 4, 4]


def test_a_power_cut_between_the_two_files_does_not_give_a_picture_twice(tmp_path: Path) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first) == [4, 4, 4]
    kept = (tmp_path / "statistics" / NEXT).read_bytes()
    first.commit("s")
    (tmp_path / "statistics" / NEXT).write_bytes(kept)
    assert counts(StatisticsOffers(tmp_path)) is None


def trained(folder: Path, round: str = "run/3") -> StatisticsOffers:
    """The offers of a full device after the final personalisation, in a new process."""
    offers = StatisticsOffers(folder)
    offers.prepare_trained(round, *pictures(12), CLASSES)
    return offers


def test_a_full_device_offers_once_for_the_extractor_that_it_trained(tmp_path: Path) -> None:
    offers = trained(tmp_path)
    for extractor, round in (("", "run/3"), (ONE, ""), (ONE, "run/2"), (ONE, "other/3")):
        assert offers.give("s", 5, LENGTH, extractor=extractor, trained=round) is None
    assert offers.give("s", 5, LENGTH, "tuesday", extractor=ONE, trained="run/3") is None
    vector = offers.give("s", 5, LENGTH, extractor=ONE, trained="run/3")
    assert vector is not None and vector[:CLASSES].tolist() == [4, 4, 4]
    offers.commit("s")
    for again in (offers, StatisticsOffers(tmp_path), trained(tmp_path)):
        assert again.give("t", 5, LENGTH, extractor=ONE, trained="run/3") is None
    assert trained(tmp_path, "run/9").give("t", 6, LENGTH, extractor=OTHER, trained="run/9") is not None
    extras = prior_of(others_vector(), vector, ids=["s"])  # when it is head-only later, with the release
    np.testing.assert_allclose(flat(offers.without_own(extras, ONE)), others_vector(), atol=1e-5)


def test_what_a_full_device_sent_is_not_offered_again_by_the_head_only_one(tmp_path: Path) -> None:
    offers = trained(tmp_path)
    assert offers.give("s", 5, LENGTH, extractor=ONE, trained="run/3") is not None
    offers.commit("s")
    for n in (12, 17):
        assert counts(prepared(tmp_path, n)) is None
    assert counts(prepared(tmp_path, 18)) == [2, 2, 2]


def test_one_class_alone_offers_nothing(tmp_path: Path) -> None:
    offers = StatisticsOffers(tmp_path)
    z, y = pictures(12)
    offers.prepare(1, ONE, z, y, CLASSES)
    offers.prepare(1, ONE, z[y == 1], y[y == 1], CLASSES)
    assert counts(offers) is None


def test_a_sum_of_another_length_is_an_error_and_a_damaged_file_gives_nothing(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    with pytest.raises(
        StatisticsError, match=f"a sum of 7 numbers, this device has {LENGTH}; nothing was sent"
    ):
        offers.give("s", 1, 7)
    (tmp_path / "statistics" / NEXT).write_bytes(b"damaged")
    assert counts(offers) is None


def test_with_a_damaged_record_of_what_has_left_nothing_is_offered(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    (tmp_path / "statistics" / SENT).write_bytes(b"damaged")
    for attempt in (lambda: counts(offers), lambda: prepared(tmp_path, 24)):
        with pytest.raises(StatisticsError, match=r"sent\.json: damaged.*this device adds to no sums"):
            attempt()


def test_a_full_disk_is_an_error_by_name(tmp_path: Path) -> None:
    (tmp_path / "statistics").write_text("in the way")
    with pytest.raises(ArtefactError, match="what was there stays"):
        prepared(tmp_path, 12)


def test_only_its_user_can_read_the_files(tmp_path: Path) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first)
    modes = {(tmp_path / "statistics" / NEXT).stat().st_mode & 0o777}
    first.commit("s")
    assert modes | {path.stat().st_mode & 0o777 for path in (tmp_path / "statistics").iterdir()} == {0o600}


def prior_of(*vectors: NDArray[np.float64], ids: list[str]) -> dict[str, dict[str, NDArray[Any]]]:
    """The extras of a release with the sums `ids` of these vectors, which are not rounded here."""
    shape = class_statistics.shape_of(CLASSES, DIM)
    found = class_statistics.from_flat(np.sum(vectors, axis=0), shape)
    return {PRIOR: {**found.addends(), ADDED: np.array([key_of(id) for id in ids], np.int32)}}


def flat(extras: Mapping[str, Mapping[str, Array]]) -> NDArray[np.float64]:
    return class_statistics.from_arrays(extras[PRIOR]).flat


def others_vector() -> NDArray[np.float64]:
    z, y = pictures(90)
    return class_statistics.of(z[60:], y[60:], CLASSES).flat


def test_a_device_uses_the_prior_without_its_own_part(tmp_path: Path) -> None:
    others, own = others_vector(), []
    for n, release in ((12, 1), (24, 4)):
        offers = prepared(tmp_path, n, release)
        own.append(offers.give(f"s-{release}", release, LENGTH))
        offers.commit(f"s-{release}")
    found = StatisticsOffers(tmp_path).without_own(prior_of(others, *own, ids=["s-1", "x", "s-4"]), ONE)
    np.testing.assert_allclose(flat(found), others, atol=1e-5)
    first = StatisticsOffers(tmp_path).without_own(prior_of(others, own[0], ids=["s-1"]), ONE)
    np.testing.assert_allclose(flat(first), others, atol=1e-5)


def test_two_sums_on_one_release_are_subtracted_each_where_it_is_in(tmp_path: Path) -> None:
    """A server that ends between a sum and its release collects another one on the same release."""
    others, own = others_vector(), []
    for n, id in ((12, "lost"), (24, "s")):
        offers = prepared(tmp_path, n)
        own.append(offers.give(id, 1, LENGTH))
        offers.commit(id)
    for ids, parts in ((["s"], own[1:]), (["lost", "s"], own), (["lost"], own[:1])):
        found = StatisticsOffers(tmp_path).without_own(prior_of(others, *parts, ids=ids), ONE)
        np.testing.assert_allclose(flat(found), others, atol=1e-5)


def test_a_prior_for_more_classes_is_used_without_the_part_for_fewer(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    assert offers.give("s", 1, LENGTH) is not None
    offers.commit("s")
    wide = class_statistics.shape_of(CLASSES + 2, DIM)
    assert wide.projected > class_statistics.shape_of(CLASSES, DIM).projected
    z = pictures(90)[0]
    others = class_statistics.of(z[60:], np.arange(30) % (CLASSES + 2), CLASSES + 2).flat
    own = class_statistics.of(*pictures(12), CLASSES).resized(wide).flat
    total = class_statistics.from_flat(others + own, wide)
    found = offers.without_own({PRIOR: {**total.addends(), ADDED: np.array([key_of("s")])}}, ONE)
    np.testing.assert_allclose(flat(found), others, atol=1e-5)


def test_a_sum_that_a_prior_does_not_contain_is_not_subtracted(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    assert offers.give("s", 1, LENGTH) is not None
    offers.commit("s")  # but this sum failed
    extras = prior_of(others_vector(), ids=["other"])
    for extractor in (ONE, OTHER):
        np.testing.assert_array_equal(flat(offers.without_own(extras, extractor)), flat(extras))
    assert offers.without_own({}, ONE) == {}


def test_what_was_shortened_for_noise_is_subtracted_as_it_was_sent(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    sent = fixed_point.clipped(offers.give("s", 1, LENGTH), 2.0)
    offers.commit("s", 2.0)
    shape = class_statistics.shape_of(CLASSES, DIM)
    total = class_statistics.from_flat(others_vector() + sent, shape)
    extras = {PRIOR: {**total.addends(), ADDED: np.array([key_of("s")])}}
    np.testing.assert_allclose(flat(offers.without_own(extras, ONE)), others_vector(), atol=1e-5)


def test_a_damaged_prior_stays_as_it_is_for_the_fit_to_reject(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    assert offers.give("s", 1, LENGTH) is not None
    offers.commit("s")
    damaged = {PRIOR: {"count": np.zeros(1, np.float32), ADDED: np.array([key_of("s")])}}
    assert offers.without_own(damaged, ONE) == damaged


def test_the_accuracy_of_labels_without_meaning_is_that_of_guessing(tmp_path: Path) -> None:
    """With its own part of the prior a device would measure that it knows its pictures."""
    rng, dim = np.random.default_rng(0), 200
    z, y = rng.normal(size=(90, dim)).astype(np.float32), rng.permutation(90) % CLASSES
    theirs = class_statistics.of(z[60:], y[60:], CLASSES)
    offers = StatisticsOffers(tmp_path)
    offers.prepare(1, ONE, z[:60], y[:60], CLASSES)
    own = offers.give("s", 1, theirs.shape.length)
    offers.commit("s")
    total = class_statistics.from_flat(theirs.flat + own, theirs.shape)
    extras = {PRIOR: {**total.addends(), ADDED: np.array([key_of("s")])}}
    plan = HeadPlan("cosine", fleet=PRIOR)
    spec = FitSpec("cosine", CLASSES, False, ONE, plan=plan, calibrate=True)
    with_own, without = (
        fit_here(spec, FitData(z[:60], y[:60], given)).calibration.accuracy
        for given in (extras, offers.without_own(extras, ONE))
    )
    assert with_own > 0.7 and without < 0.5


def test_histograms_leave_once_for_an_extractor_and_only_with_the_data_they_are_of(tmp_path: Path) -> None:
    offers, rows = StatisticsOffers(tmp_path), np.full((2, 64), 1 / 64)
    offers.prepare_survivals(3, "a" * 64, rows, "now")
    assert (
        offers.give_survivals("s1", 3, 128, "later") is None
        and offers.give_survivals("s1", 2, 128, "now") is None
    )
    with pytest.raises(StatisticsError, match="a sum of 100 numbers, this device has 128"):
        offers.give_survivals("s1", 3, 100, "now")
    given = offers.give_survivals("s1", 3, 128, "now")
    assert given is not None and given.sum() == pytest.approx(2)
    with pytest.raises(StatisticsError, match="not those of the sum s2"):
        offers.commit_survivals("s2")
    offers.give_survivals("s1", 3, 128, "now")
    offers.commit_survivals("s1")
    for again in (offers, StatisticsOffers(tmp_path)):
        again.prepare_survivals(4, "a" * 64, rows, "now")
        assert again.give_survivals("s3", 4, 128, "now") is None
    offers.prepare_survivals(5, "b" * 64, rows, "now")  # other features
    assert offers.give_survivals("s4", 5, 128, "now") is not None
    offers.withdraw()
    assert offers.give_survivals("s4", 5, 128, "now") is None
    (tmp_path / "statistics" / "survivals.json").write_bytes(b"damaged")
    offers.prepare_survivals(6, "c" * 64, rows, "now")
    assert offers.give_survivals("s5", 6, 128, "now") is None
