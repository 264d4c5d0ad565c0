"""The label page never acts on a picture that was not seen: slow and broken pictures, held keys, double clicks, two tabs, files that go."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_fl_maker.http_server import HttpRequest, Route
from tests.browsing import Visit, visiting
from tests.maker.labelling.fruit import CLASSES, Desk, desk, device, fill, fruit
from tests.maker.labelling.test_label_page import shown

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

BUTTONS = ("#accept", "#skip", "#discard", "#undo", "#classes button:first-child")
KEYS = ("Enter", "1", "3", "s", "d", "u")
SETTLED_MS = 50


@dataclass
class Gate:
    """Holds back the pictures that the page asks for while it is closed, and counts the actions that arrive."""

    is_open: threading.Event = field(default_factory=threading.Event)
    actions: list[str] = field(default_factory=list)


@contextmanager
def gated(site: Desk) -> Iterator[Gate]:
    gate, routes = Gate(), site.service.routes
    gate.is_open.set()
    picture = routes["GET", "/api/label/preview"]

    def slow(request: HttpRequest) -> Any:
        gate.is_open.wait(60)
        return picture.respond(request)

    def counted(action: str, route: Route) -> Route:
        def respond(request: HttpRequest) -> Any:
            gate.actions.append(action)
            return route.respond(request)

        return Route(respond, own_page=True)

    routes["GET", "/api/label/preview"] = Route(slow, own_page=True)
    for action in ("label", "skip", "discard", "undo"):
        routes["POST", f"/api/label/{action}"] = counted(action, routes["POST", f"/api/label/{action}"])
    try:
        yield gate
    finally:
        gate.is_open.set()


def files(site: Desk) -> dict[str, str]:
    """Folders of all pictures by name."""
    found = [*site.images.glob("*/*.png"), *Path(site.config.folder).rglob("*.png")]
    assert len({path.name for path in found}) == len(found)
    return {path.name: path.parent.name for path in found}


def press_everything(visit: Visit) -> None:
    """Every key, and every button by a click that no disabled button gets."""
    for key in KEYS:
        visit.page.keyboard.press(key)
    for button in BUTTONS:
        visit.page.dispatch_event(button, "pointerdown")
        visit.page.eval_on_selector(button, "each => each.click()")
    visit.page.wait_for_timeout(SETTLED_MS)


def test_nothing_can_be_done_before_the_picture_is_on_the_screen(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    truth = fill(config, 3)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label", wait_for="#picture:visible")
        name = shown(visit, "")
        page.wait_for_load_state("networkidle")  # the next ones are loaded ahead
        for _ in range(8):  # with a head, so that there are predictions
            page.keyboard.press(str(CLASSES.index(truth[name]) + 1))
            name = shown(visit, name)
        site.learned()
        page.reload()
        name = shown(visit, "")
        page.wait_for_load_state("networkidle")
        gate.is_open.clear()
        for _ in range(4):  # until one comes that was not loaded ahead
            page.keyboard.press("s")
            page.wait_for_function("() => document.querySelector('#undo').disabled || waiting === false")
            page.wait_for_timeout(SETTLED_MS)
            if page.inner_text("#empty") == "Loading the picture ...":
                break
            name = shown(visit, name)
        page.wait_for_selector("text=Loading the picture ...")
        done, before = list(gate.actions), files(site)
        assert not page.is_visible("#picture") and page.inner_text("#caption") == ""
        assert page.inner_text("#accept span") == "No picture yet"
        assert not page.query_selector_all("#classes [aria-pressed=true]")
        assert all(page.is_disabled(button) for button in BUTTONS)
        press_everything(visit)
        page.wait_for_timeout(2500)  # a look at the device
        press_everything(visit)
        assert gate.actions == done and files(site) == before
        gate.is_open.set()
        new = shown(visit, name)
        page.wait_for_timeout(SETTLED_MS)
        assert gate.actions == done and files(site) == before  # nothing was queued
        assert "%" in page.inner_text("#caption")
        page.keyboard.press("1")
        shown(visit, new)
        assert files(site)[new] == CLASSES[0] and gate.actions == [*done, "label"]


def test_a_picture_counts_as_seen_only_after_a_moment(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        page.clock.install()
        visit.go("/label", wait_for="#picture:visible")
        page.clock.pause_at(page.evaluate("Date.now()") + 1000)
        page.clock.run_for(1000)
        name = shown(visit, "")
        page.keyboard.press("s")
        page.wait_for_function(
            "name => !document.querySelector('#picture').hidden && !document.querySelector('#picture').src.includes(name)",
            arg=name,
            polling=50,
        )
        press_everything(visit)
        page.clock.run_for(150)
        press_everything(visit)
        assert gate.actions == ["skip"] and page.is_disabled("#skip")
        page.clock.run_for(150)
        assert page.is_enabled("#skip")


@pytest.mark.parametrize("key", ["s", "Enter"])
def test_a_key_that_is_held_down_skips_the_only_picture_once(browser: Any, tmp_path: Path, key: str) -> None:
    config = device(tmp_path)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        assert site.session.pool.add(fruit(0, 0), "camera").name
        visit.go("/label", wait_for="#picture:visible")
        shown(visit, "")
        if key == "Enter":
            page.focus("#skip")  # it presses the focused button
        for _ in range(4):
            page.keyboard.down(key)  # after the first one with `repeat`
            page.wait_for_function("() => document.querySelector('#message').textContent === 'Skipped'")
            shown(visit, "")
        page.keyboard.up(key)
        page.wait_for_timeout(SETTLED_MS)
        assert gate.actions == ["skip"]


def test_a_key_that_is_held_down_acts_once(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 2)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label", wait_for="#picture:visible")
        name = shown(visit, "")
        for number, key in enumerate(("1", "s", "d", "u"), 1):
            for _ in range(3):
                for _ in range(10):
                    page.keyboard.down(key)  # after the first one with `repeat`
                name = shown(visit, name) if len(gate.actions) < number else shown(visit, "")
            page.keyboard.up(key)
            assert len(gate.actions) == number
            name = shown(visit, "")
        page.keyboard.press("n")
        page.keyboard.type("quince")
        for _ in range(10):
            page.keyboard.down("Enter")
        page.wait_for_selector("#new", state="hidden")
        for _ in range(10):
            page.keyboard.down("Enter")
        page.keyboard.up("Enter")
        assert len(gate.actions) == 4
        page.focus("#skip")  # Enter presses the focused button
        for _ in range(10):
            page.keyboard.down("Enter")
        shown(visit, name)
        for _ in range(10):
            page.keyboard.down("Enter")
        page.keyboard.up("Enter")
        page.wait_for_timeout(SETTLED_MS)
        assert gate.actions[4:] == ["skip"]


def test_a_double_click_labels_one_picture(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 2)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label", wait_for="#picture:visible")
        name = shown(visit, "")
        page.dblclick("#classes button:first-child")
        second = shown(visit, name)
        assert gate.actions == ["label"] and files(site)[second] == "unlabelled"
        box = page.locator("#classes button:first-child").bounding_box()
        at = box["x"] + 5, box["y"] + 5
        page.mouse.click(*at)
        third = shown(visit, second)
        page.mouse.move(*at)
        page.mouse.down(click_count=2)  # a slow double click: its second half falls on the next picture
        page.mouse.up(click_count=2)
        page.wait_for_selector("text=The second click of a double click was ignored.")
        assert gate.actions == ["label", "label"] and files(site)[third] == "unlabelled"


def test_a_click_counts_for_the_picture_on_which_the_button_went_down(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label", wait_for="#picture:visible")
        name = shown(visit, "")
        page.hover("#classes button:first-child")
        page.mouse.down()
        (Path(config.folder) / "unlabelled" / name).unlink()  # dropped: the next look brings another one
        shown(visit, name)
        page.mouse.up()
        page.wait_for_timeout(SETTLED_MS)
        assert gate.actions == []
        page.click("#classes button:first-child")
        shown(visit, "")
        assert gate.actions == ["label"]


def test_a_picture_that_goes_while_it_loads_is_passed_over(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        gate.is_open.clear()
        visit.go("/label", wait_for="text=Loading the picture ...")
        first = visit.page.evaluate("shown.name")
        (Path(config.folder) / "unlabelled" / first).unlink()
        gate.is_open.set()
        assert shown(visit, first) != first
        assert gate.actions == []
        visit.complaints = [each for each in visit.complaints if "422" not in each]  # of the file that went


def test_a_picture_that_cannot_be_shown_is_named_and_can_only_be_skipped(
    browser: Any, tmp_path: Path
) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site, gated(site) as gate, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label", wait_for="#picture:visible")
        first = shown(visit, "")
        path = Path(config.folder) / "unlabelled" / first
        whole = path.read_bytes()
        path.write_bytes(b"no picture")
        page.wait_for_selector("text=This picture cannot be shown")
        assert first in page.inner_text("#empty") and not page.is_visible("#picture")
        assert page.is_enabled("#skip")
        assert all(page.is_disabled(button) for button in BUTTONS if button != "#skip")
        for key in ("Enter", "1", "d"):
            page.keyboard.press(key)
        assert gate.actions == []
        path.write_bytes(whole)
        assert shown(visit, "") == first  # tried again
        path.write_bytes(b"no picture")
        page.wait_for_selector("text=This picture cannot be shown")
        page.keyboard.press("s")
        second = shown(visit, first)
        assert gate.actions == ["skip"]
        page.keyboard.press("u")
        page.wait_for_selector("text=Undone: Skipped")
        page.wait_for_selector("text=This picture cannot be shown")
        assert second in site.session.pool.names()


def test_two_tabs_show_different_pictures_and_refuse_each_others(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with (
        desk(config) as site,
        gated(site),
        visiting(browser, site.home) as one,
        visiting(browser, site.home) as two,
    ):
        one.go("/label", wait_for="#picture:visible")
        two.go("/label", wait_for="#picture:visible")
        mine, yours = shown(one, ""), shown(two, "")
        assert mine != yours
        version = two.page.evaluate("shown.version")
        one.page.evaluate(
            "([name, version]) => { shown = { ...shown, name, version }; skip(); }", [yours, version]
        )
        one.page.wait_for_selector("#message.problem")
        assert "not the picture that this page was last given" in one.page.inner_text("#message")
        assert files(site)[yours] == "unlabelled"
        mine = shown(one, "")
        one.page.keyboard.press("1")
        two.page.keyboard.press("2")
        shown(one, mine), shown(two, yours)
        assert (files(site)[mine], files(site)[yours]) == (CLASSES[0], CLASSES[1])
        one.page.keyboard.press("u")
        assert shown(one, "?") and files(site)[yours] == CLASSES[1]
        one.complaints = [each for each in one.complaints if "422" not in each]


def test_an_answer_that_is_older_than_the_last_action_is_dropped(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 2)
    with desk(config) as site, gated(site), visiting(browser, site.home) as visit:
        page, routes = visit.page, site.service.routes
        visit.go("/label", wait_for="#picture:visible")
        name = shown(visit, "")
        asked, answered = threading.Event(), threading.Event()
        look = routes["GET", "/api/label/view"]

        def late(request: HttpRequest) -> Any:
            view = look.respond(request)
            asked.set()
            answered.wait(60)
            return view

        routes["GET", "/api/label/view"] = Route(late, own_page=True)
        assert asked.wait(60)
        page.keyboard.press("s")
        after = shown(visit, name)
        answered.set()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(SETTLED_MS)
        assert shown(visit, "") == after


def test_the_keys_of_the_classes_stay_when_another_person_adds_one(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site, gated(site), visiting(browser, site.home) as visit:
        site.session.add_class("you", "quince")
        visit.go("/label", wait_for="text=quince")
        name = shown(visit, "")
        site.session.add_class("you", "melon")
        visit.page.wait_for_selector("#classes button:nth-child(8) >> text=melon")
        visit.page.keyboard.press("7")
        shown(visit, name)
        assert files(site)[name] == "quince"


def test_a_class_that_is_there_and_a_long_name_are_said_in_words(browser: Any, tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site, visiting(browser, site.home) as visit:
        page = visit.page
        visit.go("/label", wait_for="#picture:visible")

        def add(name: str) -> None:
            page.click("#add")
            page.fill("#name", name)
            page.keyboard.press("Enter")

        add("Apple")
        page.wait_for_selector("#message.problem >> text='apple' is already there")
        assert page.is_visible("#new")
        page.keyboard.press("Escape")
        add("\N{TOMATO} Mu\N{COMBINING DIAERESIS}ll")
        page.wait_for_selector("text=New class: \N{TOMATO} M\xfcll")
        add("x" * 130)
        page.wait_for_selector("text=(cut at 100 characters, of 130)")
        assert sorted(path.name for path in site.images.iterdir()) == ["x" * 100, "\N{TOMATO} M\xfcll"]
        visit.complaints = [each for each in visit.complaints if "422" not in each]
