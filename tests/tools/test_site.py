"""The documentation site builds in strict mode, requests nothing from other hosts, and has every command, setting and message."""

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edge_fl.wire import messages
from edge_fl_devices.config import DeviceConfig
from edge_fl_server.recipes.recipe import CohortConfig, Recipe
from tests.browsing import visiting
from tools.site import reference
from tools.site.build import ROOT, build

OTHER_HOST = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"(?:@import\s*|url\()\s*['\"]?((?:[a-z]+:)?//[^'\")\s]+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="pip install 'edge-fl[docs]'")
    return build(tmp_path_factory.mktemp("docs"))


class Resources(HTMLParser):
    """Collects what a browser requests with a page: every address except that of a link to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(given.get("href", ""))
        self.found += [given[name] for name in ("src", "srcset", "poster", "data") if name in given]


def requested(html: str) -> list[str]:
    """The addresses of other hosts that a page requests."""
    parser = Resources()
    parser.feed(html)
    return [address for address in [*parser.found, *IN_STYLE.findall(html)] if OTHER_HOST.match(address)]


def test_pages_and_styles_request_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    found = {page.name: requested(page.read_text()) for page in pages}
    found |= {style.name: IN_STYLE.findall(style.read_text()) for style in site.rglob("*.css")}
    assert not {name: addresses for name, addresses in found.items() if addresses}


def test_requests_to_other_hosts_are_found() -> None:
    html = """<link rel=stylesheet href=//fonts.example/a.css><script src="https://cdn.example/a.js"></script>
    <style>@import "https://x.example/a.css"; p { background: url(//y.example/b.png) }</style>
    <a href="https://followed.example">x</a><img src="own.png"><link rel=canonical href="https://self.example/">"""
    assert [address.partition("//")[2].partition("/")[0] for address in requested(html)] == [
        "fonts.example",
        "cdn.example",
        "x.example",
        "y.example",
    ]


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"index.html", "404.html"}
    assert pages <= set(re.findall(r'href="(?:\./)?([^"#]+)"', home))


def test_a_broken_link_ends_the_build(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site.parent / "docs", tmp_path / "docs")
    shutil.copy(site.parent / "zensical.toml", tmp_path)
    with (tmp_path / "docs/glossary.md").open("a") as page:
        page.write("\n[broken](methods.md#no-such-heading)\n")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "anchor does not exist" in done.stdout + done.stderr


def test_reference_has_every_command_setting_message_and_function() -> None:
    pages = reference.pages()
    commands = pages["reference/commands.md"]
    assert {"edge-fl demo", "edge-fl device run", "edge-fl release keys rotate"} <= set(
        re.findall(r"^#+ `([^`]+)`", commands, re.MULTILINE)
    )
    assert "--until-idle" in commands
    settings = pages["reference/settings.md"]
    fields = [*Recipe.__struct_fields__, *CohortConfig.__struct_fields__, *DeviceConfig.__struct_fields__]
    assert not [name for name in fields if f"`{name}`" not in settings and f"`[{name}]`" not in settings]
    assert "| `deadline_s` | float, above 0 | `120.0` |" in settings
    assert "## Assignment\n" in pages["reference/messages.md"]
    assert not [
        f for f in messages.Report.__struct_fields__ if f"`{f}`" not in pages["reference/messages.md"]
    ]
    assert "### `run`" in pages["reference/python.md"] and "```text\n" in pages["reference/notebook.md"]


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_browser_requests_nothing_from_other_hosts(browser: Any, served: str, scheme: str) -> None:
    with visiting(browser, served, scheme=scheme) as visit:
        for page in ("/index.html", "/methods.html", "/reference/commands.html", "/reference/notebook.html"):
            visit.go(page, wait_for="h1")
            visit.page.wait_for_load_state("networkidle")
