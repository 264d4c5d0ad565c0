"""The label page in a real browser: fifty pictures by keyboard and by touch, layout in both colour schemes, and two people at once.

With EDGE_FL_SCREENSHOTS the pictures of docs/teach-a-device.md are written to that folder.
"""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_fl.inputs import InputSpec
from edge_fl.modalities import pictures
from edge_fl_devices.serving.predict import Predictor
from edge_fl_maker.access import HttpAccess
from tests.browsing import Visit, visiting
from tests.maker.labelling import fruit
from tests.maker.labelling.fruit import CLASSES, INPUT, Desk, desk, device, fill
from tests.maker.labelling.test_recordings import IMU, SOUND, filled, learner_of, posture, tone
from tests.maker.labelling.test_suggestions import LEFT, LOST
from tests.maker.labelling.test_suggestions import labelled as without_one_class

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
PICTURES = 50
PAUSE_MS = 80


def accuracy(config: Any) -> float:
    """On new pictures, ten per class."""
    images = [
        pictures.decode(BytesIO(fruit.fruit(label, 900 + n)), INPUT)
        for label in range(len(CLASSES))
        for n in range(10)
    ]
    found = [label for label, _ in Predictor(Path(config.folder)).predict(np.stack(images))]
    return float(np.mean([name == CLASSES[row // 10] for row, name in enumerate(found)]))


def shown(visit: Visit, before: str) -> str:
    """Wait until another picture than `before` can be labelled -> its name."""
    visit.page.wait_for_function(
        "before => !document.querySelector('#picture').hidden && !document.querySelector('#skip').disabled"
        " && !document.querySelector('#picture').src.includes('name=' + before + '&')",
        arg=before or "?",
    )
    source: str = visit.page.eval_on_selector("#picture", "picture => picture.src")
    return source.partition("name=")[2].partition("&")[0]


def keep(page: Any, name: str) -> None:
    if folder := os.environ.get("EDGE_FL_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / name))


def label_all(site: Desk, visit: Visit, truth: dict[str, str], press: Any) -> list[bool]:
    """Label fifty pictures, each with one `press(class, is preselected)` -> which preselected classes were right.

    After every tenth the device has time to learn, as with a person who looks at the pictures.
    """
    name, right = "", []
    for number in range(PICTURES):
        name = shown(visit, name)
        chosen = visit.page.eval_on_selector_all(
            "#classes [aria-pressed=true] span", "found => found.map(each => each.textContent)"
        )
        right.append(chosen == [truth[name]])
        press(truth[name], right[-1])
        visit.page.wait_for_timeout(PAUSE_MS)
        if number % 10 == 9:
            site.learned()
    return right


def labelled(desk: Desk, truth: dict[str, str]) -> None:
    files = {path.name: path.parent.name for path in desk.images.glob("*/*.png")}
    assert len(files) == PICTURES and files.items() <= truth.items()


def test_fifty_pictures_by_keyboard_take_one_key_each(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    truth = fill(config, 12)
    with desk(config) as site, visiting(browser, site.home, width=1280) as visit:
        visit.page.set_viewport_size({"width": 1280, "height": 720})
        visit.go("/label", wait_for="#picture:visible")
        early = []

        def press(wanted: str, is_preselected: bool) -> None:
            visit.page.keyboard.press("Enter" if is_preselected else str(CLASSES.index(wanted) + 1))
            if len(early) < 12:
                early.append(wanted)
                if len(early) == 12:
                    site.learned()
                    early.append(accuracy(config))

        right = label_all(site, visit, truth, press)
        view = site.learned()
        labelled(site, truth)
        assert view.accuracy is not None and view.measured == PICTURES
        assert accuracy(config) > early[-1] + 0.1
        assert sum(right[25:]) > sum(right[:25])
        visit.page.wait_for_function("() => document.querySelector('#labelled').textContent === '50'")
        keep(visit.page, "label-page.png")


def test_a_wrong_label_is_corrected_taken_back_and_called_right_with_one_key_each(
    browser: Any, tmp_path: Path
) -> None:
    config = device(tmp_path)
    for label, number in np.ndindex(len(CLASSES), 8):
        name = "leaf" if (label, number) == (0, 0) else CLASSES[label]
        path = tmp_path / "images" / name / f"{label}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fruit.fruit(label, number))
    wrong, right = tmp_path / "images/leaf/0-0.png", tmp_path / "images/apple/0-0.png"
    with desk(config) as site, visiting(browser, site.home, width=1280) as visit:
        site.learned()
        visit.go("/label", wait_for="#examine:enabled")
        visit.page.keyboard.press("l")
        first = "#doubts li:first-child"
        visit.page.wait_for_selector(first + " button:enabled")
        assert visit.page.text_content(first + " p").startswith("leaf, rather apple: ")
        assert visit.page.eval_on_selector(first + " img", "each => each.naturalWidth") == 240
        keep(visit.page, "label-doubts.png")
        visit.page.keyboard.press("f")
        visit.page.wait_for_selector("#message:text-is('Now apple')")
        assert right.exists() and not wrong.exists()
        visit.page.keyboard.press("u")
        visit.page.wait_for_selector("#message:text-is('Undone: Now apple')")
        assert wrong.exists() and not right.exists()
        visit.page.wait_for_selector(first + " button:enabled")
        assert visit.page.text_content(first + " p").startswith("leaf, rather apple: ")
        visit.page.keyboard.press("r")
        visit.page.wait_for_selector("#message:text-is('Right: leaf')")
        assert wrong.exists() and "leaf, rather apple" not in visit.page.text_content("#doubts")


def test_nothing_can_be_pressed_before_the_page_knows_the_device(browser: Any, tmp_path: Path) -> None:
    """A key or click of that moment would be lost."""
    with desk(device(tmp_path)) as site, visiting(browser, site.home, width=1280) as visit:
        held: list[Any] = []
        visit.page.route("**/api/label/view*", lambda route: held.append(route), times=1)
        visit.go("/label", wait_for="#examine")
        shown = "all => all.filter(b => b.offsetParent && !b.disabled).map(b => b.id)"
        assert visit.page.eval_on_selector_all("button", shown) == []
        visit.page.wait_for_timeout(500)  # its first look at the device has begun
        assert visit.page.eval_on_selector_all("button", shown) == []
        (first,) = held
        first.continue_()
        visit.page.wait_for_selector("#examine:enabled")
        assert {"examine", "add"} <= set(visit.page.eval_on_selector_all("button", shown))


def test_fifty_pictures_by_touch_on_a_phone(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    truth = fill(config, 12)
    context = browser.new_context(
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
        color_scheme="dark",
        device_scale_factor=1,
    )
    try:
        with desk(config) as site:
            visit = Visit(context.new_page(), site.home)
            visit.go("/label", wait_for="#picture:visible")

            def press(wanted: str, is_preselected: bool) -> None:
                visit.page.tap(
                    "#accept" if is_preselected else f"#classes button:nth-child({CLASSES.index(wanted) + 1})"
                )

            right = label_all(site, visit, truth, press)
            site.learned()
            labelled(site, truth)
            assert accuracy(config) > 0.6 and sum(right[25:]) > sum(right[:25])
            widths = visit.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            small = visit.page.eval_on_selector_all(
                "button", "all => all.filter(b => b.offsetParent && b.offsetHeight < 44).length"
            )
            assert widths[0] <= widths[1] and small == 0
            keep(visit.page, "label-page-phone.png")
            assert not visit.complaints
    finally:
        context.close()


def test_a_new_class_undo_and_the_token_of_the_address(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 2)
    with desk(config, HttpAccess("secret")) as site, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label#token=secret", wait_for="#picture:visible")
        assert page.evaluate("location.hash") == "" and "secret" not in page.evaluate("document.cookie")
        name = shown(visit, "")
        page.keyboard.press("n")
        page.keyboard.type("quince")  # its letters are no commands here
        page.keyboard.press("Enter")
        page.wait_for_selector("#classes .waits >> text=quince")
        assert "no class of release 1" in page.inner_text("#rule")
        page.keyboard.press("7")
        other = shown(visit, name)
        assert (site.images / "quince" / name).exists()
        page.keyboard.press("u")
        assert shown(visit, other) == name and not (site.images / "quince" / name).exists()
        page.keyboard.press("s")
        dropped = shown(visit, name)  # any other one: the pool is ordered anew after every change
        page.keyboard.press("d")
        shown(visit, dropped)
        left = site.session.pool.names()
        assert len(left) == 11 and name in left and dropped not in left


def test_a_suggested_class_is_named_undone_and_dismissed(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path, fruit.manifest(LEFT))
    fill(config, 12)
    without_one_class(tmp_path / "images")
    with desk(config) as site, visiting(browser, site.home) as visit:
        page, found = visit.page, site.learned().suggestion
        assert found
        visit.go("/label", wait_for="#suggestion:visible")
        assert f"{len(found.files)} pictures resemble each other" in page.inner_text("#resemble")
        page.wait_for_function("() => document.querySelector('#files img').naturalWidth > 0")
        page.click("#suggested")
        page.keyboard.type("sud")  # its letters are no commands here
        assert page.input_value("#suggested") == "sud"
        page.fill("#suggested", LOST)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#classes >> text={LOST}")
        assert len([*(site.images / LOST).iterdir()]) == len(found.files)
        assert f"Labelled: {len(found.files)} pictures {LOST}" in page.inner_text("#message")
        page.wait_for_selector("#undo:enabled")
        page.keyboard.press("u")
        page.wait_for_function("() => document.querySelector('#message').textContent.startsWith('Undone')")
        assert not [*(site.images / LOST).iterdir()]
        site.learned()
        page.wait_for_selector("#suggestion:visible")
        page.wait_for_selector("#dismiss:enabled")
        found = site.session.view("me").suggestion
        assert found
        page.click("#dismiss")
        page.wait_for_function(
            "() => document.querySelector('#message').textContent === 'Not suggested again'"
        )
        after = site.session.view("me").suggestion
        assert after is None or after.id != found.id
        assert not visit.complaints


@pytest.mark.parametrize(
    ("input", "file_of", "about"), [(IMU, posture, "2 channels, 3.0 s"), (SOUND, tone, "1.5 s of sound")]
)
def test_a_recording_is_drawn_named_for_screen_readers_and_played(
    browser: Any, tmp_path: Path, input: InputSpec, file_of: Any, about: str
) -> None:
    with desk(learner_of(tmp_path, input)) as site, visiting(browser, site.home) as visit:
        filled(site, file_of, 2)
        visit.go("/label", wait_for="#picture:visible")
        name = shown(visit, "")
        assert visit.page.get_attribute("#picture", "alt") == f"Recording to label: {about}"
        sound = visit.page.locator("#sound")
        assert sound.is_visible() is (input is SOUND)
        if input is SOUND:
            visit.page.wait_for_function("() => document.querySelector('#sound').src")
            visit.page.keyboard.press("p")
            visit.page.wait_for_function("() => document.querySelector('#sound').currentTime > 0")
        visit.page.keyboard.press("1")
        shown(visit, name)
        assert not sound.evaluate("sound => !sound.paused") and not visit.complaints
        assert len(list(site.images.glob("lying/*"))) == 1
