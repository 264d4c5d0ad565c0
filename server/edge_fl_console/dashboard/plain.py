"""Pages without NiceGUI, in the style of the others: the sign-in, and what a request gets that no page answers."""

from html import escape
from http import HTTPStatus
from pathlib import Path

from starlette.responses import HTMLResponse

import edge_fl_server

STYLE = Path(edge_fl_server.__file__).with_name("style.css")  # that of reports, too
SCRIPT = Path(__file__).with_name("script.js")
MENU = {
    "/": "Overview",
    "/fleet": "Fleet",
    "/run": "Runs",
    "/releases": "Releases",
    "/data": "Data",
    "/log": "Log",
}
MEANINGS = {
    403: (
        "Not allowed",
        "The dashboard does not answer under this name, or to another site. Open it at the address that it printed.",
    ),
    404: ("No such page", "The dashboard has no page at this address."),
    500: ("This page failed", "The fleet is not affected. The log of the dashboard has the cause."),
}
"""Status -> title and text."""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title} · edge-fl</title>
<style>{style}</style>{script}</head><body><header class="top"><div class="parts">{menu}</div></header>
<main id="main"><div class="sheet empty"><h1>{title}</h1>{rest}</div></main></body></html>
"""


def menu(entry: str = "") -> str:
    """The product's name and the links to all pages; `entry` is the present one."""
    links = "".join(
        f'<a href="{path}"{" aria-current=page" if path == entry else ""}>{name}</a>'
        for path, name in MENU.items()
    )
    return f'<a class="brand" href="/">edge-fl</a><nav aria-label="Pages">{links}</nav>'


def page(title: str, rest: str, status: int, nonce: str = "", shown: str = "") -> HTMLResponse:
    """A page with a title and markup, below `shown`, the markup of the menu; with a `nonce` in the colours that the browser remembers."""
    script = f'<script nonce="{nonce}">{SCRIPT.read_text()}</script>' if nonce else ""
    shown = shown or '<span class="brand">edge-fl</span>'
    markup = PAGE.format(title=escape(title), style=STYLE.read_text(), script=script, menu=shown, rest=rest)
    return HTMLResponse(markup, status)


def failure(status: int, nonce: str) -> HTMLResponse:
    """What is wrong with a request, with links to all pages."""
    title, text = MEANINGS.get(
        status, (HTTPStatus(status).phrase, "The dashboard cannot answer this request.")
    )
    rest = f'<p>{escape(text)}</p><p>Status {status}. <a href="/">Back to Overview</a></p>'
    return page(title, rest, status, nonce, menu())
