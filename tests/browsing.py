"""A real browser and a real dashboard for tests: Debian's chromium, driven headless, and `edge-fl server dashboard` as a child process.

A `Visit` records what no page may do: log errors to the console, raise, or send a request to any other host. `flaws` lists what no page may
be: wider than its window, with a clipped column or labels of a chart that overlap, or hard to use according to axe-core.
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
  const shown = [...document.querySelectorAll(".top, .top *, #main, #main *")].filter((one) => one.checkVisibility?.());
  const named = (one) => `${one.tagName.toLowerCase()}.${one.getAttribute("class") ?? ""} "${one.textContent.trim().slice(0, 40)}"`;
  const hidden = (one) => ["hidden", "clip", ...(window_ >= 1440 ? ["auto", "scroll"] : [])].includes(getComputedStyle(one).overflowX);
  const cut = shown.filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0 && hidden(one) && !one.closest("svg"));
  const labels = [...document.querySelectorAll("#main svg")].flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter((one) => one.textContent.trim() && one.checkVisibility());
    const boxes = texts.map((one) => [one, one.getBoundingClientRect()]).filter(([, box]) => box.width > 0);
    const beyond = (box) => [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
    const outside = ([, box]) => Math.max(...beyond(box)) > 2;
    const apart = (a, b) => a.right - 1 <= b.left || b.right - 1 <= a.left || a.bottom - 2 <= b.top || b.bottom - 2 <= a.top;
    return [
      ...boxes.filter(outside).map(([one]) => `a label of a chart is cut off: ${named(one)}`),
      ...boxes.flatMap(([one, box], place) => boxes.slice(place + 1).filter(([, other]) => !apart(box, other))
        .map(([other]) => `labels of a chart overlap: ${named(one)}, ${named(other)}`)),
    ];
  });
  return [
    ...(wide > window_ ? [`${wide} pixels wide in a window of ${window_}`] : []),
    ...cut.map((one) => `${one.scrollWidth} pixels are cut off or scroll in ${one.clientWidth}: ${named(one)}`),
    ...labels.slice(0, 6),
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
    expected: str = ""

    def __post_init__(self) -> None:
        self.page.set_default_timeout(DEADLINE_S * 1000)
        self.page.on("console", lambda message: self._record(message.type, message.text))
        self.page.on("pageerror", lambda error: self._record("error", str(error)))
        self.page.on("request", self._requested)

    def go(self, path: str = "/", wait_for: str = ".sheet:visible", status: int = 200) -> None:
        """Open a page, which has this status, and wait for its contents."""
        self.expected = f"the server responded with a status of {status} " if status >= 400 else ""
        self.page.goto(self.home + path, wait_until="commit", timeout=DEADLINE_S * 1000)
        self.page.wait_for_selector(wait_for)

    def look(self, width: int, scheme: str) -> None:
        """Give the open page another width and colour scheme, and end its transitions."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(SETTLED)

    def flaws(self) -> list[str]:
        """What is cut off or, in a wide window, scrolls sideways; overlapping labels; a wrong background; axe-core's serious violations."""
        from axe_playwright_python.sync_playwright import Axe

        found = list(self.page.evaluate(LAYOUT))
        violations = Axe().run(self.page).response["violations"]
        return found + [
            f"{one['id']} ({one['impact']}): {', '.join(str(node['target'][0]) for node in one['nodes'][:4])}"
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]

    def _record(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not (self.expected and self.expected in text):
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
        assert not visit.complaints, "\n".join(visit.complaints)
    finally:
        context.close()
