"""The pages in a browser, as they are used: filters on a phone, the search of the log, commands to copy, a chart that is clicked."""

from collections.abc import Iterator
from typing import Any

import pytest

from edge_fl_server.registry import Database
from tests.browsing import Dashboard, dashboard, visiting
from tests.console.dashboard import filled

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

DEVICE = filled.name(filled.WORST)
PHONE = {"width": 390, "height": 664}  # what a browser's bars leave of a phone
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', {value: undefined})"  # without HTTPS
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
NO_COPY = "document.execCommand = () => false"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("in-use")
    with_devices = Database.open(folder / "registry.sqlite")
    filled.fill(with_devices, 60, folder)
    with_devices.close()
    with dashboard(folder / "registry.sqlite") as running:
        yield running


def test_a_phone_shows_devices_and_events_at_once_and_filters_on_request(
    service: Dashboard, browser: Any
) -> None:
    with visiting(browser, service.address) as visit:
        visit.page.set_viewport_size(PHONE)
        for path, hidden in (("/fleet", "Select devices by tags and attributes"), ("/log", "From, UTC day")):
            visit.go(path, "tbody tr")
            row = visit.page.locator("tbody tr").first.bounding_box()
            assert row["y"] + row["height"] <= PHONE["height"], path
            field = visit.page.get_by_label(hidden)
            assert not field.is_visible()
            visit.page.click("[data-fold]")
            assert field.is_visible()
            assert visit.page.get_attribute("[data-fold]", "aria-expanded") == "true"
            visit.page.click("[data-fold]")
            assert not field.is_visible()
        visit.go("/fleet?tier=head&where=site%3Dberlin", "tbody tr")
        assert visit.page.inner_text("[data-fold]") == "Filters (2 chosen)"
        visit.look(1440, "light")
        assert not visit.page.locator("[data-fold]").is_visible()
        assert visit.page.get_by_label("Select devices by tags and attributes").is_visible()


def test_the_log_is_searched_and_its_address_opens_the_same_view(service: Dashboard, browser: Any) -> None:
    with visiting(browser, service.address) as visit:
        visit.go("/log", "tbody tr")
        every = visit.page.locator("tbody tr").count()
        visit.page.keyboard.press("/")
        visit.page.keyboard.type("much larger")
        visit.page.wait_for_function("document.querySelectorAll('tbody tr').length === 2")
        visit.page.get_by_label("From, UTC day").fill("2020-01-01")
        visit.page.wait_for_function("location.search.includes('from=2020-01-01')")
        address = visit.page.url
        assert address.endswith("/log?search=much+larger&from=2020-01-01") and every > 2
        visit.go(address.removeprefix(visit.home), "tbody tr")
        assert visit.page.locator("tbody tr").count() == 2
        assert visit.page.input_value("input[type=search]") == "much larger"
        assert visit.page.get_by_label("From, UTC day").input_value() == "2020-01-01"
        visit.page.get_by_label("To, UTC day").fill("2020-01-02")
        visit.page.wait_for_selector("text=No matching event")
        visit.go("/log?from=yesterday", ".sheet.empty")
        assert "expected a day such as" in visit.page.inner_text("#main")


@pytest.mark.parametrize("setting", ["", NO_CLIPBOARD, f"{NO_CLIPBOARD}; {NO_COPY}"])
def test_a_command_is_copied_also_without_https_or_at_least_selected(
    service: Dashboard, browser: Any, setting: str
) -> None:
    with visiting(browser, service.address) as visit:
        visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        if setting:
            visit.page.add_init_script(setting)
        visit.go(f"/device/{DEVICE}", "[data-copy]")
        row = visit.page.locator(".copied li").first
        command = row.locator("code").inner_text()
        assert command.startswith(f"edge-fl device logs {DEVICE} ")
        row.locator("[data-copy]").click()
        said = "Selected: press Ctrl+C" if NO_COPY in setting else "Copied"
        visit.page.wait_for_function(f"document.querySelector('[data-copy]').innerText === '{said}'")
        assert visit.page.evaluate("getSelection().toString()") == command
        if NO_COPY in setting:
            return
        visit.go("/fleet", "tbody tr")
        field = visit.page.get_by_label("Search devices")
        field.focus()
        visit.page.keyboard.press("Control+V")
        assert field.input_value() == command


def test_a_name_or_a_dot_of_the_data_opens_the_device(service: Dashboard, browser: Any) -> None:
    """Also after the mouse has been on it for as long as a person needs."""
    with visiting(browser, service.address) as visit:
        for target in (f"#main svg text:text-is('{DEVICE}')", "#main svg path[fill^='var(--s0)']"):
            visit.go("/data", "#main svg text")
            box = visit.page.locator(target).first.bounding_box()
            visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            if "path" in target:
                visit.page.wait_for_selector("text=/class \\d+: [\\d,]+ samples?$/")
            visit.page.evaluate(DRAWN)
            visit.page.mouse.down()
            visit.page.mouse.up()
            visit.page.wait_for_url("**/device/pi-*")


def test_what_the_mouse_is_over_stays_visible(service: Dashboard, browser: Any) -> None:
    """ECharts hides what the mouse is over if its colour is a CSS variable."""
    shapes = "#main svg path[fill^='var(--s']"
    with visiting(browser, service.address) as visit:
        for path in ("/data", f"/device/{DEVICE}"):
            visit.go(path, shapes)
            visit.page.evaluate(DRAWN)
            before = visit.page.locator(shapes).count()
            for box in [shape.bounding_box() for shape in visit.page.locator(shapes).all()[:5]]:
                visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
                visit.page.evaluate(DRAWN)
                assert visit.page.locator(shapes).count() == before, path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_message_of_a_lost_connection_can_be_read(service: Dashboard, browser: Any, scheme: str) -> None:
    with visiting(browser, service.address) as visit:
        visit.go("/log", "tbody tr")
        visit.page.wait_for_function("window.did_handshake")  # which hides the message
        visit.page.evaluate("window.socket.disconnect()")
        visit.look(1440, scheme)
        assert visit.page.get_by_text("Connection lost").is_visible()
        assert not visit.flaws()
