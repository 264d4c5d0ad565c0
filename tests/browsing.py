"""A real browser and a real dashboard for tests: Debian's chromium, driven headless, and `edge-fl server dashboard` as a child process.

A `Visit` records what no page may do: log errors to the console, raise, or send a request to any other host. `flaws` lists what no page may
be: wider than its window, or hard to use according to axe-core.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")
DEADLINE_S = 60.0
LOOKS = ((1440, "light"), (1440, "dark"), (390, "light"), (390, "dark"))
"""Widths and colour schemes in which every page is tested."""
SETTLED = """async () => {
  await new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
  document.getAnimations().filter((one) => one.effect.getTiming().iterations < Infinity).forEach((one) => one.finish());
}"""
LAYOUT = r"""() => {
  const wide = document.documentElement.scrollWidth, window_ = window.innerWidth;
  const ground = getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).map(Number);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return [
    ...(wide > window_ ? [`${wide} pixels wide in a window of ${window_}`] : []),
    ...(window_ >= 1440 ? [...document.querySelectorAll(".q-table__middle")] : [])
      .filter((table) => table.scrollWidth > table.clientWidth)
      .map((table) => `a table of ${table.scrollWidth} pixels scrolls in ${table.clientWidth}`),
    ...(dark === Math.min(...ground) > 200 ? [`background rgb(${ground}) in the ${dark ? "dark" : "light"} scheme`] : []),
  ];
}"""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def run_coroutine(coroutine: Coroutine[Any, Any, Found]) -> Found:
    """Run it in a thread of its own: a browser that an earlier test opened occupies the event loop of this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def chromium() -> str | None:
    """The path of an installed browser; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Dashboard:
    """A dashboard in a process of its own."""

    address: str
    process: subprocess.Popen[str]

    @property
    def memory_mb(self) -> float:
        """Resident set size."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


@contextmanager
def dashboard(registry: Path, *options: str) -> Iterator[Dashboard]:
    """Run until the block ends, at the address that the command printed."""
    command = [
        sys.executable,
        "-m",
        "edge_fl",
        "server",
        "dashboard",
        "--database",
        str(registry),
        "--port",
        "0",
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env={**os.environ})
    output: list[str] = []
    assert process.stderr is not None
    try:
        output.append(process.stderr.readline().strip())
        assert output[0].startswith("http"), output
        drain = threading.Thread(target=lambda stream=process.stderr: output.extend(stream), daemon=True)
        drain.start()
        yield Dashboard(output[0].rstrip("/"), process)
    finally:
        process.terminate()
        process.wait(20)
        drain.join(5)
        process.stderr.close()


@dataclass
class Visit:
    """One tab of the browser."""

    page: Any
    home: str
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(DEADLINE_S * 1000)
        self.page.on("console", lambda message: self._record(message.type, message.text))
        self.page.on("pageerror", lambda error: self._record("error", str(error)))
        self.page.on("request", self._requested)

    def go(self, path: str = "/", wait_for: str = ".sheet:visible") -> None:
        """Open a page and wait for its contents."""
        self.page.goto(self.home + path, wait_until="commit", timeout=DEADLINE_S * 1000)
        self.page.wait_for_selector(wait_for)

    def look(self, width: int, scheme: str) -> None:
        """Give the open page another width and colour scheme, and end its transitions."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(SETTLED)

    def flaws(self) -> list[str]:
        """Horizontal overflow (of tables in a wide window), a background of the other colour scheme, axe-core's serious violations."""
        from axe_playwright_python.sync_playwright import Axe

        found = list(self.page.evaluate(LAYOUT))
        violations = Axe().run(self.page).response["violations"]
        return found + [
            f"{one['id']} ({one['impact']}): {', '.join(str(node['target'][0]) for node in one['nodes'][:4])}"
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]

    def _record(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.home, self.home.replace("http", "ws", 1), "data:", "blob:")):
            self.complaints.append(f"requested {request.url}")


@contextmanager
def visiting(browser: Any, home: str, *, width: int = 1440, scheme: str = "light") -> Iterator[Visit]:
    """Open a separate tab; any complaint at the end is an error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        visit = Visit(context.new_page(), home)
        yield visit
        assert not visit.complaints
    finally:
        context.close()
